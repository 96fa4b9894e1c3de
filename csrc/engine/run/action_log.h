// What stages do and when: for timelines, and for torch's profiler.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/streams.h"

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace pd2 {

// An executed action, for logs and timelines. Times are seconds of the steady clock, which all
// processes of one machine share; of a device, when it began and ended the action. A backward that
// sends gradients ends when it sends them, although the gradients of the first weights may still be
// added then. A forward that was called again is a kRecompute.
struct ExecutedAction {
  int stage;
  ActionKind kind;
  std::int64_t run;  // of an update: the last run of its batch
  int microbatch;
  std::int64_t version;  // read by F and B, written by U
  double start;
  double end;
  // On a device: timed, and what start and end are made from once it has come there.
  Fence begun{};
  Fence ended{};
};

// The actions that were executed while it was on. Any thread may begin and end one; one thread
// calls the others.
class ActionLog {
 public:
  // Whether actions are kept from now on. Waits for the copies of inputs to these devices.
  void record(bool on, const std::vector<const StageStreams*>& streams);
  std::vector<ExecutedAction> take();

  // What begins now, on the calling thread's stream of the device.
  void begin(ExecutedAction& action, c10::Device device) const;
  // `sent_at`: when it counts as ended, if that was before.
  void end(ExecutedAction action, std::optional<double> sent_at = std::nullopt);

 private:
  // A moment that the host's clock and a device's know, from which the device's events count.
  struct Base {
    Fence fence;
    double time;
  };

  std::atomic<bool> is_on_ = false;
  std::unordered_map<c10::Device, Base> bases_;  // since record(true)
  std::mutex mutex_;
  std::vector<ExecutedAction> record_;
};

// While it lives, profilers that record this thread show a range: "pd2 stage 1 forward batch 3
// microbatch 2 version 2". If none records, it costs one look at the thread's callbacks.
class ActionRange {
 public:
  // `evaluates`: the range of an evaluation, not of its run's batch.
  explicit ActionRange(const ExecutedAction& action, bool evaluates = false);

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

}  // namespace pd2
