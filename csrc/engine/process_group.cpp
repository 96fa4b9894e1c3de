#include "engine/process_group.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace pd2 {

namespace {

constexpr auto kMoment = std::chrono::milliseconds(500);

}  // namespace

void release_group(c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) {
    return;
  }
  std::promise<void> ended;
  const std::future<void> is_ended = ended.get_future();
  std::thread([group = std::move(group), ended = std::move(ended)]() mutable {
    group.reset();
    ended.set_value();
  }).detach();
  is_ended.wait_for(kMoment);
}

}  // namespace pd2
