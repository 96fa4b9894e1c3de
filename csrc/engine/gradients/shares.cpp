#include "engine/gradients/shares.h"

#include <algorithm>
#include <numeric>

namespace pd2 {
namespace {

// Bytes of the gradients of a bucket's parameters.
std::vector<std::int64_t> sizes_of(const GradientBuckets::Bucket& bucket,
                                   const GradAccumulator& gradients) {
  std::vector<std::int64_t> sizes;
  if (bucket.begin == gradients.packing().numel()) {  // flags alone
    return sizes;
  }
  for (std::size_t i = bucket.first; i < bucket.last; ++i) {
    sizes.push_back(gradients.packing().views()[i].numel * gradients.flat(0).element_size());
  }
  return sizes;
}

// How many parameters each rank takes, in order, if none may have more than `most` bytes.
std::vector<std::size_t> taken(const std::vector<std::int64_t>& sizes,
                               const std::vector<std::int64_t>& loads, std::int64_t most) {
  std::vector<std::size_t> counts;
  std::size_t next = 0;
  for (std::int64_t load : loads) {
    std::size_t count = 0;
    for (; next < sizes.size() && load + sizes[next] <= most; ++next, ++count) {
      load += sizes[next];
    }
    counts.push_back(count);
  }
  return counts;
}

std::vector<std::size_t> cut(const std::vector<std::int64_t>& sizes,
                             const std::vector<std::int64_t>& loads) {
  const auto takes_all = [&](std::int64_t most) {
    const std::vector<std::size_t> counts = taken(sizes, loads, most);
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0}) == sizes.size();
  };
  std::int64_t least = *std::ranges::max_element(loads);
  std::int64_t most = std::accumulate(sizes.begin(), sizes.end(), least);
  while (least < most) {
    const std::int64_t middle = least + (most - least) / 2;
    if (takes_all(middle)) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return taken(sizes, loads, least);
}

}  // namespace

std::vector<Share> share_out(const std::vector<GradientBuckets::Bucket>& buckets,
                             const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                             int num_ranks) {
  std::vector<std::vector<std::int64_t>> sizes;
  for (const GradientBuckets::Bucket& bucket : buckets) {
    sizes.push_back(sizes_of(bucket, *gradients[bucket.dtype]));
  }
  std::vector<std::size_t> order(buckets.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto largest = [&](std::size_t bucket) {
    return sizes[bucket].empty() ? 0 : *std::ranges::max_element(sizes[bucket]);
  };
  std::ranges::stable_sort(order, std::ranges::greater{}, largest);
  std::vector<std::int64_t> loads(num_ranks, 0);
  std::vector<std::vector<std::size_t>> counts(buckets.size());
  for (const std::size_t bucket : order) {
    counts[bucket] = cut(sizes[bucket], loads);
    auto size = sizes[bucket].begin();
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (std::size_t i = 0; i < counts[bucket][rank]; ++i) {
        loads[rank] += *size++;
      }
    }
  }
  std::vector<Share> shares;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const GradientBuckets::Bucket& bucket = buckets[b];
    const FlatPacking& packing = gradients[bucket.dtype]->packing();
    std::size_t first = bucket.first;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::size_t last = first + counts[b][rank];
      if (first < last) {
        const std::int64_t end =
            last < packing.views().size() ? packing.views()[last].offset : packing.numel();
        shares.push_back({bucket.dtype, rank, first, last, packing.views()[first].offset, end, b});
      }
      first = last;
    }
  }
  return shares;
}

}  // namespace pd2
