#include "planner/plan/period.h"

#include "core/schedule/generate.h"
#include "planner/plan/v_cycle.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace pd2 {
namespace {

double round_trip(const StageCosts& stage) {
  return stage.forward + stage.input_grad + stage.weight_grad;
}

double whole_backward(const StageCosts& stage) { return stage.input_grad + stage.weight_grad; }

double update(const StageCosts& stage) { return stage.all_reduce + stage.update; }

// Messages by the stage that receives them: from the one before, then from others.
struct Message {
  int from = 0;
  double seconds = 0;
};

class Inboxes {
 public:
  Inboxes(const PipelineShape& shape, const Costs& costs) : begins_(shape.depth() + 1, 0) {
    const bool is_free = costs.edges.empty() || shape.ranks == 1;
    const std::span<const SkipCosts> skips(costs.skips.data(),
                                           shape.ranks == 1 ? 0 : costs.skips.size());
    for (int stage = 0; stage < shape.depth(); ++stage) {
      if (stage > 0) {
        all_.push_back({stage - 1, is_free ? 0 : seconds_of(costs.edges[stage - 1])});
      }
      for (const auto& [from, to, edge] : skips) {
        if (to == stage) all_.push_back({from, seconds_of(edge)});
      }
      begins_[stage + 1] = static_cast<int>(all_.size());
    }
  }

  int num_stages() const { return static_cast<int>(begins_.size()) - 1; }
  std::span<const Message> to(int stage) const {
    return std::span(all_).subspan(begins_[stage], begins_[stage + 1] - begins_[stage]);
  }

 private:
  std::vector<Message> all_;
  std::vector<int> begins_;  // by stage
};

// The longest ways of a microbatch from a stage's F to the end of a later one's, and from there
// back: from the start of B to the end of the first one's.
class Ways {
 public:
  template <typename Part>
  Ways(const Inboxes& messages, const Costs& costs, Part&& backward) : messages_(messages) {
    for (const StageCosts& stage : costs.stages) {
      forward_.push_back(stage.forward);
      backward_.push_back(backward(stage));
    }
    there_.resize(messages.num_stages());
    back_.resize(messages.num_stages());
  }

  // Must be called for rising stages, beginning with `first`.
  double there_and_back(int first, int stage) {
    double there = 0;
    double back = 0;
    for (const auto& [from, seconds] : messages_.to(stage)) {
      if (from < first) continue;
      there = std::max(there, there_[from] + seconds);
      back = std::max(back, back_[from] + seconds);
    }
    there_[stage] = there + forward_[stage];
    back_[stage] = back + backward_[stage];
    return there_[stage] + back_[stage];
  }

