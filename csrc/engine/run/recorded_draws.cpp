#include "engine/run/recorded_draws.h"

#include "core/check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace pd2 {
namespace {

constexpr auto kChanges = "the number of its draws changes";

}  // namespace

RecordedDraws::RecordedDraws(DeviceGraph& graph, c10::Device device, std::int64_t count,
                             std::uint64_t key)
    : graph_(graph),
      key_(key),
      // Not in the graph's memory, which the graph itself may write to before they are read.
      seeds_(at::empty({count, 2}, at::TensorOptions(at::kLong).device(device))) {}

at::Generator RecordedDraws::next(const RandomPlace& place) {
  const auto number = static_cast<std::int64_t>(places_.size());
  PD2_CHECK(number < seeds_.size(0), kChanges);
  PD2_CHECK(place.key == key_, "it draws random numbers of another microbatch");
  places_.push_back(place);
  return graph_.generator(seeds_.select(0, number));
}

void RecordedDraws::check() const {
  PD2_CHECK(static_cast<std::int64_t>(places_.size()) == seeds_.size(0), kChanges);
  // A replay calls no code, so the place that was read stays the recorded microbatch's.
  PD2_CHECK(places_.empty() || !has_given_place_,
            "it draws random numbers and keeps its place among them, as a checkpoint does");
}

void RecordedDraws::seed(std::uint64_t key) const {
  if (places_.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  // New memory each time: torch keeps it until the device has read it.
  const at::Tensor staged =
      at::empty(seeds_.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
  auto* next = staged.mutable_data_ptr<std::int64_t>();
  for (RandomPlace place : places_) {
    place.key = key;
    *next++ = static_cast<std::int64_t>(place.take());
    *next++ = 0;
  }
  seeds_.copy_(staged, /*non_blocking=*/true);
}

}  // namespace pd2
