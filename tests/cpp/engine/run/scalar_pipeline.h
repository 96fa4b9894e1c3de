// A pipeline in one process without Python, and what training it must give.
#pragma once

#include "core/check.h"
#include "core/schedule/unroll.h"
#include "engine/channels/local_channel.h"
#include "engine/run/executor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pd2::testing {

using namespace std::chrono_literals;

// A pipeline of stages that multiply by one scalar weight, without Python. Microbatch j of run k
// enters as (k + 1) * (j + 1); the loss is the product over m. Of two pipelines the second one has
// the second half of the microbatches, and copies of the weights.
class ScalarPipeline {
 public:
  ScalarPipeline(const Schedule& schedule, const std::vector<double>& weights,
                 int runs_per_batch = 1, int warmup_batches = 0)
      : schedule_(schedule), runs_per_batch_(runs_per_batch), fault_(std::make_shared<Fault>()) {
    const int d = schedule.depth();
    std::vector<std::shared_ptr<CopySum>> sums(d);
    for (auto& sum : sums) {
      sum = schedule.num_pipelines > 1 ? std::make_shared<CopySum>() : nullptr;
    }
    std::vector<std::vector<StageSetup>> setups(schedule.ranks.size());
    std::vector<std::shared_ptr<LocalChannel>> down, up;
    for (int i = 0; i + 1 < schedule.num_stages; ++i) {
      down.push_back(std::make_shared<LocalChannel>(at::kCPU, at::kCPU));
      up.push_back(std::make_shared<LocalChannel>(at::kCPU, at::kCPU));
    }
    for (int i = 0; i < schedule.num_stages; ++i) {
      const at::Tensor initial = at::full({1}, weights[i % d], at::kDouble);
      StageOptions options{.num_versions = schedule.num_versions[i]};
      if (sums[i % d]) {
        options.gradients.others = CopySumEnd{sums[i % d], schedule.pipeline(i)};
      }
      auto stage = std::make_shared<Stage>(std::vector<at::Tensor>{initial},
                                           std::vector<std::string>{"w"}, std::move(options));
      stage->step_place().set_optimizers({{OptimizerKind::kSgd, {0}}});
      std::vector<at::Tensor> slots;
      for (int slot = 0; slot < stage->slots().num_slots(); ++slot) {
        slots.push_back(stage->slots().weight(slot, 0).detach().requires_grad_());
        stage->attach(0, slots.back());
      }
      setups[schedule.placement[i]].push_back(
          {.index = i, .stage = stage, .forward = [this, slots, i](ForwardCall call) {
             return forward(slots, i, call);
           }});
      stages.push_back(stage);
    }
    for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      ExecutorSetup setup;
      setup.schedule = schedule;
      setup.rank = static_cast<int>(rank);
      setup.warmup_batches = warmup_batches;
      setup.stages = std::move(setups[rank]);
      setup.on_loss = [this](std::int64_t run, RunLoss loss, int) {
        const std::lock_guard lock(losses_mutex_);
        losses[run] += loss.sum().item<double>();
      };
      executors.push_back(std::make_unique<Executor>(std::move(setup), fault_));
      executors.back()->record(true);
    }
    for (int i = 0; i < schedule.num_stages; ++i) {
      Wiring wiring;
      if (!schedule.is_first(i)) {
        wiring.inbound.push_back({down[i - 1], up[i - 1]});
      }
      if (!schedule.is_last(i)) {
        wiring.outbound.push_back({up[i], down[i]});
      }
      executors[schedule.placement[i]]->worker(i).set_wiring(0, std::move(wiring));
    }
  }

  // Waits first, as a caller does who keeps no more runs waiting than the schedule needs.
  void train(std::int64_t run) {
    const auto unfinished = static_cast<std::size_t>(std::max(most_batches_behind(schedule_), 1));
    while (tickets_.size() > unfinished) {
      wait_for(tickets_.front());
      tickets_.pop_front();
    }
    const std::vector<LayoutId> layouts(schedule_.total_microbatches(), 0);
    tickets_.emplace_back();
    for (auto& executor : executors) {
      tickets_.back().push_back(executor->submit_run({.id = run,
                                                      .layouts = layouts,
                                                      .batch = run / runs_per_batch_,
                                                      .begins_batch = run % runs_per_batch_ == 0,
                                                      .ends_batch = ends_batch(run),
                                                      .num_averaged = runs_per_batch_}));
    }
  }
  bool ends_batch(std::int64_t run) const { return (run + 1) % runs_per_batch_ == 0; }
  // After the batch's last run.
  void step(std::int64_t run, double lr) {
    GroupOptions group;
    group.sgd.lr = lr;
    for (int rank = 0; rank < static_cast<int>(executors.size()); ++rank) {
      for (const int i : update_order(schedule_, rank)) {
        executors[rank]->submit_update(i, run, [group](Stage& stage) {
          stage.write_next({&group, 1});
        });
      }
    }
  }
  void drain() {
    tickets_.clear();
    std::vector<Executor::Ticket> last;
    for (auto& executor : executors) {
      executor->submit_drain();
      last.push_back(executor->last_ticket());
    }
    wait_for(last);
  }
  double newest(int stage) const {
    return stages[stage]
        ->slots()
        .weight(stages[stage]->versions().slot(stages[stage]->versions().newest()), 0)
        .item<double>();
  }

  std::vector<std::shared_ptr<Stage>> stages;
  std::vector<std::unique_ptr<Executor>> executors;
  std::map<std::int64_t, double> losses;  // by run
  std::int64_t fail_at = -1;              // run whose microbatch 1 fails on stage 1

 private:
  void wait_for(const std::vector<Executor::Ticket>& tickets) {
    for (std::size_t rank = 0; rank < executors.size(); ++rank) {
      for (int waits = 0; !executors[rank]->wait_for(tickets[rank], 100ms); ++waits) {
        PD2_CHECK(waits < 300, "rank ", rank, " waits for more than 30 s");
      }
    }
  }

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
  const int runs_per_batch_;
  std::shared_ptr<Fault> fault_;
  std::mutex losses_mutex_;
  std::deque<std::vector<Executor::Ticket>> tickets_;  // of the runs since the drain, by rank
};