 private:
  const Inboxes& messages_;
  std::vector<double> forward_;
  std::vector<double> backward_;
  std::vector<double> there_;
  std::vector<double> back_;
};

// From a stage through those before `end` and back.
double there_and_back(const PipelineShape& shape, const Costs& costs, int first, int end) {
  const Inboxes messages(shape, costs);
  Ways ways(messages, costs, whole_backward);
  double seconds = 0;
  for (int stage = first; stage < end; ++stage) seconds = ways.there_and_back(first, stage);
  return seconds;
}

// The seconds that messages add to the way through the first stages and back.
double messages_there_and_back(const PipelineShape& shape, const Costs& costs, int end) {
  double seconds = there_and_back(shape, costs, 0, end);
  for (int stage = 0; stage < end; ++stage) seconds -= round_trip(costs.stages[stage]);
  return seconds;
}

// The longest cycle of a microbatch from stage i to j and back, by the microbatches that it takes
// i on: `step` for each stage between, and one. Of all i >= first.
template <typename Part>
double longest_cycle(const PipelineShape& shape, const Costs& costs, int step, int longest,
                     Part&& backward, int first = 0) {
  const Inboxes messages(shape, costs);
  Ways ways(messages, costs, backward);
  const int d = shape.depth();
  double worst = 0;
  for (int i = first; i < d; ++i) {
    for (int j = i; j < std::min(d, i + longest); ++j) {
      const double cycle = ways.there_and_back(i, j) + costs.stages[j].recompute;
      worst = std::max(worst, cycle / (step * (j - i) + 1));
    }
  }
  return worst;
}

// The cycle of one stage alone is all of its work.
double slowest_cycle(const PipelineShape& shape, const Costs& costs, int longest, int first = 0) {
  const int step = shape.method->is_eager() ? 2 : 1;
  return longest_cycle(shape, costs, step, longest, whole_backward, first);
}

// Seconds of one microbatch's message on the link that it occupies the longest.
double busiest_link(const PipelineShape& shape, const Costs& costs) {
  double slowest = 0;
  const auto take = [&](const EdgeCosts& edge) {
    if (edge.bandwidth > 0) slowest = std::max(slowest, edge.message_bytes / edge.bandwidth);
  };
  if (shape.ranks == 1) return 0;
  for (const EdgeCosts& edge : costs.edges) take(edge);
  for (const SkipCosts& skip : costs.skips) take(skip.edge);
  return slowest;
}

double period_of_two_versions(const PipelineShape& shape, const Costs& costs) {
  const int m = shape.num_microbatches;
  const int d = shape.depth();
  double period = m * slowest_cycle(shape, costs, d);
  for (int i = 0; i < d; ++i) {
    const StageCosts& stage = costs.stages[i];
    const int lag = (shape.method->is_eager() ? 2 : 1) * (d - 1 - i);
    // From a batch's first F to the end of its update, two batches' time may pass.
    period = std::max({period, update(stage), ((m + lag) * work_of(stage) + update(stage)) / 2});
  }
  return period;
}

// The time from a stage's first F of a batch to its first F of the next one, for the first stage or
// a later one that takes longer to update. `seconds` gives how long a stage's batch takes.
template <typename Seconds>
double period_with_flush(const PipelineShape& shape, const Costs& costs, Seconds&& seconds) {
  double period = 0;
  double saved = 0;  // by leaving out the stages before, at least
  for (int first = 0; first < shape.depth(); ++first) {
    const double updating = update(costs.stages[first]);
    const bool may_be_longer = first == 0 || updating > update(costs.stages.front()) + saved;
    saved += round_trip(costs.stages[first]);
    if (!may_be_longer) continue;
    period = std::max(period, seconds(first) + updating);
  }
  return period;
}

double period_of_1f1b(const PipelineShape& shape, const Costs& costs) {
  const int further = shape.num_microbatches - 1;
  return period_with_flush(shape, costs, [&](int first) {
    const double way = there_and_back(shape, costs, first, shape.depth());
    const double cycle = slowest_cycle(shape, costs, std::max(further, 1), first);
    return costs.stages.back().recompute + way + further * cycle;
  });
}

double period_of_gpipe(const PipelineShape& shape, const Costs& costs) {
  const int further = shape.num_microbatches - 1;
  return period_with_flush(shape, costs, [&](int first) {
    const Inboxes messages(shape, costs);
    Ways ways(messages, costs, whole_backward);
    double longest_forward = busiest_link(shape, costs);
    double longest_backward = longest_forward;
    double way = 0;  // the longest one to a stage's last F, what it recomputes then, and back
    for (int i = first; i < shape.depth(); ++i) {
      const StageCosts& stage = costs.stages[i];
      longest_forward = std::max(longest_forward, stage.forward);
      longest_backward = std::max(longest_backward, work_of(stage) - stage.forward);
      const double there_and_back = ways.there_and_back(first, i);
      way = std::max(way, there_and_back + further * longest_forward + stage.recompute);
    }
    return way + further * longest_backward;
  });
}

double period_of_interleaved(const PipelineShape& shape, const Costs& costs) {
  const int p = shape.ranks;
  double way = 0;
  for (const StageCosts& stage : costs.stages) way += work_of(stage);
  const double filling = messages_there_and_back(shape, costs, p) +
                         way * (p - 1) / (double(p) * shape.stages_per_rank);
  return busiest_rank(shape, costs) + filling;
}

double period_of_zero_bubble(const PipelineShape& shape, const Costs& costs) {
  const int m = shape.num_microbatches;
  const Inboxes messages(shape, costs);
  const auto input_grad = [](const StageCosts& stage) { return stage.input_grad; };
  Ways ways(messages, costs, input_grad);
  double slowest = 0;
  double period = 0;
  for (int j = 0; j < shape.depth(); ++j) {
    const StageCosts& stage = costs.stages[j];
    const int gaps = std::min(j, m - 1);
    const double before = ways.there_and_back(0, j) - stage.forward - stage.input_grad;
    period = std::max(period, before + m * work_of(stage) - gaps * stage.weight_grad);
    slowest = std::max(slowest, work_of(stage));
  }
  const double cycle = longest_cycle(shape, costs, 1, std::max(m - 1, 1), input_grad);
  return period + (m - 1) * std::max(0.0, cycle - slowest) + update(costs.stages.front());
}

double period_of_chimera(const PipelineShape& shape, const Costs& costs) {
  const int d = shape.depth();
  const int units = (shape.num_microbatches + d - 1) / d;
  double forward = 0;
  double backward = 0;
  for (int i = 0; i < d; ++i) {
    forward += costs.stages[i].forward / d;
    backward += (work_of(costs.stages[i]) - costs.stages[i].forward) / d;
  }
  const double gap = backward + (units - 1) * std::max(0.0, backward - forward);
  return busiest_rank(shape, costs) + (d - 2) * gap + messages_there_and_back(shape, costs, d);
}

double period_of_v_with_two_versions(const PipelineShape& shape, const Costs& costs) {
  const int m = shape.num_microbatches;
  double period = m * seconds_per_microbatch_of_v(shape, costs);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const double work = work_of_rank(shape, costs, rank);
    for (const int stage : shape.stages_on(rank)) {
      const double updating = update(costs.stages[stage]);
      // From a batch's first F to the end of its update, two batches' time may pass.
      const int periods = m + most_in_flight(shape, stage) - 2;
      period = std::max({period, updating, (periods * work + updating) / 2});
    }
  }
  return period;
}

