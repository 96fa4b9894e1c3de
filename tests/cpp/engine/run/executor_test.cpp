#include "engine/run/executor.h"

#include "core/check.h"
#include "core/schedule/generate.h"
#include "scalar_pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using testing::expect_trajectory;
using testing::ScalarPipeline;

TEST(ExecutorTest, EveryScheduleFollowsTheVersionRule) {
  for (const char* name : {"2bw", "2bw_eager", "1f1b", "gpipe"}) {
    for (int d = 1; d <= 4; ++d) {
      for (int m : {2 * d - 1, 2 * d}) {
        SCOPED_TRACE(name + (" d=" + std::to_string(d)) + " m=" + std::to_string(m));
        expect_trajectory(make_schedule(name, d, m), {});
      }
    }
  }
  for (int d = 1; d <= 5; ++d) {
    expect_trajectory(make_schedule("2bw", d, d), {});
    expect_trajectory(make_schedule("pipedream", d, 1), {});
  }
  for (const int p : {1, 2, 3}) {
    for (const int v : {1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << p << " ranks of " << v << " stages");
      expect_trajectory(make_schedule("interleaved", p * v, 2 * p, v), {});
      expect_trajectory(make_schedule("interleaved_2bw", p * v, 3 * p, v), {});
      expect_trajectory(make_schedule("looped_bfs", p * v, p + 1, v), {});
    }
  }
}

TEST(ExecutorTest, TwoPipelinesTrainOneModel) {
  for (const char* name : {"chimera", "chimera_doubled"}) {
    for (const int d : {2, 4}) {
      for (const int m : {2, d, 3 * d}) {
        SCOPED_TRACE(name + (" d=" + std::to_string(d)) + " m=" + std::to_string(m));
        expect_trajectory(make_schedule(name, d, m), {});
        expect_trajectory(make_schedule(name, d, m), {.before_step = 0b0110100});
      }
    }
  }
}

TEST(ExecutorTest, DrainingAnywhereChangesNothing) {
  for (const testing::Drains drains :
       {testing::Drains{.before_step = 0b1010101}, testing::Drains{.after_step = 0b0110100},
        testing::Drains{.before_step = 0b1111111, .after_step = 0b1111111}}) {
    expect_trajectory(make_schedule("2bw", 3, 4), drains);
    expect_trajectory(make_schedule("2bw_eager", 3, 5), drains);
    expect_trajectory(make_schedule("interleaved_2bw", 4, 4, 2), drains);
    expect_trajectory(make_schedule("pipedream", 3, 1), drains);
    expect_trajectory(make_schedule("pipedream", 4, 1), drains);
  }
}

TEST(ExecutorTest, SeveralRunsAreOneBatch) {
  for (const char* name : {"2bw", "2bw_eager", "2bw_split", "1f1b", "gpipe", "zero_bubble_2p",
                           "chimera", "pipedream"}) {
    SCOPED_TRACE(name);
    const bool is_pipedream = std::string(name) == "pipedream";
    const Schedule schedule = make_schedule(name, is_pipedream ? 4 : 2, is_pipedream ? 1 : 4);
    for (const testing::Drains drains :
         {testing::Drains{}, testing::Drains{.before_step = 0b11011010110}}) {
      expect_trajectory(schedule, drains, /*num_runs=*/11, /*runs_per_batch=*/3);
    }
  }
}

TEST(ExecutorTest, WarmupBatchesHaveNoDelay) {
  for (const int warmup : {1, 2, 4, 7, 9}) {
    for (const testing::Drains drains :
         {testing::Drains{}, {.before_step = 0b0010110}, {.after_step = 0b0101100}}) {
      SCOPED_TRACE(warmup);
      expect_trajectory(make_schedule("2bw", 3, 4), drains, 9, 1, warmup);
      expect_trajectory(make_schedule("2bw", 3, 4), drains, 12, 2, warmup);
      expect_trajectory(make_schedule("2bw_eager", 3, 5), drains, 9, 1, warmup);
      expect_trajectory(make_schedule("interleaved_2bw", 4, 4, 2), drains, 9, 1, warmup);
      expect_trajectory(make_schedule("pipedream", 4, 1), drains, 9, 1, warmup);
      expect_trajectory(make_schedule("1f1b", 3, 4), drains, 9, 1, warmup);
    }
  }
}

TEST(ExecutorTest, ACopyHasOneBatchesStateOnEveryStageWhileTrainingGoesOn) {
  for (const char* name : {"2bw", "2bw_eager", "1f1b", "interleaved_2bw", "pipedream"}) {
    SCOPED_TRACE(name);
    const bool is_pipedream = std::string(name) == "pipedream";
    const int per_rank = std::string(name) == "interleaved_2bw" ? 2 : 1;
    const Schedule schedule =
        make_schedule(name, per_rank == 2 ? 4 : 3, is_pipedream ? 1 : 6, per_rank);
    const std::vector<double> weights(schedule.depth(), 1.1);
    constexpr int kBatches = 6;
    std::vector<std::vector<double>> made;  // by version and stage
    ScalarPipeline drained(schedule, weights);
    for (int t = 0; t <= kBatches; ++t) {
      std::vector<double>& newest = made.emplace_back();
      for (int i = 0; i < schedule.num_stages; ++i) {
        newest.push_back(drained.newest(i));
      }
      drained.train(t);
      drained.step(t, 1e-4);
      drained.drain();
    }
    std::mutex mutex;
    std::map<std::pair<int, int>, std::vector<double>> copied;  // by version and stage
    {
      ScalarPipeline pipeline(schedule, weights);
      for (int t = 0; t <= kBatches; ++t) {
        pipeline.train(t);
        pipeline.step(t, 1e-4);
        for (int i = 0; i < schedule.num_stages; ++i) {
          Executor& executor = *pipeline.executors[schedule.placement[i]];
          executor.submit_copy(i, t + 1, [&, i, version = t + 1] {
            Stage& stage = *pipeline.stages[i];
            std::vector<double> values;
            for (int time = 0; time < 2; ++time) {
              for (int v = std::max(0, version - schedule.delay[i]); v <= version; ++v) {
                values.push_back(stage.slots().weight(stage.versions().slot(v), 0).item<double>());
              }
              std::this_thread::sleep_for(std::chrono::milliseconds(5));
            }
            const std::lock_guard lock(mutex);
            copied[{version, i}] = values;
          });
        }
      }
      pipeline.drain();
    }
    EXPECT_EQ(copied.size(), (kBatches + 1) * schedule.num_stages);
    for (const auto& [key, values] : copied) {
      const auto [version, i] = key;
      if (version > kBatches) {
        continue;
      }
      std::vector<double> expected;
      for (int time = 0; time < 2; ++time) {
        for (int v = std::max(0, version - schedule.delay[i]); v <= version; ++v) {
          expected.push_back(made[v][i]);
        }
      }
      EXPECT_EQ(values, expected) << "W(" << version << ") of stage " << i;
    }
  }
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
                                       ? action.run + 1
                                       : std::max<std::int64_t>(action.run - 1, 0);
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
