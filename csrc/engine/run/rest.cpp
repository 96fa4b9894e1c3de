#include "engine/run/rest.h"

#include "engine/streams.h"
#include "engine/update/device_work.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

// False as well if nobody was asked.
bool says_yes(std::future<bool>& answer) {
  try {
    return answer.get();
  } catch (const std::future_error&) {
    return false;
  }
}

// Asks devices, until then, whether they have done what they were given: in a thread of its own, as
// it may have to wait for them.
std::future<bool> ask_devices(const std::vector<std::shared_ptr<DeviceWork>>& works,
                              std::chrono::steady_clock::time_point until) {
  std::promise<bool> rests;
  std::future<bool> answer = rests.get_future();
  const auto ask = [works, until](std::promise<bool> rests) {
    const auto is_done = [](const auto& work) {
      // A stream that is recorded is asked nothing.
      const std::unique_lock not_recording(recording_mutex(), std::try_to_lock);
      return not_recording.owns_lock() && work->is_done();
    };
    bool are_done = false;
    try {
      while (!(are_done = std::ranges::all_of(works, is_done)) &&
             std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const std::exception&) {  // the device has failed, and tells so whoever reads from it
    }
    rests.set_value(are_done);
  };
  try {
    std::thread(ask, std::move(rests)).detach();
  } catch (const std::system_error&) {  // no more threads: the promise, left alone, is an answer
  }
  return answer;
}

bool is_cut_off(const std::vector<std::unique_ptr<StageWorker>>& workers) {
  return std::ranges::any_of(workers,
                             [](const auto& worker) { return worker->wirings().is_cut_off(); });
}

}  // namespace

void come_to_rest(const std::vector<std::unique_ptr<StageWorker>>& workers,
                  std::chrono::steady_clock::time_point until) {
  std::vector<std::shared_ptr<DeviceWork>> works;
  for (const auto& worker : workers) {
    if (worker->streams().compute) {
      works.push_back(worker->updates().work());
    }
  }
  if (works.empty()) {
    return;
  }
  std::future<bool> rests = ask_devices(works, until);
  while (rests.valid()) {
    const bool is_answered =
        rests.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
    std::vector<std::int64_t> done;
    std::ranges::transform(works, std::back_inserter(done),
                           [](const auto& work) { return work->num_done(); });
    // What was done after that may mean nothing.
    if (is_cut_off(workers) || std::chrono::steady_clock::now() >= until) {
      break;
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->confirm(done[i]);
    }
    if (is_answered && says_yes(rests)) {
      return;
    }
  }
  bool is_any = false;                  // in one process devices wait for none but each other
  for (const auto& worker : workers) {  // before any device goes on
    is_any |= worker->wirings().tell_cut_off();
  }
  for (std::size_t i = 0; is_any && i < works.size(); ++i) {
    works[i]->cut_off();
  }
  for (const auto& worker : workers) {
    worker->wirings().cut_off();
  }
}

}  // namespace pd2
