#include "planner/plan/plan.h"

#include "core/schedule/generate.h"
#include "core/schedule/schedule.h"
#include "core/schedule/unroll.h"
#include "exhaustive.h"
#include "instances.h"
#include "raises.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <functional>
#include <numeric>

namespace pd2 {
namespace {

using testing::best_plans_exhaustively;
using testing::Instances;
using testing::kSanitized;
using testing::value_error;

constexpr int rounds(int without_sanitizer) {
  return kSanitized ? without_sanitizer / 20 : without_sanitizer;
}

// Equal layers in a chain: 1 ms each way and part, a megabyte of everything.
PlanProblem uniform(int layers, int devices, double memory_bytes) {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  profiled.layers.assign(layers, {1e-3, 1e-3, 1e-3, 1e6, 1e6, 1e6});
  for (int i = 0; i + 1 < layers; ++i) profiled.edges.push_back({i, i + 1, 100'000});
  DeviceType& type = problem.cluster.types.emplace_back();
  type.memory_bytes = memory_bytes;
  problem.cluster.type_of.assign(devices, 0);
  problem.cluster.topology = Servers{devices, {0, 1e10}, {0, 1e10}};
  problem.options.batch = problem.options.largest_batch = 32;
  problem.options.schedules = planned_schedules();
  return problem;
}

TEST(Plan, EqualsExhaustiveSearch) {
  Instances instances(1);
  int num_planned = 0;
  int num_refused = 0;
  int num_equal = 0;
  for (int round = 0; round < rounds(60); ++round) {
    const PlanProblem problem = instances.problem(round % 4 == 0 ? 12 : 8, round % 4 == 1 ? 16 : 6);
    if (problem.options.objective == Objective::kMemory) continue;
    const std::vector<Evaluation> expected = best_plans_exhaustively(problem);
    if (expected.empty()) {
      EXPECT_NE(value_error([&] { best_plans(problem); }), "") << "round " << round;
      ++num_refused;
      continue;
    }
    const std::vector<Evaluation> found = best_plans(problem);
    ASSERT_EQ(found.size(), expected.size()) << "round " << round;
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].score, expected[i].score) << "round " << round << " place " << i;
      // Of plans that are equal to the bit, and not the best, any may come first.
      if (std::ranges::count(expected, found[i].score, &Evaluation::score) > 1 && i > 0) continue;
      ASSERT_EQ(found[i].peak_bytes, expected[i].peak_bytes) << "round " << round;
    }
    num_equal += found.size() > 1 && found[1].score < kEquallyGood * found[0].score;
    ++num_planned;
  }
  EXPECT_GE(num_equal, rounds(10));
  EXPECT_GE(num_planned, rounds(25));
  EXPECT_GE(num_refused, rounds(2));
}

double least_score(const std::vector<Evaluation>& plans) {
  double least = kInfinity;
  for (const Evaluation& plan : plans) least = std::min(least, plan.score);
  return least;
}

TEST(Plan, NoPlanWithinTheSlackNeedsLessMemory) {
  Instances instances(7);
  int num_planned = 0;
  int num_limited = 0;
  for (int round = 0; round < rounds(60); ++round) {
    PlanProblem problem = instances.problem(8, 6);
    problem.options.objective = Objective::kMemory;
    problem.options.slack = 0.1 * instances.below(4);
    PlanProblem with_all = problem;
    with_all.options.num_alternatives = 10'000;
    const double fastest = least_score(best_plans_exhaustively(with_all));
    if (fastest == kInfinity) continue;
    const double worth = fastest * (1 + problem.options.slack);
    const std::vector<Evaluation> found = best_plans(problem);
    const Evaluation& best = found.front();
    ASSERT_EQ(best.score, best.peak_bytes);
    ASSERT_LE(best.time.seconds / best.candidate.batch(), worth * (1 + 1e-9)) << "round " << round;
    for (const Evaluation& other : found) ASSERT_LE(best.score, kEquallyGood * other.score);
    for (DeviceType& type : with_all.cluster.types) {
      type.memory_bytes = std::min(type.memory_bytes, 0.998 * best.peak_bytes);
    }
    const double smaller = least_score(best_plans_exhaustively(with_all));
    ++num_planned;
    if (smaller == kInfinity) continue;
    ASSERT_GT(smaller, worth) << "round " << round;
    ++num_limited;
  }
  EXPECT_GE(num_planned, rounds(40));
  EXPECT_GE(num_limited, rounds(20));
}

TEST(Plan, BoundsAreBounds) {
  Instances instances(2);
  int num_checked = 0;
  double closest = 0;
  for (int round = 0; round < rounds(60); ++round) {
    const PlanProblem problem = instances.problem(8, 8);
    const DeviceMappings mappings(problem.cluster);
    Evaluator evaluator(problem, mappings);
    const Bounds bounds(problem);
    for (const Candidate& candidate : candidates(problem, mappings)) {
      const double speed = mappings.speed(candidate.mapping, candidate.shape.ranks, candidate.width,
                                          candidate.microbatches);
      const auto evaluation = evaluator.evaluate(candidate);
      if (!evaluation) continue;
      // The simulated time itself, not the one that the bound has raised.
      const double seconds = step_time(candidate.shape, evaluation->costs).seconds;
      const double bound = bounds.seconds(candidate, speed);
      // A mean over some batches is measured.
      ASSERT_LE(bound, seconds * 1.01) << to_string(candidate) << " round " << round;
      closest = std::max(closest, bound / seconds);
      ++num_checked;
    }
  }
  EXPECT_GE(num_checked, rounds(3000));
  EXPECT_GT(closest, 0.999);  // they are not all far away
}

// Calls `visit` with all numbers >= `least`, multiples of `multiple_of`, that add up to `total`.
void all_numbers(std::vector<int>& numbers, std::size_t replicas, int least, int multiple_of,
                 int total, const std::function<void(const std::vector<int>&)>& visit) {
  if (numbers.size() + 1 == replicas) {
    if (total < least) return;
    numbers.push_back(total);
    visit(numbers);
    numbers.pop_back();
    return;
  }
  for (int m = least; m <= total; m += multiple_of) {
    numbers.push_back(m);
    all_numbers(numbers, replicas, least, multiple_of, total - m, visit);
    numbers.pop_back();
  }
}

TEST(Plan, MicrobatchesBySpeedTakeTheLeastTime) {
  Instances instances(3);
  int num_better = 0;
  for (int round = 0; round < rounds(2000); ++round) {
    std::vector<double> slowness;
    for (int i = 0, w = 2 + instances.below(3); i < w; ++i) {
      slowness.push_back(round % 3 == 0 ? 1 + instances.below(3) : instances.between(0.2, 3));
    }
    const int multiple_of = 1 + instances.below(3);
    const int least = multiple_of * (1 + instances.below(3));
    const int more = instances.below(2) * instances.below(5);
    const int w = static_cast<int>(slowness.size());
    const int total = 1 + instances.below(24);
    // Of multiples the next number that there are.
    const int needed = std::max(w * least, (total + multiple_of - 1) / multiple_of * multiple_of);
    const auto seconds = [&](const std::vector<int>& numbers) {
      double longest = 0;
      for (int i = 0; i < w; ++i) longest = std::max(longest, slowness[i] * (numbers[i] + more));
      return longest;
    };
    double best = kInfinity;
    std::vector<int> none;
    all_numbers(none, slowness.size(), least, multiple_of, needed,
                [&](const std::vector<int>& numbers) { best = std::min(best, seconds(numbers)); });
    const std::vector<int> found = microbatches_by_speed(slowness, least, multiple_of, total, more);
    ASSERT_EQ(std::accumulate(found.begin(), found.end(), 0), needed) << "round " << round;
    ASSERT_GE(*std::ranges::min_element(found), least);
    ASSERT_LE(seconds(found), best * (1 + 1e-12)) << "round " << round;
    num_better +=
        needed % (w * multiple_of) == 0 && best < 0.9 * seconds(std::vector<int>(w, needed / w));
  }
  EXPECT_GE(num_better, rounds(50));
}

// Two devices of half the speed: of 12 microbatches one replica takes 8, the other one 4.
TEST(Plan, AReplicaOfSlowDevicesHasFewerMicrobatches) {
  PlanProblem problem = uniform(8, 4, kInfinity);
  DeviceType slow;
  slow.slowness = 2;
  problem.cluster.types.push_back(slow);
  problem.cluster.type_of = {0, 0, 1, 1};
  problem.options.batch = problem.options.largest_batch = 12;
  problem.options.schedules = {"2bw"};
  problem.options.width = problem.options.num_stages = 2;
  problem.cluster.topology = Servers{4, {}, {}};
  const Evaluation equal = best_plans(problem).front();
  problem.options.unequal_replicas = true;
  const Evaluation unequal = best_plans(problem).front();
  EXPECT_EQ(unequal.candidate.microbatches, (std::vector<int>{8, 4}));
  EXPECT_NEAR(unequal.time.seconds, 8 * 4 * 3e-3, 1e-12);  // of 4 layers each
  EXPECT_LT(unequal.time.seconds, 0.95 * equal.time.seconds);
}

// Bytes counted from the layers, as the engine would hold them.
double bytes_of_rank(const PlanProblem& problem, const Evaluation& plan, int rank) {
  const PipelineShape& shape = plan.candidate.shape;
  const Schedule schedule = make_schedule(shape.method->name, shape.depth(), shape.num_microbatches,
                                          shape.stages_per_rank);
  const std::vector<LayerCost>& layers = problem.model.microbatches[plan.candidate.size].layers;
  double bytes = 0;
  double again = 0;
  std::vector<double> kept_by(schedule.num_stages, 0);
  for (int copy = 0; copy < schedule.num_stages; ++copy) {
    if (schedule.placement[copy] != rank) continue;
    const PlannedStage& stage = plan.stages[copy % shape.depth()];
    std::vector<bool> is_again(layers.size(), plan.candidate.recompute == Recompute::kStages);
    double kept = stage.costs.input_bytes;
    bytes += stage.message_bytes;
    for (const int b : stage.blocks) {
      const Block& block = problem.model.blocks[b];
      double of_block = 0;
      for (int i = block.first; i < block.end; ++i) {
        is_again[i] = true;
        of_block += layers[i].activation_bytes;
      }
      again = std::max(again, of_block);
    }
    double of_stage = 0;
    for (int i = stage.first; i < stage.end; ++i) {
      const LayerCost& layer = layers[i];
      const PlanOptions& options = problem.options;
      bytes +=
          layer.trained_bytes * (schedule.num_versions[copy] + options.gradient + options.state) +
          layer.parameter_bytes - layer.trained_bytes;
      (is_again[i] ? of_stage : kept) += layer.activation_bytes;
    }
    for (const Value& value : problem.model.microbatches[plan.candidate.size].shared) {
      const auto is_here = [&](int layer) { return stage.first <= layer && layer < stage.end; };
      if (value.producer >= stage.first || std::ranges::none_of(value.consumers, is_here)) continue;
      const double copies =
          schedule.num_versions[copy] + problem.options.gradient + problem.options.state;
      bytes += copies * value.trained_bytes + value.frozen_bytes;
      if (plan.candidate.recompute != Recompute::kStages) kept += value.kept_bytes;
    }
    if (plan.candidate.recompute == Recompute::kStages) again = std::max(again, of_stage);
    kept_by[copy] = kept;
    if (!shape.method->is_v()) bytes += max_in_flight(schedule, copy) * kept;
  }
  if (!shape.method->is_v()) return bytes + again;
  double now = 0;
  double most = 0;
  for (const Step& step : unroll(schedule, rank, 0, 4)) {
    if (step.kind == ActionKind::kForward) now += kept_by[step.stage];
    if (step.kind == ActionKind::kWeightGrad) now -= kept_by[step.stage];
    most = std::max(most, now);
  }
  return bytes + again + most;
}

TEST(Plan, KeepsMemoryLimitsAndTheLargestBatch) {
  Instances instances(3);
  int num_checked = 0;
  int num_limited = 0;
  for (int round = 0; round < rounds(150); ++round) {
    const PlanProblem problem = instances.problem(10, 8);
    const std::vector<Evaluation> plans = best_plans_exhaustively(problem);
    for (const Evaluation& plan : plans) {
      EXPECT_GE(plan.candidate.batch(), problem.options.batch);
      EXPECT_LE(plan.candidate.batch(), problem.options.largest_batch);
      std::vector<int> devices = plan.devices.devices();
      std::ranges::sort(devices);
      EXPECT_EQ(std::ranges::adjacent_find(devices), devices.end());
      for (int rank = 0; rank < plan.candidate.shape.ranks; ++rank) {
        for (const int device : plan.devices.of_rank(rank)) {
          const double limit = problem.cluster.type(device).memory_bytes;
          ASSERT_LE(bytes_of_rank(problem, plan, rank), limit * (1 + 1e-9))
              << to_string(plan.candidate) << " round " << round;
          num_limited += std::isfinite(limit);
        }
      }
      ++num_checked;
    }
  }
  EXPECT_GE(num_checked, rounds(300));
  EXPECT_GE(num_limited, rounds(500));
}

TEST(Plan, AModelThatDoesNotFitIsToldWhatWouldDo) {
  Instances instances(4);
  int num_refused = 0;
  int num_tight = 0;
  for (int round = 0; round < rounds(150); ++round) {
    PlanProblem problem = instances.problem(8, 5);
    const std::vector<Recompute> ways[] = {
        {Recompute::kNone, Recompute::kStages},
        {Recompute::kNone, Recompute::kStages, Recompute::kBlocks},
        {Recompute::kBlocks},
        {Recompute::kNone, Recompute::kBlocks}};
    problem.options.recompute = ways[round % 4];
    if (!best_plans_exhaustively(problem).empty()) continue;
    const std::string error = value_error([&] { best_plans(problem); });
    const std::string before = "memory=\"";
    const std::size_t place = error.find(before);
    if (place == std::string::npos) {
      EXPECT_NE(error.find("no width, microbatch size and schedule"), std::string::npos) << error;
      continue;
    }
    char* unit = nullptr;
    const double number = std::strtod(error.c_str() + place + before.size(), &unit);
    ASSERT_TRUE(*unit == 'M' || *unit == 'G') << error;
    const double would_do = number * (*unit == 'M' ? 1 << 20 : 1 << 30);
    const auto with_memory = [&](double bytes) {
      for (DeviceType& type : problem.cluster.types) type.memory_bytes = std::max(1.0, bytes);
      return best_plans_exhaustively(problem);
    };
    EXPECT_EQ(error.find("lacks -"), std::string::npos) << error;
    EXPECT_FALSE(with_memory(would_do).empty()) << error;
    num_tight += with_memory(0.997 * would_do).empty();
    ++num_refused;
  }
  EXPECT_GE(num_refused, rounds(10));
  EXPECT_GE(num_tight, 0.9 * num_refused);  // only a few shapes are looked at
}

TEST(Plan, LeastMemoryIsNamedExactly) {
  PlanProblem problem = uniform(8, 4, 1e3);
  problem.options.schedules = {"1f1b"};
  problem.options.state = 2e3;  // so that thousandths of a GiB count
  const std::string error = value_error([&] { best_plans(problem); });
  // Two layers a stage, 2 * 1e6 * (1 + 1 + 2000) bytes, and one activation.
  EXPECT_NE(error.find("The nearest one, 1f1b, w = 1, d = 4, b = 1, m = 32, recompute stages"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("memory=\"3.732GiB\" would do"), std::string::npos) << error;
}

TEST(Plan, ThousandLayersOnAThousandDevicesTakeLessThanASecond) {
  PlanProblem problem = uniform(1000, 1024, 4e7);
  std::vector<ProfiledRows>& sizes = problem.model.microbatches;
  Instances instances(5);
  for (LayerCost& layer : sizes.front().layers) {
    const double size = instances.between(0.8, 1.2);
    layer.forward *= size;
    layer.input_grad *= size;
    layer.weight_grad *= size;
  }
  for (const int rows : {2, 4, 8}) {
    ProfiledRows profiled = sizes.front();
    profiled.rows = rows;
    for (LayerCost& layer : profiled.layers) {
      for (double* cost : {&layer.forward, &layer.input_grad, &layer.weight_grad}) {
        *cost *= 0.2 + 0.8 * rows;
      }
      layer.activation_bytes *= rows;
    }
    for (Edge& edge : profiled.edges) edge.bytes *= rows;
    sizes.push_back(profiled);
  }
  if (kSanitized) GTEST_SKIP();
  for (int first = 0; first < 1000; first += 4) problem.model.blocks.push_back({first, first + 4});
  problem.cluster.topology = Servers{8, {5e-6, 3e11}, {1e-5, 2.5e10}};
  problem.options.batch = problem.options.largest_batch = 4096;
  problem.options.schedules = {"2bw",         "2bw_v_two_thirds", "2bw_v_half", "1f1b",
                               "interleaved", "zero_bubble",      "chimera"};
  const auto seconds_since = [](std::clock_t begin) {
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  for (const double megabytes : {1000., 100., 30.}) {
    for (const bool with_blocks : {false, true}) {
      problem.cluster.types.front().memory_bytes = 1e6 * megabytes;
      problem.options.recompute = {Recompute::kNone, Recompute::kStages};
      if (with_blocks) problem.options.recompute.push_back(Recompute::kBlocks);
      const std::clock_t begin = std::clock();
      const std::vector<Evaluation> plans = best_plans(problem);
      const double seconds = seconds_since(begin);
      explain(problem, plans);
      const std::string where = detail::concat(megabytes, with_blocks ? "_with_blocks" : "");
      RecordProperty("seconds_" + where, std::to_string(seconds));
      RecordProperty("with_reasons_" + where, std::to_string(seconds_since(begin)));
      EXPECT_EQ(plans.size(), 6u);
      // Under one second where no other jobs run beside.
      EXPECT_LT(seconds, 3.0);
    }
  }
}

// Replicas of one stage whose sums are free, or not.
TEST(Plan, OfEquallyFastPlansTheOneWithoutADelayIsTheBest) {
  for (const int layers : {2, 8}) {
    for (const int devices : {1, 2, 8}) {
      PlanProblem problem = uniform(layers, devices, 1e9);
      problem.cluster.topology = Servers{devices, {}, {}};
      problem.options.schedules = {"2bw", "2bw_v_half", "1f1b", "zero_bubble"};
      const std::vector<Evaluation> plans = best_plans(problem);
      const PipelineShape& best = plans.front().candidate.shape;
      EXPECT_EQ(best.ranks, 1);
      EXPECT_EQ(best.method->name, "1f1b");
      for (const std::string& why : explain(problem, plans).lost_by) {
        EXPECT_EQ(why.find("e-"), std::string::npos) << why;
      }
      problem.options.schedules = {"2bw"};
      EXPECT_EQ(best_plans(problem).front().candidate.shape.method->name, "2bw");
    }
  }
  PlanProblem problem = uniform(8, 2, 1e9);
  problem.options.width = 2;
  problem.cluster.topology = Servers{2, {0, 1e9}, {0, 1e9}};  // 8 ms of 384 that 2bw hides
  EXPECT_EQ(best_plans(problem).front().candidate.shape.method->name, "2bw");
}

TEST(Plan, ExplanationNamesWhatBounds) {
  PlanProblem problem = uniform(8, 4, 1e9);
  problem.options.schedules = {"2bw"};
  const auto bound_by = [&] { return explain(problem, best_plans(problem)).bound_by; };
  EXPECT_EQ(bound_by().find("compute of stage"), 0u) << bound_by();
  problem.options.num_stages = 4;
  problem.cluster.topology = Servers{4, {0, 2e7}, {0, 2e7}};
  EXPECT_EQ(bound_by().find("the link from stage"), 0u) << bound_by();
  problem = uniform(8, 4, 1e9);
  problem.options.schedules = {"gpipe"};
  problem.options.batch = problem.options.largest_batch = 4;
  problem.cluster.topology = Servers{4, {0, 1e9}, {0, 1e9}};
  problem.model.can_cut.assign(7, true);
  problem.options.recompute = {Recompute::kNone};
  const std::string text = bound_by();
  EXPECT_TRUE(text.find("bubbles of gpipe") == 0 || text.find("the all-reduce") == 0) << text;
}

// Of rank 0's eight microbatches of 2bw a V holds half, on all ranks. Here weights and state leave
// no rank more than its share of the layers, under any of the schedules.
TEST(Plan, WhereActivationsDecideAVIsProposed) {
  PlanProblem problem = uniform(32, 8, 0);
  problem.model.microbatches.front().layers.assign(32, {1e-3, 1e-3, 1e-3, 1e8, 1.5e8, 1.5e8});
  problem.options.state = 20;
  problem.options.width = 1;
  problem.options.recompute = {Recompute::kNone};
  problem.options.schedules = {"2bw",         "2bw_eager",     "2bw_v",       "2bw_v_two_thirds",
                               "1f1b",        "gpipe",         "interleaved", "2bw_v_half",
                               "zero_bubble", "zero_bubble_v", "chimera"};
  const auto best_with = [&](double bytes) {
    problem.cluster.types.front().memory_bytes = bytes;
    return best_plans(problem);
  };
  // Four layers a rank: two versions, gradient and state of each, and 5 microbatches of 100 MB.
  const std::vector<Evaluation> plans = best_with(4 * (23 * 1.5e8 + 5 * 1e8) + 1e7);
  ASSERT_EQ(plans.size(), 1u);
  const Evaluation& plan = plans.front();
  EXPECT_EQ(to_string(plan.candidate),
            "2bw_v_half, w = 1, d = 16, v = 2, b = 1, m = 32, recompute none");
  const Schedule schedule = make_schedule("2bw_v_half", 16, 32, 2);
  const Simulation simulation = simulate(schedule, plan.costs, 4);
  EXPECT_NEAR(plan.time.seconds, simulation.period, 1e-9 * simulation.period);
  EXPECT_NEAR(plan.time.bubble, 0, 1e-3);
  for (int rank = 0; rank < 8; ++rank) {
    const double of_rank = bytes_of_rank(problem, plan, rank);
    EXPECT_NEAR(of_rank, plan.peak_bytes, 1);
    EXPECT_NEAR(simulation.peak_bytes[rank], plan.peak_bytes, 1);
  }
  EXPECT_GT(best_with(1e12).size(), 1u);
}

TEST(Plan, ExplanationNamesWhatMemoryForbids) {
  PlanProblem problem = uniform(8, 4, 1.3e9);
  problem.options.schedules = {"2bw", "1f1b", "zero_bubble", "chimera"};  // a V needs less
  problem.options.state = 300;
  problem.options.recompute = {Recompute::kNone, Recompute::kStages};
  for (LayerCost& layer : problem.model.microbatches.front().layers) layer.activation_bytes = 1e8;
  problem.cluster.topology = Servers{4, {0, 1e8}, {0, 1e8}};
  const Explanation why = explain(problem, best_plans(problem));
  EXPECT_NE(why.bound_by.find("memory forbids"), std::string::npos) << why.bound_by;
}

}  // namespace
}  // namespace pd2
