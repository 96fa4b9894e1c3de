#include "planner/plan/period.h"

#include "core/schedule/generate.h"
#include "core/schedule/schedule.h"
#include "raises.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

namespace pd2 {
namespace {

using testing::value_error;

// Every shape up to 8 ranks, 3 stages a rank and 20 microbatches, or nothing if it is illegal.
template <typename Call>
void for_each_shape(Call&& call) {
  for (const std::string& name : planned_schedules()) {
    for (int p = 1; p <= 8; ++p) {
      for (int v = 1; v <= 3; ++v) {
        for (int m = 1; m <= 20; ++m) {
          const PipelineShape shape = {&planned_method(name), p, v, m};
          call(shape, [&] { return make_schedule(name, shape.depth(), m, v); });
        }
      }
    }
  }
}

bool is_legal(const PipelineShape& shape) {
  const int m = shape.num_microbatches;
  return least_microbatches(*shape.method, shape.ranks, shape.stages_per_rank, m) == m;
}

TEST(PlanSchedules, LeastMicrobatchesAreThoseThatTheGeneratorsAllow) {
  for_each_shape([](const PipelineShape& shape, auto&& make) {
    const bool is_made = value_error(make).empty();
    ASSERT_EQ(is_legal(shape), is_made) << shape.method->name << " p " << shape.ranks << " v "
                                        << shape.stages_per_rank << " m " << shape.num_microbatches;
  });
}

TEST(PlanSchedules, MicrobatchesInFlightAreThoseOfTheGeneratedSchedule) {
  int num_checked = 0;
  for_each_shape([&](const PipelineShape& shape, auto&& make) {
    if (!is_legal(shape)) return;
    const Schedule schedule = make();
    for (int stage = 0; stage < schedule.num_stages; ++stage) {
      ASSERT_EQ(shape.num_versions(stage % shape.depth()), schedule.num_versions[stage]);
      ASSERT_EQ(most_in_flight(shape, stage % shape.depth()), max_in_flight(schedule, stage))
          << shape.method->name << " p " << shape.ranks << " v " << shape.stages_per_rank << " m "
          << shape.num_microbatches << " stage " << stage;
      ++num_checked;
    }
  });
  EXPECT_GT(num_checked, 4000);
}

// Counted as the engine holds them: from I or B on, to the end of W or B.
TEST(PlanSchedules, RecomputedActivationsAreThoseOfTheSimulation) {
  for_each_shape([](const PipelineShape& shape, auto&& make) {
    if (!is_legal(shape) || shape.method->is_bidirectional()) return;
    if (shape.stages_per_rank > 1 && !shape.method->is_v()) return;
    Costs costs;
    costs.stages.assign(shape.depth(),
                        {.forward = 1, .input_grad = 1, .weight_grad = 1, .recompute = 1});
    const Schedule schedule = make();
    for (int chunk = 0; chunk < shape.stages_per_rank; ++chunk) {  // a rank's peak is of all
      for (int stage = 0; stage < shape.depth(); ++stage) {
        costs.stages[stage].activation_bytes = stage / shape.ranks == chunk;
      }
      const Simulation simulation = simulate(schedule, costs, 4);
      for (int k = 0; k < shape.ranks; ++k) {
        const int stage = chunk * shape.ranks + k;
        ASSERT_EQ(simulation.peak_bytes[schedule.placement[stage]], most_recomputed(shape, stage))
            << shape.method->name << " d " << shape.depth() << " m " << shape.num_microbatches;
      }
    }
  });
}

struct Instance {
  PipelineShape shape;
  Costs costs;
};

Instance random_instance(std::mt19937& random, const std::string& name, double uneven, double hop) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const auto around = [&](double mean) {
    return mean * (1 + uneven * (2.0 * random() / 4294967296.0 - 1));
  };
  const ScheduleMethod& method = planned_method(name);
  Instance instance;
  const int p = 2 * (1 + below(5));
  const int v = method.is_v() ? 2 : method.has_chunks ? 2 + below(2) : 1;
  const int at_least = 1 + below(4 * p);
  const bool is_stashed = method.weights == Weights::kStashed;
  instance.shape = {&method, p, v, *least_microbatches(method, p, v, is_stashed ? 1 : at_least)};
  const double recompute = below(2);
  for (int i = 0; i < instance.shape.depth(); ++i) {
    instance.costs.stages.push_back({.forward = around(1),
                                     .input_grad = around(1),
                                     .weight_grad = around(1),
                                     .recompute = recompute * around(1),
                                     .update = around(0.5)});
  }
  for (int i = 0; i + 1 < instance.shape.depth(); ++i) {
    instance.costs.edges.push_back({.latency = hop * around(1)});
  }
  return instance;
}

double simulated(const Instance& instance) {
  const PipelineShape& shape = instance.shape;
  const Schedule schedule = make_schedule(shape.method->name, shape.depth(), shape.num_microbatches,
                                          shape.stages_per_rank);
  return simulate(schedule, instance.costs, 1).period;
}

TEST(PlanSchedules, ClosedFormOfSeveralVersionsIsThePeriod) {
  std::mt19937 random(1);
  for (int round = 0; round < (testing::kSanitized ? 60 : 300); ++round) {
    for (const char* name : {"2bw", "2bw_eager", "2bw_v", "2bw_v_half", "pipedream"}) {
      const double hop = round % 3 * 0.3;
      const Instance instance = random_instance(random, name, round % 2 * 0.8, hop);
      const double expected = simulated(instance);
      // The simulation measures a mean over some batches.
      EXPECT_NEAR(period_by_formula(instance.shape, instance.costs), expected, 0.02 * expected)
          << name << " round " << round << " d " << instance.shape.depth() << " m "
          << instance.shape.num_microbatches;
    }
  }
}

// Messages past a stage: cycles through them, and links that they keep busy.
TEST(PlanSchedules, ClosedFormOfTwoVersionsKnowsSkips) {
  std::mt19937 random(4);
  const auto below = [&](double most) { return most * random() / 4294967296.0; };
  int num_slower = 0;
  for (int round = 0; round < 400; ++round) {
    Instance instance = random_instance(random, round % 2 == 0 ? "2bw" : "2bw_eager", 0.8, 0.1);
    const double without = period_by_formula(instance.shape, instance.costs);
    const int d = instance.shape.depth();
    for (int from = 0; from + 2 < d; ++from) {
      if (random() % 2 == 0) continue;
      const int to = from + 2 + static_cast<int>(random() % (d - from - 2));
      EdgeCosts edge = {.latency = below(8)};
      if (random() % 4 == 0) edge = {.bandwidth = 1, .message_bytes = below(6)};
      instance.costs.skips.push_back({from, to, edge});
    }
    const double expected = simulated(instance);
    ASSERT_NEAR(period_by_formula(instance.shape, instance.costs), expected, 0.02 * expected)
        << instance.shape.method->name << " round " << round << " d " << d << " m "
        << instance.shape.num_microbatches;
    num_slower += expected > 1.05 * without;
  }
  EXPECT_GT(num_slower, 80);
}

// Of chimera and a V that drains, whose bubbles depend on what takes how long.
bool is_rough(const std::string& name) {
  const ScheduleMethod& method = planned_method(name);
  return method.is_bidirectional() || (method.is_v() && method.is_flushed());
}

TEST(PlanSchedules, ClosedFormsOfOthersKnowSkips) {
  std::mt19937 random(5);
  for (const std::string& name : planned_schedules()) {
    double sum = 0;
    constexpr int kRounds = testing::kSanitized ? 20 : 100;
    for (int round = 0; round < kRounds; ++round) {
      Instance instance = random_instance(random, name, 0.3, 0.05);
      const int d = instance.shape.depth();
      for (int from = 0; from + 2 < d; ++from) {
        if (random() % 2 == 0) continue;
        const int to = from + 2 + static_cast<int>(random() % (d - from - 2));
        instance.costs.skips.push_back({from, to, {.latency = 0.1 * (to - from)}});
      }
      const double expected = simulated(instance);
      sum += std::abs(period_by_formula(instance.shape, instance.costs) / expected - 1);
      // A link that is never idle.
      if (d < 3) continue;
      const int to = instance.shape.is_folded() ? d - 2 : d - 1;  // on another rank
      instance.costs.skips = {{0, to, {.bandwidth = 1, .message_bytes = 100}}};
      const double busy = 100 * instance.shape.num_microbatches *
                          (instance.shape.method->is_bidirectional() ? 0.5 : 1);
      EXPECT_GE(period_by_formula(instance.shape, instance.costs), busy);
      EXPECT_GE(simulated(instance), busy * (1 - 1e-9));
    }
    RecordProperty(name, std::to_string(sum / kRounds));
    if (testing::kSanitized) continue;  // too few for a mean
    EXPECT_LT(sum / kRounds, is_rough(name) ? 0.1 : 0.04) << name;
  }
}

TEST(PlanSchedules, ClosedFormsOfOthersAreNearThePeriod) {
  std::mt19937 random(2);
  for (const std::string& name : planned_schedules()) {
    double sum = 0;
    double worst = 0;
    constexpr int kRounds = testing::kSanitized ? 40 : 200;
    for (int round = 0; round < kRounds; ++round) {
      const Instance instance =
          random_instance(random, name, round % 2 * 0.3, round % 4 < 2 ? 0 : 0.05);
      const double expected = simulated(instance);
      const double error =
          std::abs(period_by_formula(instance.shape, instance.costs) / expected - 1);
      sum += error;
      worst = std::max(worst, error);
    }
    RecordProperty(name, std::to_string(sum / kRounds) + ", worst " + std::to_string(worst));
    EXPECT_LT(sum / kRounds, is_rough(name) ? 0.1 : 0.03) << name;
    EXPECT_LT(worst, is_rough(name) ? 0.35 : 0.2) << name;
  }
}

// Stages of any sizes, one of which adds up gradients for longer than others: in gpipe for many
// microbatches' time, else for one's, as the formula leaves out how longer ones delay each other.
TEST(PlanSchedules, ExactFormulasKnowWhichStageUpdatesLongAndWhatRecomputingDelays) {
  std::mt19937 random(5);
  for (const std::string name : {"gpipe", "2bw", "2bw_eager", "pipedream"}) {
    const bool is_gpipe = name == "gpipe";
    double worst = 0;
    for (int round = 0; round < 400; ++round) {
      Instance instance = random_instance(random, name, 0.95, round % 4 * 0.3);
      std::vector<StageCosts>& stages = instance.costs.stages;
      stages[random() % stages.size()].all_reduce = random() % (is_gpipe ? 20 : 4);
      const double expected = simulated(instance);
      const double seconds = period_by_formula(instance.shape, instance.costs);
      worst = std::max(worst, std::abs(seconds / expected - 1));
    }
    RecordProperty(name, std::to_string(worst));
    EXPECT_LT(worst, is_gpipe ? 1e-6 : 0.05) << name;
  }
}

TEST(PlanSchedules, TheSecondBatchTakesAboutThePeriodOfAFlush) {
  std::mt19937 random(6);
  for (const std::string& name : planned_schedules()) {
    if (!planned_method(name).is_flushed()) continue;
    double sum = 0;
    constexpr int kRounds = testing::kSanitized ? 20 : 100;
    for (int round = 0; round < kRounds; ++round) {
      const Instance instance = random_instance(random, name, round % 2 * 0.3, round % 4 * 0.1);
      const PipelineShape& shape = instance.shape;
      const Schedule schedule =
          make_schedule(name, shape.depth(), shape.num_microbatches, shape.stages_per_rank);
      const double expected = simulated(instance);
      sum += std::abs(second_batch(schedule, instance.costs) / expected - 1);
    }
    RecordProperty(name, std::to_string(sum / kRounds));
    EXPECT_LT(sum / kRounds, 0.002) << name;
  }
}

// Of schedules without an exact formula, where pipelines are short enough to be simulated.
TEST(PlanSchedules, LargeBatchesTakeAStraightLine) {
  std::mt19937 random(4);
  for (const char* name : {"1f1b", "interleaved", "zero_bubble", "v_half", "chimera"}) {
    double sum = 0;
    double sum_of_forms = 0;
    double worst = 0;
    constexpr int kRounds = testing::kSanitized ? 8 : 40;
    for (int round = 0; round < kRounds; ++round) {
      Instance instance = random_instance(random, name, round % 2 * 0.3, round % 4 * 0.1);
      PipelineShape& shape = instance.shape;
      if (shape.ranks > 8) shape.ranks = 8;
      shape.num_microbatches = 840;
      instance.costs.stages.resize(shape.depth());
      instance.costs.edges.resize(shape.depth() - 1);
      const double expected = simulated(instance);
      const auto error_of = [&](double seconds) { return std::abs(seconds / expected - 1); };
      const double error = error_of(step_time(shape, instance.costs).seconds);
      sum += error;
      worst = std::max(worst, error);
      sum_of_forms += error_of(period_by_formula(shape, instance.costs));
    }
    RecordProperty(name, std::to_string(sum / kRounds) + ", worst " + std::to_string(worst) +
                             ", by formula " + std::to_string(sum_of_forms / kRounds));
    EXPECT_LT(sum / kRounds, 0.003) << name;
    EXPECT_LT(worst, 0.03) << name;
    if (testing::kSanitized) continue;  // too few to compare
    // Whose formulas are as near.
    if (name != std::string("1f1b") && name != std::string("v_half")) {
      EXPECT_LT(sum, sum_of_forms / 2) << name;
    }
  }
}

TEST(PlanSchedules, StepTimeIsNeverLessThanTheBusiestRank) {
  std::mt19937 random(3);
  for (const std::string& name : planned_schedules()) {
    for (int round = 0; round < 50; ++round) {
      const Instance instance = random_instance(random, name, 0.9, 0.1);
      const StepTime time = step_time(instance.shape, instance.costs);
      EXPECT_GE(time.seconds, busiest_rank(instance.shape, instance.costs));
      EXPECT_GE(time.bubble, 0);
      EXPECT_LT(time.bubble, 1);
    }
  }
}

TEST(PlanSchedules, OthersAreNamed) {
  EXPECT_EQ(value_error([] { planned_method("2wb"); }),
            "schedules: \"2wb\": the planner chooses among 2bw, 2bw_fresh, 2bw_eager, 2bw_v, "
            "2bw_v_two_thirds, 2bw_v_half, 2bw_v_min, pipedream, 1f1b, gpipe, interleaved, "
            "zero_bubble, zero_bubble_v, v_half, v_min, chimera");
}

}  // namespace
}  // namespace pd2
