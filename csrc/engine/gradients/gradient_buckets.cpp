#include "engine/gradients/gradient_buckets.h"

#include "core/check.h"

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

void add_buckets(std::vector<GradientBuckets::Bucket>& buckets, const GradAccumulator& gradients,
                 std::size_t dtype, std::int64_t bucket_bytes) {
  const at::Tensor& flat = gradients.flat(0);
  const FlatPacking& packing = gradients.packing();
  const std::size_t count = packing.views().size();
  std::size_t last = count;
  std::int64_t end = packing.numel(), bytes = 0;
  for (std::size_t first = count; first-- > 0;) {
    const ParameterView& view = packing.views()[first];
    bytes += view.numel * flat.element_size();
    if (bytes >= bucket_bytes && first > 0) {
      buckets.push_back({dtype, first, last, view.offset, end, true});
      last = first;
      end = view.offset;
      bytes = 0;
    }
  }
  if (last == count) {
    buckets.push_back({dtype, 0, last, 0, flat.numel(), false});
    return;
  }
  buckets.push_back({dtype, 0, last, 0, end, true});
  if (packing.numel() < flat.numel()) {
    buckets.push_back({dtype, 0, count, packing.numel(), flat.numel(), false});
  }
}

}  // namespace

std::vector<GradientBuckets::Bucket> GradientBuckets::cut(
    const std::vector<std::unique_ptr<GradAccumulator>>& gradients, std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  for (std::size_t dtype = 0; dtype < gradients.size(); ++dtype) {
    add_buckets(buckets, *gradients[dtype], dtype, bucket_bytes);
  }
  return buckets;
}

GradientBuckets::GradientBuckets(const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                                 std::int64_t bucket_bytes, Begin begin)
    : begin_(std::move(begin)), buckets_(cut(gradients, bucket_bytes)) {
  if (std::ranges::none_of(buckets_, &Bucket::is_early)) {
    return;
  }
  for (std::size_t dtype = 0; dtype < gradients.size(); ++dtype) {
    times_.emplace_back(gradients[dtype]->packing().views().size());
    gradients[dtype]->on_added([this, dtype](std::size_t parameter) { came(dtype, parameter); });
  }
}

void GradientBuckets::begin_microbatch(std::size_t buffer, bool is_last) {
  buffer_ = buffer;
  is_last_ = is_last;
  forget_microbatch();
}

void GradientBuckets::forget_microbatch() {
  for (std::vector<Times>& of_dtype : times_) {
    for (Times& times : of_dtype) {
      times.in_this_microbatch = 0;
    }
  }
}

void GradientBuckets::came(std::size_t dtype, std::size_t parameter) {
  Times& times = times_[dtype][parameter];
  ++times.in_this_microbatch;
  if (!is_last_) {
    times.at_most = std::max(times.at_most, times.in_this_microbatch);
    return;
  }
  for (std::size_t bucket = 0; bucket < num_begun_; ++bucket) {
    const Bucket& begun = buckets_[bucket];
    PD2_CHECK(begun.dtype != dtype || parameter < begun.first || parameter >= begun.last,
              "gradients of one parameter in a microbatch: ", times.in_this_microbatch,
              ", most before: ", times.at_most,
              ": those that came are already added up or fetched; give bucket_cap_mb=math.inf");
  }
  while (num_begun_ < buckets_.size() && is_complete(buckets_[num_begun_]) &&
         begin_(num_begun_, buffer_)) {
    ++num_begun_;
  }
}

bool GradientBuckets::is_complete(const Bucket& bucket) const {
  const auto& times = times_[bucket.dtype];
  return bucket.is_early &&
         std::all_of(times.begin() + std::ptrdiff_t(bucket.first),
                     times.begin() + std::ptrdiff_t(bucket.last), [](const Times& of_one) {
                       return of_one.at_most > 0 && of_one.in_this_microbatch >= of_one.at_most;
                     });
}

void GradientBuckets::begin_rest(std::size_t buffer) {
  while (num_begun_ < buckets_.size() && begin_(num_begun_, buffer)) {
    ++num_begun_;
  }
}

void GradientBuckets::end_batch() {
  is_last_ = false;
  num_begun_ = 0;
  for (std::vector<Times>& of_dtype : times_) {
    for (Times& times : of_dtype) {
      times.at_most = std::max(times.at_most, times.in_this_microbatch);
    }
  }
}

}  // namespace pd2
