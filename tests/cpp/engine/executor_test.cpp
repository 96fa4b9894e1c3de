#include "engine/executor.h"

#include "core/check.h"
#include "core/generate.h"
#include "core/unroll.h"
#include "engine/local_channel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

// A pipeline of stages that multiply by one scalar weight, without Python. Microbatch j of batch t
// enters as (t + 1) * (j + 1); the loss is the product over m. Of two pipelines the second one has
// the second half of the microbatches, and copies of the weights.
class ScalarPipeline {
 public:
  ScalarPipeline(const Schedule& schedule, const std::vector<double>& weights)
      : schedule_(schedule), fault_(std::make_shared<Fault>()) {
    const int d = schedule.depth();
    std::vector<std::shared_ptr<CopySum>> sums(d);
    for (auto& sum : sums) {
      sum = schedule.num_pipelines > 1 ? std::make_shared<CopySum>() : nullptr;
    }
    std::vector<std::vector<std::unique_ptr<StageWorker>>> workers(schedule.ranks.size());
    std::vector<std::shared_ptr<LocalChannel>> down, up;
    for (int i = 0; i + 1 < schedule.num_stages; ++i) {
      down.push_back(std::make_shared<LocalChannel>(at::kCPU));
      up.push_back(std::make_shared<LocalChannel>(at::kCPU));
    }
    for (int i = 0; i < schedule.num_stages; ++i) {
      const at::Tensor initial = at::full({1}, weights[i % d], at::kDouble);
      auto stage = std::make_shared<Stage>(std::vector<at::Tensor>{initial},
                                           std::vector<std::string>{"w"}, schedule.num_versions[i],
                                           nullptr, CopySumEnd{sums[i % d], schedule.pipeline(i)});
      stage->set_optimizer(OptimizerKind::kSgd, {0});
      std::vector<at::Tensor> slots;
      for (int slot = 0; slot < schedule.num_versions[i]; ++slot) {
        slots.push_back(stage->weight(slot, 0).detach().requires_grad_());
        stage->attach(0, slots.back());
      }
      StageWorkerOptions options;
      options.stage = i;
      options.num_microbatches = schedule.num_microbatches;
      options.delay = schedule.delay[i];
      options.first_microbatch = schedule.number_in_batch(i, 0);
      options.forward = [this, slots, i](ForwardCall call) { return forward(slots, i, call); };
      options.on_loss = [this](std::int64_t, BatchLoss loss) {
        const std::lock_guard lock(losses_mutex);
        losses.push_back(loss.sum().item<double>());
      };
      auto worker = std::make_unique<StageWorker>(std::move(options), stage);
      Wiring wiring;
      if (!schedule.is_first(i)) {
        wiring.inbound.push_back({i - 1, down[i - 1], up[i - 1]});
      }
      if (!schedule.is_last(i)) {
        wiring.outbound.push_back({i + 1, down[i], up[i]});
      }
      worker->set_wiring(0, std::move(wiring));
      workers[schedule.placement[i]].push_back(std::move(worker));
      stages.push_back(stage);
    }
    for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      ExecutorOptions options;
      options.rank = static_cast<int>(rank);
      options.num_microbatches = schedule.num_microbatches;
      options.num_pipelines = schedule.num_pipelines;
      options.depth = d;
      options.actions = schedule.ranks[rank];
      options.describe = [](std::exception_ptr error) -> std::string {
        try {
          std::rethrow_exception(error);
        } catch (const std::exception& known) {
          return known.what();
        }
      };
      executors.push_back(
          std::make_unique<Executor>(std::move(options), std::move(workers[rank]), fault_));
      executors.back()->record(true);
    }
  }

  void train(std::int64_t batch) {
    const std::vector<LayoutId> layouts(schedule_.total_microbatches(), 0);
    for (auto& executor : executors) {
      executor->submit_batch({batch, 0, layouts, {}});
    }
  }
  void step(std::int64_t batch, double lr) {
    GroupOptions group;
    group.sgd.lr = lr;
    for (int rank = 0; rank < static_cast<int>(executors.size()); ++rank) {
      for (const int i : update_order(schedule_, rank)) {
        executors[rank]->submit_update(i, batch, [group](Stage& stage) {
          stage.step({&group, 1});
        });
      }
    }
  }
  void drain() {
    for (auto& executor : executors) {
      executor->submit_drain();
    }
    for (auto& executor : executors) {
      while (!executor->wait_for(executor->last_ticket(), 100ms)) {
      }
    }
  }
  double newest(int stage) const {
    return stages[stage]
        ->weight(stages[stage]->versions().slot(stages[stage]->versions().newest()), 0)
        .item<double>();
  }

  std::vector<std::shared_ptr<Stage>> stages;
  std::vector<std::unique_ptr<Executor>> executors;
  std::mutex losses_mutex;
  std::vector<double> losses;
  std::int64_t fail_at = -1;  // batch whose microbatch 1 fails on stage 1

 private:
  ForwardResult forward(const std::vector<at::Tensor>& slots, int stage, ForwardCall& call) {
    PD2_CHECK(!(call.run == fail_at && call.microbatch == 1 && stage == 1), "on purpose");
    const int number = schedule_.number_in_batch(stage, call.microbatch);
    const double entering = static_cast<double>((call.run + 1) * (number + 1));
    const at::Tensor input = schedule_.is_first(stage) ? at::full({1}, entering, at::kDouble)
                                                       : call.inbound[0].tensors[0];
    const at::Tensor output = input * slots[call.slot];
    ForwardResult result;
    result.bytes_kept = 8;
    if (schedule_.is_last(stage)) {
      result.loss = (output / schedule_.total_microbatches()).sum();
    } else {
      Message message;
      message.tensors = {output};
      result.outbound.push_back(std::move(message));
    }
    return result;
  }

  const Schedule schedule_;
  std::shared_ptr<Fault> fault_;
};