double period_of_drained_v(const PipelineShape& shape, const Costs& costs) {
  double work = 0;
  for (const StageCosts& stage : costs.stages) work += work_of(stage);
  double longest_update = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double updating = 0;
    for (const int stage : shape.stages_on(rank)) updating += update(costs.stages[stage]);
    longest_update = std::max(longest_update, updating);
  }
  const double mean_action = work / (3 * shape.depth());
  return shape.num_microbatches * seconds_per_microbatch_of_v(shape, costs) +
         counts_of_v(shape).idle_slots * mean_action +
         messages_there_and_back(shape, costs, shape.ranks) + longest_update;
}

double period_of(const PipelineShape& shape, const Costs& costs) {
  const ScheduleMethod& method = *shape.method;
  if (method.is_v()) {
    return method.is_flushed() ? period_of_drained_v(shape, costs)
                               : period_of_v_with_two_versions(shape, costs);
  }
  if (!method.is_flushed()) return period_of_two_versions(shape, costs);
  if (method.is_bidirectional()) return period_of_chimera(shape, costs);
  if (method.has_chunks) return period_of_interleaved(shape, costs);
  if (method.is_split) return period_of_zero_bubble(shape, costs);
  return method.keeps_whole_batch() ? period_of_gpipe(shape, costs) : period_of_1f1b(shape, costs);
}

PipelineShape with_microbatches(PipelineShape shape, int num_microbatches) {
  shape.num_microbatches = num_microbatches;
  return shape;
}

double simulated_period(const PipelineShape& shape, const Costs& costs) {
  const Schedule schedule = make_schedule(shape.method->name, shape.depth(), shape.num_microbatches,
                                          shape.stages_per_rank);
  return simulate(schedule, costs, 1).period;
}

}  // namespace

bool has_exact_formula(const ScheduleMethod& method) {
  return !method.is_flushed() || method.keeps_whole_batch();
}

double simulated_actions(const PipelineShape& shape) {
  const double pipelines = shape.method->is_bidirectional() ? 2 : 1;
  const double batches = 2 * std::max(3.0, 16 * shape.ranks * pipelines / shape.num_microbatches);
  const int kinds = shape.method->is_split ? 3 : 2;
  return batches * shape.depth() * shape.num_microbatches * kinds;
}

double period_by_formula(const PipelineShape& shape, const Costs& costs) {
  const double messages = shape.num_microbatches * (shape.method->is_bidirectional() ? 0.5 : 1);
  return std::max(period_of(shape, costs), messages * busiest_link(shape, costs));
}

double seconds_of(const EdgeCosts& edge) {
  return edge.latency + (edge.bandwidth > 0 ? edge.message_bytes / edge.bandwidth : 0);
}

double work_of_rank(const PipelineShape& shape, const Costs& costs, int rank) {
  double work = 0;
  for (const int stage : shape.stages_on(rank)) work += work_of(costs.stages[stage]);
  return work;
}

double work_of(const StageCosts& stage) {
  return stage.forward + stage.input_grad + stage.weight_grad + stage.recompute;
}

double busiest_rank(const PipelineShape& shape, const Costs& costs) {
  const double share = shape.method->is_bidirectional() ? 0.5 : 1;
  double busiest = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double seconds = 0;
    double of_host = 0;
    for (const int stage : shape.stages_on(rank)) {
      const StageCosts& cost = costs.stages[stage];
      seconds += share * shape.num_microbatches * work_of(cost);
      if (costs.host) {
        of_host += cost.update;
      } else {
        seconds += shape.method->is_flushed() ? update(cost) : cost.update;
      }
    }
    busiest = std::max({busiest, seconds, of_host});
  }
  return busiest;
}

StepTime step_time(const PipelineShape& shape, const Costs& costs) {
  const double busy = busiest_rank(shape, costs);
  const PipelineShape shorter = with_microbatches(shape, 4 * shape.ranks);
  const PipelineShape longer = with_microbatches(shape, 6 * shape.ranks);
  double seconds = 0;
  if (simulated_actions(shape) <= kMostSimulatedActions) {
    seconds = simulated_period(shape, costs);
  } else if (!has_exact_formula(*shape.method) &&
             shape.num_microbatches > longer.num_microbatches &&
             simulated_actions(shorter) + simulated_actions(longer) <= kMostSimulatedActions) {
    const double first = simulated_period(shorter, costs);
    const double slope = (simulated_period(longer, costs) - first) /
                         (longer.num_microbatches - shorter.num_microbatches);
    seconds = first + slope * (shape.num_microbatches - shorter.num_microbatches);
  } else {
    seconds = period_by_formula(shape, costs);
  }
  seconds = std::max(seconds, busy);
  return {.seconds = seconds, .bubble = seconds > 0 ? 1 - busy / seconds : 0};
}

}  // namespace pd2
