#include "engine/gradients/shares.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

namespace pd2 {
namespace {

// What no two ranks share: a parameter, or elements of one.
struct Atom {
  std::size_t parameter;
  std::int64_t begin;  // in the flat buffer; elements
  std::int64_t bytes;
};

// A multiple of what parameters are aligned to, in every dtype on every device.
constexpr std::int64_t kElements = 512;

std::vector<Atom> atoms_of(const GradientBuckets::Bucket& bucket, const GradAccumulator& gradients,
                           const MayCut& may_cut, std::int64_t most_bytes) {
  std::vector<Atom> atoms;
  if (bucket.begin > 0 && bucket.begin == gradients.packing().numel()) {  // flags alone
    return atoms;
  }
  const std::int64_t element = gradients.flat(0).element_size();
  const std::int64_t most = std::max(most_bytes / element / kElements, std::int64_t{1}) * kElements;
  for (std::size_t i = bucket.first; i < bucket.last; ++i) {
    const ParameterView& view = gradients.packing().views()[i];
    const bool is_cut = !may_cut.empty() && may_cut[bucket.dtype][i] && view.numel > most;
    const std::int64_t length = is_cut ? most : view.numel;
    std::int64_t begin = 0;
    do {
      const std::int64_t numel = std::min(length, view.numel - begin);
      atoms.push_back({i, view.offset + begin, numel * element});
      begin += numel;
    } while (begin < view.numel);
  }
  return atoms;
}

std::int64_t bytes_of(const std::vector<Atom>& atoms) {
  return std::transform_reduce(atoms.begin(), atoms.end(), std::int64_t{0}, std::plus<>(),
                               [](const Atom& atom) { return atom.bytes; });
}

// How many atoms each rank takes, in order, if none may have more than `most` bytes.
std::vector<std::size_t> taken(const std::vector<Atom>& atoms,
                               const std::vector<std::int64_t>& loads, std::int64_t most) {
  std::vector<std::size_t> counts;
  std::size_t next = 0;
  for (std::int64_t load : loads) {
    std::size_t count = 0;
    for (; next < atoms.size() && load + atoms[next].bytes <= most; ++next, ++count) {
      load += atoms[next].bytes;
    }
    counts.push_back(count);
  }
  return counts;
}

std::vector<std::size_t> cut(const std::vector<Atom>& atoms,
                             const std::vector<std::int64_t>& loads) {
  const auto takes_all = [&](std::int64_t most) {
    const std::vector<std::size_t> counts = taken(atoms, loads, most);
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0}) == atoms.size();
  };
  std::int64_t least = *std::ranges::max_element(loads);
  std::int64_t most = least + bytes_of(atoms);
  while (least < most) {
    const std::int64_t middle = least + (most - least) / 2;
    if (takes_all(middle)) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return taken(atoms, loads, least);
}

}  // namespace

std::vector<Share> share_out(const std::vector<GradientBuckets::Bucket>& buckets,
                             const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                             int num_ranks, const MayCut& may_cut) {
  std::int64_t all = 0;
  for (const auto& each : gradients) {
    all += each->packing().parameter_numel() * each->flat(0).element_size();
  }
  std::vector<std::vector<Atom>> atoms;
  for (const GradientBuckets::Bucket& bucket : buckets) {
    atoms.push_back(atoms_of(bucket, *gradients[bucket.dtype], may_cut, all / num_ranks / 16));
  }
  std::vector<std::size_t> order(buckets.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto largest = [&](std::size_t bucket) {
    return atoms[bucket].empty() ? 0 : std::ranges::max(atoms[bucket], {}, &Atom::bytes).bytes;
  };
  std::ranges::stable_sort(order, std::ranges::greater{}, largest);
  std::vector<std::int64_t> loads(num_ranks, 0);
  std::vector<std::vector<std::size_t>> counts(buckets.size());
  for (const std::size_t bucket : order) {
    counts[bucket] = cut(atoms[bucket], loads);
    auto atom = atoms[bucket].begin();
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (std::size_t i = 0; i < counts[bucket][rank]; ++i) {
        loads[rank] += (atom++)->bytes;
      }
    }
  }
  std::vector<Share> shares;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const GradientBuckets::Bucket& bucket = buckets[b];
    const FlatPacking& packing = gradients[bucket.dtype]->packing();
    auto first = atoms[b].begin();
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto last = first + static_cast<std::ptrdiff_t>(counts[b][rank]);
      if (first < last) {
        const std::int64_t end =
            last < atoms[b].end() ? last->begin : std::min(bucket.end, packing.numel());
        shares.push_back({bucket.dtype, rank, first->parameter, std::prev(last)->parameter + 1,
                          first->begin, end, b});
      }
      first = last;
    }
  }
  return shares;
}

}  // namespace pd2