// The definition: batch t's loss and gradients at W(max(t - delay, 0)), applied to W(t), where
// every stage has its delay.
void expect_trajectory(const Schedule& schedule, int drain_every) {
  const int d = schedule.depth(), m = schedule.total_microbatches();
  std::vector<double> initial;
  for (int i = 0; i < d; ++i) {
    initial.push_back(1 + 0.25 * i);
  }
  ScalarPipeline pipeline(schedule, initial);
  std::vector<std::vector<double>> versions{initial};
  constexpr double kLr = 1e-3;
  for (int t = 0; t < 7; ++t) {
    const auto read = [&](int i) { return versions[std::max(t - schedule.delay[i], 0)][i]; };
    double inputs = 0;
    for (int j = 0; j < m; ++j) {
      inputs += (t + 1.0) * (j + 1.0) / m;
    }
    std::vector<double> next = versions.back();
    for (int i = 0; i < d; ++i) {
      double gradient = inputs;
      for (int k = 0; k < d; ++k) {
        gradient *= k == i ? 1 : read(k);
      }
      next[i] -= kLr * gradient;
    }
    versions.push_back(next);
    pipeline.train(t);
    if (drain_every > 0 && t % drain_every == 0) {
      pipeline.drain();  // between the backward and the step, too
    }
    pipeline.step(t, kLr);
  }
  pipeline.drain();
  ASSERT_EQ(pipeline.losses.size(), 7u * schedule.num_pipelines);
  for (int i = 0; i < schedule.num_stages; ++i) {
    EXPECT_NEAR(pipeline.newest(i), versions.back()[i % d], 1e-9) << "stage " << i;
    EXPECT_EQ(pipeline.newest(i), pipeline.newest(schedule.twin(i).value_or(i)));
    EXPECT_LE(pipeline.stages[i]->versions().most_live_versions(), schedule.num_versions[i]);
  }
}

TEST(ExecutorTest, EveryScheduleFollowsTheVersionRule) {
  for (const char* name : {"2bw", "2bw_eager", "1f1b", "gpipe"}) {
    for (int d = 1; d <= 4; ++d) {
      for (int m : {2 * d - 1, 2 * d}) {
        SCOPED_TRACE(name + (" d=" + std::to_string(d)) + " m=" + std::to_string(m));
        expect_trajectory(make_schedule(name, d, m), 0);
      }
    }
  }
  for (int d = 1; d <= 5; ++d) {
    expect_trajectory(make_schedule("2bw", d, d), 0);
    expect_trajectory(make_schedule("pipedream", d, 1), 0);
  }
  for (const int p : {1, 2, 3}) {
    for (const int v : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << p << " ranks of " << v << " stages");
      expect_trajectory(make_schedule("interleaved", p * v, 2 * p, v), 0);
      expect_trajectory(make_schedule("interleaved_2bw", p * v, 3 * p, v), 0);
      expect_trajectory(make_schedule("looped_bfs", p * v, p + 1, v), 0);
    }
  }
}

