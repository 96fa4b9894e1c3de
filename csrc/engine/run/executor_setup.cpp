#include "engine/run/executor_setup.h"

#include "engine/run/private_generator.h"

#include <utility>

namespace pd2 {

std::vector<std::unique_ptr<StageWorker>> make_workers(ExecutorSetup& setup) {
  const Schedule& schedule = setup.schedule;
  std::vector<std::unique_ptr<StageWorker>> workers;
  for (StageSetup& each : std::exchange(setup.stages, {})) {
    StageWorkerOptions options;
    options.stage = each.index;
    options.num_replicas = setup.num_replicas;
    options.num_microbatches = schedule.num_microbatches;
    options.first_microbatch = schedule.number_in_batch(each.index, 0);
    options.delay = schedule.delay.at(each.index);
    options.warmup_batches = setup.warmup_batches;
    options.recompute = each.recompute;
    options.recomputes_blocks = each.recomputes_blocks;
    options.seed = mix_seed(setup.seed, setup.replica);
    options.forward = std::move(each.forward);
    options.on_loss = [on_loss = setup.on_loss, pipeline = schedule.pipeline(each.index)](
                          std::int64_t run, RunLoss loss) {
      on_loss(run, std::move(loss), pipeline);
    };
    workers.push_back(std::make_unique<StageWorker>(std::move(options), std::move(each.stage)));
  }
  return workers;
}

}  // namespace pd2
