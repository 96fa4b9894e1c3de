// Plans where links differ: which messages take which link, and how near to the best split they
// are.

#include "core/infinity.h"
#include "core/schedule/generate.h"
#include "instances.h"
#include "planner/plan/plan.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using testing::kSanitized;

using testing::Instances;

constexpr Link kFast = {0, 1e12};

LinkMatrix matrix(int devices, const std::vector<std::pair<int, int>>& slow, Link link) {
  LinkMatrix matrix = {devices, std::vector<Link>(devices * devices, kFast)};
  for (const auto& [a, b] : slow) {
    matrix.links[a * devices + b] = matrix.links[b * devices + a] = link;
  }
  return matrix;
}

// A chain of so many layers, on as many devices as stages, one microbatch size.
PlanProblem chain(const std::vector<double>& seconds, const std::vector<std::int64_t>& bytes,
                  int stages, const std::string& schedule) {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  for (const double each : seconds) profiled.layers.push_back({each, each, each, 1e3, 1e3, 1e3});
  for (int i = 0; i + 1 < static_cast<int>(seconds.size()); ++i) {
    profiled.edges.push_back({i, i + 1, bytes[i]});
  }
  problem.cluster.types.emplace_back();
  problem.cluster.type_of.assign(stages, 0);
  problem.cluster.topology = matrix(stages, {}, kFast);
  problem.options.batch = problem.options.largest_batch = 8;
  problem.options.width = 1;
  problem.options.num_stages = stages;
  problem.options.schedules = {schedule};
  problem.options.recompute = {Recompute::kNone};
  return problem;
}

