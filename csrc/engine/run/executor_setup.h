// What an executor is made from: a rank's part of a schedule, and the stages that it runs.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/fault.h"
#include "engine/loss/run_loss.h"
#include "engine/run/run.h"
#include "engine/stage/stage.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pd2 {

struct StageSetup {
  int index = 0;  // the schedule's
  std::shared_ptr<Stage> stage;
  Forward forward;
  // Keep only what a microbatch's forward received, and call it again before its backward (arXiv
  // 1604.06174).
  bool recompute = false;
  bool recomputes_blocks = false;  // parts of the forward are called again by themselves
};

struct ExecutorSetup {
  Schedule schedule;
  int rank = 0;  // of the schedule's
  int replica = 0;
  int num_replicas = 1;
  // The first batches, each of which begins with an empty pipeline and all updates made: they have
  // no delay, whatever the schedule's is.
  std::int64_t warmup_batches = 0;
  std::uint64_t seed = 0;          // of the random numbers of forwards that are called again
  int num_threads = 0;             // intra-op threads of the executor's thread, 0: as they are
  std::vector<StageSetup> stages;  // those in the rank's lists, each once
  // Gets a run's loss, of one pipeline, when its last microbatch has been forwarded; must not take
  // long.
  std::function<void(std::int64_t run, RunLoss loss, int pipeline)> on_loss;
  // Calls `loop` in the executor's thread, with what forwards need in a thread; null: nothing.
  std::function<void(const std::function<void()>& loop)> run_thread;
  // failure_of() for exceptions that come out of a forward or a backward, also Python ones.
  std::function<Failure(const std::exception_ptr& error, int here)> describe = failure_of;
};

}  // namespace pd2
