#include "core/partition/replicated_split.h"

#include "core/check.h"
#include "core/partition/split_costs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pd2 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int divided_up(int a, int b) { return (a + b - 1) / b; }

SplitCosts make_costs(const ReplicationProblem& problem) {
  StageSplitProblem split;
  split.layers = problem.layers;
  split.edges = problem.edges;
  split.values = problem.values;
  split.can_cut = problem.can_cut;
  split.seconds_per_byte = problem.seconds_per_byte;
  split.seconds_per_value = problem.seconds_per_value;
  split.recompute = problem.recompute;
  split.stages.resize(1);
  split.stages[0].trained = problem.trained;
  split.stages[0].frozen = problem.frozen;
  split.stages[0].limit = problem.limit;
  return SplitCosts(split);
}

void check(const ReplicationProblem& problem) {
  PD2_CHECK(problem.num_machines >= 1, "num_machines: ", problem.num_machines, ": must be >= 1");
  PD2_CHECK(problem.num_microbatches >= 1, "num_microbatches: ", problem.num_microbatches,
            ": must be >= 1");
  for (const double cost :
       {problem.all_reduce_seconds_per_byte, problem.all_reduce_seconds_per_step}) {
    PD2_CHECK(std::isfinite(cost) && cost >= 0,
              "all_reduce_seconds_per_byte: ", problem.all_reduce_seconds_per_byte,
              ", all_reduce_seconds_per_step: ", problem.all_reduce_seconds_per_step,
              ": both must be finite and >= 0");
  }
}

// The best way to run the pieces from some position on, on exactly some number of machines.
struct Best {
  double slowest = kInfinity;
  int end = 0;  // of the first stage
  int replicas = 0;
};

class Program {
 public:
  explicit Program(const ReplicationProblem& problem)
      : problem_(problem),
        costs_(make_costs(problem)),
        best_(costs_.num_pieces() + 1, std::vector<Best>(problem.num_machines + 1)) {
    best_[costs_.num_pieces()][0].slowest = 0;
    for (int a = costs_.num_pieces() - 1; a >= 0; --a) {
      Messages messages;
      for (int b = a + 1; b <= costs_.num_pieces(); ++b) {
        costs_.extend(messages, a, b - 1);
        add_stage(a, b, messages);
      }
    }
  }

  std::optional<ReplicatedSplit> result() const {
    const std::vector<Best>& all = best_[0];
    const auto best = std::min_element(
        all.begin(), all.end(), [](const Best& a, const Best& b) { return a.slowest < b.slowest; });
    if (best->slowest == kInfinity) return std::nullopt;
    ReplicatedSplit split;
    split.slowest = best->slowest;
    int machines = static_cast<int>(best - all.begin());
    for (int a = 0; a < costs_.num_pieces();) {
      const Best& stage = best_[a][machines];
      split.first_layers.push_back(costs_.first_layer(a));
      split.replicas.push_back(stage.replicas);
      a = stage.end;
      machines -= stage.replicas;
    }
    return split;
  }

 private:
  double seconds(int a, int b, int replicas, const Messages& messages) const {
    const double all_reduce =
        2.0 * (replicas - 1) *
        (costs_.trained_bytes(a, b) * problem_.all_reduce_seconds_per_byte / replicas +
         problem_.all_reduce_seconds_per_step);
    return std::max(costs_.seconds(costs_.compute(a, b) + messages.cost()) / replicas,
                    all_reduce / problem_.num_microbatches);
  }

  // How many microbatches fit the memory; at most num_microbatches.
  int most_in_flight(int a, int b, const Messages& messages) const {
    StageMemoryRule rule = costs_.rule(0);
    const auto fits = [&](int in_flight) {
      rule.activations = problem_.recompute ? 1 : in_flight;
      rule.inputs = problem_.recompute ? in_flight : 0;
      return costs_.bytes(rule, a, b, messages.received) <= problem_.limit;
    };
    int most = 0;
    for (int high = std::min(problem_.num_machines, problem_.num_microbatches); most < high;) {
      const int middle = high - (high - most) / 2;
      if (fits(middle)) {
        most = middle;
      } else {
        high = middle - 1;
      }
    }
    return most;
  }

  void add_stage(int a, int b, const Messages& messages) {
    const int most = most_in_flight(a, b, messages);
    if (most == 0) return;
    for (int replicas = 1; replicas <= problem_.num_machines; ++replicas) {
      const double stage = seconds(a, b, replicas, messages);
      // More machines behind it mean more in flight, up to its share of the batch.
      const bool any = divided_up(problem_.num_microbatches, replicas) <= most;
      const int last = any ? problem_.num_machines
                           : static_cast<int>(std::min<std::int64_t>(
                                 problem_.num_machines, std::int64_t{replicas} * most));
      for (int machines = replicas; machines <= last; ++machines) {
        const double slowest = std::max(stage, best_[b][machines - replicas].slowest);
        Best& best = best_[a][machines];
        if (slowest < best.slowest) best = {slowest, b, replicas};
      }
    }
  }

  const ReplicationProblem& problem_;
  SplitCosts costs_;
  std::vector<std::vector<Best>> best_;  // by first piece and number of machines
};

}  // namespace

std::optional<ReplicatedSplit> split_replicated(const ReplicationProblem& problem) {
  check(problem);
  return Program(problem).result();
}

}  // namespace pd2