// 100 MB from the first layer to the last one, past the stages between.
PlanProblem with_skip(const std::string& schedule) {
  PlanProblem problem =
      chain(std::vector<double>(8, 1e-3), std::vector<std::int64_t>(7, 10'000), 4, schedule);
  problem.model.microbatches.front().edges.push_back({0, 7, 100'000'000});
  return problem;
}

TEST(PlanLinks, ASkipKeepsOffTheSlowLink) {
  const Link slow = {0, 1e9};  // 0.1 s a message
  for (int a = 0; a < 4; ++a) {
    for (int b = a + 1; b < 4; ++b) {
      PlanProblem problem = with_skip("2bw");
      problem.cluster.topology = matrix(4, {{a, b}}, slow);
      const Evaluation plan = best_plans(problem).front();
      // The three other links are a way from one end to the other.
      EXPECT_LT(plan.time.seconds, 0.055) << a << " " << b;
      ASSERT_EQ(plan.costs.skips.size(), 1u);
      EXPECT_EQ(plan.costs.skips.front().edge.bandwidth, 1e12) << a << " " << b;
    }
  }
}

TEST(PlanLinks, ASkipOverASlowLinkTakesItsTime) {
  PlanProblem problem = with_skip("2bw");
  for (const std::string& name : planned_schedules()) {
    problem.options.schedules = {name};
    problem.options.num_stages = name == "interleaved" ? 8 : 4;
    problem.options.batch = problem.options.largest_batch = name == "pipedream" ? 1 : 8;
    // Every link but one way through the devices: the ends of chimera's pipelines meet, too.
    problem.cluster.topology = Servers{1, {}, {0, 1e9}};
    const Evaluation plan = best_plans(problem).front();
    const int last = plan.candidate.shape.depth() - 1;
    ASSERT_EQ(plan.costs.skips.size(), 1u) << name;
    if (planned_method(name).is_v()) {             // the first and the last stage share a rank
      EXPECT_LT(plan.time.seconds, 0.11) << name;  // 8 messages take 0.8
      EXPECT_DOUBLE_EQ(plan.stages.front().message, 1e-5) << name;
      continue;
    }
    EXPECT_EQ(plan.costs.skips.front().from, 0);
    EXPECT_EQ(plan.costs.skips.front().to, last);
    EXPECT_EQ(plan.costs.edges.front().message_bytes, 10'000);
    EXPECT_GE(plan.time.seconds, 0.0999 * plan.candidate.shape.microbatches_of_copy()) << name;
    EXPECT_DOUBLE_EQ(plan.stages.front().message, 0.1) << name;
    EXPECT_EQ(plan.stages.front().receiver, last);
    EXPECT_DOUBLE_EQ(plan.stages[1].message, 1e-5) << name;
    EXPECT_EQ(plan.stages[1].receiver, 2);
    EXPECT_EQ(plan.stages.back().message, 0) << name;
    const std::string why = explain(problem, {plan}).bound_by;
    EXPECT_EQ(why.find("the link from stage 0 to " + std::to_string(last)), 0u) << name << why;
  }
}

// What a stage reads of several stages comes over several links, of each value once.
TEST(PlanLinks, ValuesGoFromTheStageThatMakesThemToEachThatReadsThem) {
  PlanProblem problem = chain({1, 1, 1, 1}, {10, 20, 30}, 4, "1f1b");
  std::vector<Edge>& edges = problem.model.microbatches.front().edges;
  edges.insert(edges.end(), {{0, 2, 10}, {0, 3, 10}, {1, 3, 5}});
  const Evaluation plan = best_plans(problem).front();
  ASSERT_EQ(plan.costs.edges.size(), 3u);
  for (int k = 0; k < 3; ++k) EXPECT_EQ(plan.costs.edges[k].message_bytes, 10 * (k + 1));
  ASSERT_EQ(plan.costs.skips.size(), 3u);
  const int expected[][3] = {{0, 2, 10}, {0, 3, 10}, {1, 3, 5}};
  for (int i = 0; i < 3; ++i) {
    const SkipCosts& skip = plan.costs.skips[i];
    EXPECT_EQ(skip.from, expected[i][0]);
    EXPECT_EQ(skip.to, expected[i][1]);
    EXPECT_EQ(skip.edge.message_bytes, expected[i][2]);
  }
}

// Layers of 0.5 to 2 ms, and values of which some take longer than a layer over a slow link.
PlanProblem random_chain(Instances& instances, int layers, int stages,
                         const std::string& schedule) {
  std::vector<double> seconds;
  std::vector<std::int64_t> bytes;
  const std::int64_t sizes[] = {100'000, 1'000'000, 8'000'000};
  for (int i = 0; i < layers; ++i) {
    seconds.push_back(1e-3 * instances.between(0.5, 2));
    bytes.push_back(sizes[instances.below(3)]);
  }
  return chain(seconds, bytes, stages, schedule);
}

template <typename Visit>
void for_each_split(int layers, int stages, Visit&& visit) {
  std::vector<char> is_first(layers - 1, 0);
  std::fill(is_first.begin(), is_first.begin() + stages - 1, 1);
  do {
    std::vector<int> firsts = {0};
    for (int i = 0; i + 1 < layers; ++i) {
      if (is_first[i]) firsts.push_back(i + 1);
    }
    visit(firsts);
  } while (std::ranges::prev_permutation(is_first).found);
}

// Down the ranks and up again, or round after round.
int rank_of(const PipelineShape& shape, int stage) {
  const int p = shape.ranks;
  return shape.method->is_v() && stage >= p ? 2 * p - 1 - stage : stage % p;
}

// Seconds of a split of a chain on devices in this order, as the plan's own are found.
double seconds_of(const PlanProblem& problem, const Evaluation& like,
                  const std::vector<int>& firsts, const std::vector<int>& devices) {
  const PipelineShape& shape = like.candidate.shape;
  const ProfiledRows& profiled = problem.model.microbatches.front();
  Costs costs;
  for (std::size_t k = 0; k < firsts.size(); ++k) {
    const int end = k + 1 < firsts.size() ? firsts[k + 1] : problem.model.num_layers();
    StageCosts& stage = costs.stages.emplace_back();
    for (int i = firsts[k]; i < end; ++i) {
      stage.forward += profiled.layers[i].forward;
      stage.input_grad += profiled.layers[i].input_grad;
      stage.weight_grad += profiled.layers[i].weight_grad;
    }
    if (k == 0) continue;
    EdgeCosts edge = {.message_bytes = double(profiled.edges[firsts[k] - 1].bytes)};
    const int from = rank_of(shape, static_cast<int>(k - 1));
    const int to = rank_of(shape, static_cast<int>(k));
    Link link = link_between(problem.cluster.topology, devices[from], devices[to]);
    if (shape.method->is_bidirectional()) {
      const int last = shape.ranks - 1;
      const Link other =
          link_between(problem.cluster.topology, devices[last - from], devices[last - to]);
      if (other.seconds(edge.message_bytes) > link.seconds(edge.message_bytes)) link = other;
    }
    if (from == to) link = {};
    edge.latency = link.latency;
    edge.bandwidth = link.bandwidth;
    costs.edges.push_back(edge);
  }
  return step_time(shape, costs).seconds;
}

std::vector<int> devices_of(const Evaluation& plan) { return plan.devices.devices(); }

// On the plan's devices, by simulation.
TEST(PlanLinks, SplitsAreNearTheBestOfAll) {
  Instances of_others(1), of_one_microbatch(1);
  for (const std::string& name : planned_schedules()) {
    const bool is_one = name == "pipedream";
    Instances& instances = is_one ? of_one_microbatch : of_others;
    double sum = 0;
    double worst = 0;
    constexpr int kRounds = kSanitized ? 2 : 16;
    for (int round = 0; round < kRounds; ++round) {
      const int layers = 8 + instances.below(5);
      PlanProblem problem = random_chain(instances, layers, 4, name);
      problem.options.stages_per_rank = {2};
      if (is_one) problem.options.batch = problem.options.largest_batch = 1;
      problem.cluster.topology = Servers{2, {0, 1e10}, {0, 1e9 * (1 + instances.below(4))}};
      const Evaluation plan = best_plans(problem).front();
      const std::vector<int> firsts = first_layers(plan.stages);
      ASSERT_NEAR(seconds_of(problem, plan, firsts, devices_of(plan)), plan.time.seconds,
                  1e-4 * plan.time.seconds);
      double best = plan.time.seconds;
      for_each_split(layers, plan.candidate.shape.depth(), [&](const std::vector<int>& tried) {
        best = std::min(best, seconds_of(problem, plan, tried, devices_of(plan)));
      });
      const double more = plan.time.seconds / best - 1;
      sum += more;
      worst = std::max(worst, more);
    }
    RecordProperty(name, std::to_string(sum / kRounds) + ", worst " + std::to_string(worst));
    // Where the closed form is exact, so was the plan, but 0.4 % and 3.1 % in a V: its circles of
    // waits pass stages that no move of a cut changes alone. Of the others, 1.9 % and 14.5 % were
    // found.
    const bool is_exact = has_exact_formula(planned_method(name));
    const bool is_v = planned_method(name).is_v();
    EXPECT_LT(sum / kRounds, is_exact && !is_v ? 0.001
                             : is_exact        ? 0.01
                             : kSanitized      ? 0.1
                                               : 0.02)
        << name;
    EXPECT_LT(worst, is_exact && !is_v ? 0.005 : is_exact ? 0.05 : 0.15) << name;
  }
}

// Of one cluster, devices numbered in all ways: the times are within 1 %, and within 4 % of the
// best of all splits and mappings.
TEST(PlanLinks, DevicesMayBeNumberedAnyhow) {
  Instances instances(2);
  const char* names[] = {"2bw", "2bw_eager", "1f1b"};
  for (int round = 0; round < (kSanitized ? 1 : 8); ++round) {
    PlanProblem problem = random_chain(instances, 10, 4, names[round % 3]);
    // Two servers of two devices, or a device with two slow links.
    const bool are_servers = round % 2 == 0;
    double least = kInfinity;
    double most = 0;
    double best = least;
    std::vector<int> order = {0, 1, 2, 3};
    do {
      std::vector<std::pair<int, int>> slow;
      for (int a = 0; a < 4; ++a) {
        for (int b = 0; b < a; ++b) {
          const int low = std::min(order[a], order[b]);
          const int high = std::max(order[a], order[b]);
          const bool is_slow = are_servers ? low / 2 != high / 2 : low == 0 && high <= 2;
          if (is_slow) slow.emplace_back(a, b);
        }
      }
      problem.cluster.topology = matrix(4, slow, {0, 2e9});
      const Evaluation plan = best_plans(problem).front();
      least = std::min(least, plan.time.seconds);
      most = std::max(most, plan.time.seconds);
      if (std::isfinite(best)) continue;  // the same for all
      std::vector<int> devices = {0, 1, 2, 3};
      do {
        for_each_split(10, 4, [&](const std::vector<int>& tried) {
          best = std::min(best, seconds_of(problem, plan, tried, devices));
        });
      } while (std::ranges::next_permutation(devices).found);
    } while (std::ranges::next_permutation(order).found);
    EXPECT_LE(most, 1.01 * least) << "round " << round;
    EXPECT_LE(most, 1.04 * best) << "round " << round;
  }
}

}  // namespace
}  // namespace pd2