TEST(ExecutorTest, TwoPipelinesTrainOneModel) {
  for (const char* name : {"chimera", "chimera_doubled"}) {
    for (const int d : {2, 4}) {
      for (const int m : {2, d, 3 * d}) {
        SCOPED_TRACE(name + (" d=" + std::to_string(d)) + " m=" + std::to_string(m));
        expect_trajectory(make_schedule(name, d, m), 0);
        expect_trajectory(make_schedule(name, d, m), 2);
      }
    }
  }
}

TEST(ExecutorTest, DrainingAnywhereChangesNothing) {
  expect_trajectory(make_schedule("2bw", 3, 4), 1);
  expect_trajectory(make_schedule("2bw", 3, 4), 2);
  expect_trajectory(make_schedule("2bw_eager", 3, 5), 2);
  expect_trajectory(make_schedule("interleaved_2bw", 4, 4, 2), 2);
  expect_trajectory(make_schedule("pipedream", 3, 1), 1);
  expect_trajectory(make_schedule("pipedream", 4, 1), 3);
}

TEST(ExecutorTest, ALogNamesTheVersionThatEachMicrobatchRead) {
  ScalarPipeline pipeline(make_schedule("2bw", 2, 2), {1, 1});
  for (int t = 0; t < 4; ++t) {
    pipeline.train(t);
    pipeline.step(t, 0.01);
  }
  pipeline.drain();
  for (auto& executor : pipeline.executors) {
    const auto record = executor->take_record();
    EXPECT_EQ(record.size(), 4u * (2 + 2 + 1));
    for (const ExecutedAction& action : record) {
      const std::int64_t version = action.kind == ActionKind::kUpdate
                                       ? action.batch + 1
                                       : std::max<std::int64_t>(action.batch - 1, 0);
      EXPECT_EQ(action.version, version);
      EXPECT_LE(action.start, action.end);
    }
  }
}

TEST(ExecutorTest, InFlightMicrobatchesAndTheirBytesAreCounted) {
  const Schedule schedule = make_schedule("2bw", 3, 5);
  ScalarPipeline pipeline(schedule, {1, 1, 1});
  for (int t = 0; t < 3; ++t) {
    pipeline.train(t);
    pipeline.step(t, 0.01);
  }
  pipeline.drain();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pipeline.executors[i]->worker(i).most_in_flight(), max_in_flight(schedule, i));
    EXPECT_EQ(pipeline.executors[i]->worker(i).most_bytes_in_flight(),
              8 * max_in_flight(schedule, i));
  }
}

TEST(ExecutorTest, AFailureEndsAllStagesAndNamesWhereItHappened) {
  ScalarPipeline pipeline(make_schedule("2bw", 3, 4), {1, 1, 1});
  pipeline.fail_at = 2;
  try {
    for (int t = 0; t < 6; ++t) {
      pipeline.train(t);
      pipeline.step(t, 0.01);
    }
    pipeline.drain();
    FAIL() << "no failure";
  } catch (const PipelineError& error) {
    EXPECT_STREQ(error.what(), "stage 1, batch 2, microbatch 1, forward: on purpose");
  }
  for (auto& executor : pipeline.executors) {
    EXPECT_THROW(executor->submit_drain(), PipelineError);
  }
}

TEST(ExecutorTest, ClosingWithMicrobatchesInFlightReturns) {
  ScalarPipeline pipeline(make_schedule("2bw", 3, 4), {1, 1, 1});
  pipeline.train(0);  // its last backwards need the next batch or a drain
  for (auto& executor : pipeline.executors) {
    executor->close();
  }
}

}  // namespace
}  // namespace pd2