// After which runs the pipeline is drained: bit k stands for run k.
struct Drains {
  unsigned before_step = 0;  // between the backward and the step
  unsigned after_step = 0;
};

// The definition: batch t's loss and gradients at W(max(t - delay, 0)), applied to W(t), where
// every stage has its delay, and its number of microbatches that have one; in the warm-up at W(t),
// which the delay then counts from. A batch's gradient is the mean of its runs'.
inline void expect_trajectory(const Schedule& schedule, Drains drains, int num_runs = 7,
                              int runs_per_batch = 1, int warmup_batches = 0) {
  const int d = schedule.depth(), m = schedule.total_microbatches();
  std::vector<double> initial;
  for (int i = 0; i < d; ++i) {
    initial.push_back(1 + 0.25 * i);
  }
  ScalarPipeline pipeline(schedule, initial, runs_per_batch, warmup_batches);
  std::vector<std::vector<double>> versions{initial};
  std::vector<double> losses;
  constexpr double kLr = 1e-4;
  std::vector<double> gradients(d);
  for (int k = 0; k < num_runs; ++k) {
    const int t = k / runs_per_batch;
    const int last_without_delay = std::min(t, std::max(warmup_batches - 1, 0));
    const auto read = [&](int i, int microbatch) {
      const bool is_late = schedule.late_forwards.empty() ||
                           (k % runs_per_batch == 0 && microbatch < schedule.late_forwards[i]);
      const int delay = is_late ? schedule.delay[i] : 0;
      return versions[std::max(t - delay, last_without_delay)][i];
    };
    losses.push_back(0);
    for (int j = 0; j < m; ++j) {
      const int microbatch = j % schedule.num_microbatches;  // of two pipelines each has its own
      const double input = (k + 1.0) * (j + 1.0) / m;
      double loss = input;
      for (int i = 0; i < d; ++i) {
        loss *= read(i, microbatch);
        double gradient = input / runs_per_batch;
        for (int other = 0; other < d; ++other) {
          gradient *= other == i ? 1 : read(other, microbatch);
        }
        gradients[i] += gradient;
      }
      losses.back() += loss;
    }
    pipeline.train(k);
    if (drains.before_step >> k & 1) {
      pipeline.drain();
    }
    if (pipeline.ends_batch(k)) {
      versions.push_back(versions.back());
      for (int i = 0; i < d; ++i) {
        versions.back()[i] -= kLr * std::exchange(gradients[i], 0);
      }
      pipeline.step(k, kLr);
    }
    if (drains.after_step >> k & 1) {
      pipeline.drain();
    }
  }
  pipeline.drain();
  ASSERT_EQ(pipeline.losses.size(), losses.size());
  for (int k = 0; k < num_runs; ++k) {
    EXPECT_NEAR(pipeline.losses[k], losses[k], 1e-9 * std::abs(losses[k])) << "run " << k;
  }
  const bool is_filled =
      drains.before_step == 0 && drains.after_step == 0 &&
      num_runs >= runs_per_batch * warmup_batches + most_batches_behind(schedule) + 2;
  for (int i = 0; i < schedule.num_stages; ++i) {
    const double weight = versions.back()[i % d];
    EXPECT_EQ(pipeline.newest(i), pipeline.newest(schedule.twin(i).value_or(i)));
    EXPECT_NEAR(pipeline.newest(i), weight, 1e-9 * std::abs(weight)) << "stage " << i;
    EXPECT_LE(pipeline.stages[i]->versions().most_live_versions(), schedule.num_versions[i]);
    const StageWorker& worker = pipeline.executors[schedule.placement[i]]->worker(i);
    const int most = max_in_flight(schedule, i);
    EXPECT_LE(worker.most_in_flight(), most) << "stage " << i;
    if (is_filled) {
      EXPECT_EQ(worker.most_in_flight(), most) << "stage " << i;
    }
    EXPECT_EQ(worker.most_bytes_in_flight(), 8 * worker.most_in_flight()) << "stage " << i;
  }
}

}  // namespace pd2::testing
