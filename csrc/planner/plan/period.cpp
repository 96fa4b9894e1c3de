#include "planner/plan/period.h"

#include "core/schedule/generate.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;

double round_trip(const StageCosts& stage) {
  return stage.forward + stage.input_grad + stage.weight_grad;
}

double whole_backward(const StageCosts& stage) { return stage.input_grad + stage.weight_grad; }

// The longest ways of a microbatch from a stage's F to the end of a later one's, and from there
// back: from the start of B to the end of the first one's.
class Ways {
 public:
  template <typename Part>
  Ways(const PipelineShape& shape, const Costs& costs, Part&& backward)
      : costs_(costs), begins_(shape.depth() + 1, 0), there_(shape.depth()), back_(shape.depth()) {
    const bool is_free = costs.edges.empty() || shape.ranks == 1;
    const std::span<const SkipCosts> skips(costs.skips.data(),
                                           shape.ranks == 1 ? 0 : costs.skips.size());
    for (int stage = 0; stage < shape.depth(); ++stage) {
      backward_.push_back(backward(costs.stages[stage]));
      if (stage > 0) {
        messages_.push_back({stage - 1, is_free ? 0 : costs.edges[stage - 1].seconds()});
      }
      for (const auto& [from, to, edge] : skips) {
        if (to == stage) messages_.push_back({from, edge.seconds()});
      }
      begins_[stage + 1] = static_cast<int>(messages_.size());
    }
  }

  // Must be called for rising stages, beginning with `first`.
  double there_and_back(int first, int stage) {
    double there = 0;
    double back = 0;
    for (int i = begins_[stage]; i < begins_[stage + 1]; ++i) {
      const auto [from, seconds] = messages_[i];
      if (from < first) continue;
      there = std::max(there, there_[from] + seconds);
      back = std::max(back, back_[from] + seconds);
    }
    there_[stage] = there + costs_.stages[stage].forward;
    back_[stage] = back + backward_[stage];
    return there_[stage] + back_[stage];
  }

 private:
  struct Message {
    int from = 0;
    double seconds = 0;
  };

  const Costs& costs_;
  std::vector<Message> messages_;  // by the stage that receives them: the one before, then others
  std::vector<int> begins_;        // by stage
  std::vector<double> backward_;
  std::vector<double> there_;
  std::vector<double> back_;
};

// From a stage through those before `end` and back.
double there_and_back(const PipelineShape& shape, const Costs& costs, int first, int end) {
  Ways ways(shape, costs, whole_backward);
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
  Ways ways(shape, costs, backward);
  const int d = shape.depth();
  double worst = 0;
  for (int i = first; i < d; ++i) {
    for (int j = i; j < std::min(d, i + longest); ++j) {
      double cycle = ways.there_and_back(i, j) + costs.stages[j].recompute;
      if (shape.is_stashed()) cycle += costs.stages[i].seconds(kUpdate);
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
    slowest = std::max(slowest, edge.busy_seconds());
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
    period = std::max(
        {period, stage.seconds(kUpdate), ((m + lag) * stage.work() + stage.seconds(kUpdate)) / 2});
    // From the first F that waits for an update, of which lag + 1 are late, to the end of the next.
    if (shape.method->is_fresh) {
      period = std::max(period, (m - 1) * stage.work() + stage.seconds(kUpdate));
    }
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
    const double updating = costs.stages[first].seconds(kUpdate);
    const bool may_be_longer =
        first == 0 || updating > costs.stages.front().seconds(kUpdate) + saved;
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
    Ways ways(shape, costs, whole_backward);
    double longest_forward = busiest_link(shape, costs);
    double longest_backward = longest_forward;
    double way = 0;  // the longest one to a stage's last F, what it recomputes then, and back
    for (int i = first; i < shape.depth(); ++i) {
      const StageCosts& stage = costs.stages[i];
      longest_forward = std::max(longest_forward, stage.forward);
      longest_backward = std::max(longest_backward, stage.work() - stage.forward);
      const double there_and_back = ways.there_and_back(first, i);
      way = std::max(way, there_and_back + further * longest_forward + stage.recompute);
    }
    return way + further * longest_backward;
  });
}

double period_of_interleaved(const PipelineShape& shape, const Costs& costs) {
  const int p = shape.ranks;
  double way = 0;
  for (const StageCosts& stage : costs.stages) way += stage.work();
  const double filling = messages_there_and_back(shape, costs, p) +
                         way * (p - 1) / (double(p) * shape.stages_per_rank);
  return busiest_rank(shape, costs) + filling;
}

double period_of_zero_bubble(const PipelineShape& shape, const Costs& costs) {
  const int m = shape.num_microbatches;
  const auto input_grad = [](const StageCosts& stage) { return stage.input_grad; };
  Ways ways(shape, costs, input_grad);
  double slowest = 0;
  double period = 0;
  for (int j = 0; j < shape.depth(); ++j) {
    const StageCosts& stage = costs.stages[j];
    const int gaps = std::min(j, m - 1);
    const double before = ways.there_and_back(0, j) - stage.forward - stage.input_grad;
    period = std::max(period, before + m * stage.work() - gaps * stage.weight_grad);
    slowest = std::max(slowest, stage.work());
  }
  const double cycle = longest_cycle(shape, costs, 1, std::max(m - 1, 1), input_grad);
  return period + (m - 1) * std::max(0.0, cycle - slowest) + costs.stages.front().seconds(kUpdate);
}

double period_of_chimera(const PipelineShape& shape, const Costs& costs) {
  const int d = shape.depth();
  const int units = (shape.num_microbatches + d - 1) / d;
  double forward = 0;
  double backward = 0;
  for (int i = 0; i < d; ++i) {
    forward += costs.stages[i].forward / d;
    backward += (costs.stages[i].work() - costs.stages[i].forward) / d;
  }
  const double gap = backward + (units - 1) * std::max(0.0, backward - forward);
  return busiest_rank(shape, costs) + (d - 2) * gap + messages_there_and_back(shape, costs, d);
}

// ---------------------------------------------------------------- a V

// An action ends no sooner than `seconds` after another one, of the period `behind` before its own.
struct Wait {
  int action = 0;
  int other = 0;
  double seconds = 0;
  int behind = 0;
};

// All actions of all ranks' periods, and what each waits for.
class Waits {
 public:
  Waits(const PipelineShape& shape, const Costs& costs)
      : shape_(shape), costs_(costs), periods_(v_periods(shape.ranks, shape.method->v).value()) {
    for (int rank = 0; rank < shape.ranks; ++rank) add_order(rank);
    for (int stage = 0; stage + 1 < shape.depth(); ++stage) {
      add_messages(stage, stage + 1, costs.edges.empty() ? EdgeCosts{} : costs.edges[stage]);
    }
    for (const auto& [from, to, edge] : costs.skips) add_messages(from, to, edge);
    std::ranges::stable_sort(waits_, {}, &Wait::action);
  }

  int num_actions() const { return num_actions_; }
  const std::vector<Wait>& all() const { return waits_; }

 private:
  struct Place {
    int action = 0;  // its number
    int lag = 0;
  };

  // After the action before, or the last one of the period before. What an I recomputes it
  // recomputes then, even while its message is under way.
  void add_order(int rank) {
    const Period& period = periods_[rank];
    const auto count = static_cast<int>(period.size());
    for (int i = 0; i < count; ++i) {
      const int stage = period[i].chunk == 0 ? rank : shape_.depth() - 1 - rank;
      const ActionKind kind = period[i].kind;
      const double again = kind == kInputGrad ? costs_.stages[stage].recompute : 0;
      waits_.push_back({num_actions_ + i, num_actions_ + (i + count - 1) % count,
                        costs_.stages[stage].seconds(kind) + again, i == 0 ? 1 : 0});
    }
    num_actions_ += count;
  }

  Place place_of(int stage, ActionKind kind) const {
    const int rank = shape_.rank_of(stage);
    const Period& period = periods_[rank];
    const auto found = std::ranges::find_if(period, [&](const PeriodAction& action) {
      return action.chunk == (stage == rank ? 0 : 1) && action.kind == kind;
    });
    const auto before = rank * static_cast<int>(period.size());
    return {before + static_cast<int>(found - period.begin()), found->lag};
  }

  void add_messages(int from, int to, const EdgeCosts& edge) {
    if (shape_.rank_of(from) == shape_.rank_of(to)) return;
    add_message(from, to, kForward, edge.seconds());
    add_message(to, from, kInputGrad, edge.seconds());
  }

  void add_message(int from, int to, ActionKind kind, double hop) {
    const Place sender = place_of(from, kind);
    const Place receiver = place_of(to, kind);
    waits_.push_back({receiver.action, sender.action, hop + costs_.stages[to].seconds(kind),
                      receiver.lag - sender.lag});
  }

  const PipelineShape& shape_;
  const Costs& costs_;
  const std::vector<Period> periods_;
  int num_actions_ = 0;
  std::vector<Wait> waits_;
};

// Ends of actions if each period takes a given time.
class Ends {
 public:
  Ends(const Waits& waits, double of_period)
      : waits_(waits.all()),
        of_period_(of_period),
        ends_(waits.num_actions(), 0),
        latest_(waits.num_actions(), nullptr) {}

  // Moves all to where their waits want them, once: with the waits in order, then in reverse order,
  // as messages go down the ranks and up. False: all are there.
  bool move() {
    bool has_moved = false;
    const auto apply = [&](const Wait& wait) {
      const double end = ends_[wait.other] + wait.seconds - of_period_ * wait.behind;
      if (end <= ends_[wait.action] + 1e-9 * of_period_) return;
      ends_[wait.action] = end;
      latest_[wait.action] = &wait;
      has_moved = true;
    };
    std::ranges::for_each(waits_, apply);
    std::for_each(waits_.rbegin(), waits_.rend(), apply);
    return has_moved;
  }

  // Seconds by period around a circle of waits that moved each other, which will move for ever.
  std::optional<double> circle() const {
    const auto count = static_cast<int>(ends_.size());
    std::vector<int> seen(count, -1);
    for (int first = 0; first < count; ++first) {
      int action = first;
      while (latest_[action] != nullptr && seen[action] < 0) {
        seen[action] = first;
        action = latest_[action]->other;
      }
      if (latest_[action] != nullptr && seen[action] == first) return around(action);
    }
    return std::nullopt;
  }

 private:
  double around(int first) const {
    double seconds = 0;
    int behind = 0;
    int action = first;
    do {
      seconds += latest_[action]->seconds;
      behind += latest_[action]->behind;
      action = latest_[action]->other;
    } while (action != first);
    return seconds / behind;
  }

  const std::vector<Wait>& waits_;
  const double of_period_;
  std::vector<double> ends_;
  std::vector<const Wait*> latest_;  // by action: what moved it last
};

double period_of_v_with_two_versions(const PipelineShape& shape, const Costs& costs) {
  const int m = shape.num_microbatches;
  double period = m * seconds_per_microbatch_of_v(shape, costs);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const double work = work_of_rank(shape, costs, rank);
    for (const int stage : shape.stages_on(rank)) {
      const double updating = costs.stages[stage].seconds(kUpdate);
      // From a batch's first F to the end of its update, two batches' time may pass.
      const int periods = m + most_in_flight(shape, stage) - 2;
      period = std::max({period, updating, (periods * work + updating) / 2});
    }
  }
  return period;
}

double period_of_drained_v(const PipelineShape& shape, const Costs& costs) {
  double work = 0;
  for (const StageCosts& stage : costs.stages) work += stage.work();
  double longest_update = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double updating = 0;
    for (const int stage : shape.stages_on(rank)) updating += costs.stages[stage].seconds(kUpdate);
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
  if (shape.is_stashed()) return slowest_cycle(shape, costs, shape.depth());
  if (!method.is_flushed()) return period_of_two_versions(shape, costs);
  if (method.is_bidirectional()) return period_of_chimera(shape, costs);
  if (method.has_chunks) return period_of_interleaved(shape, costs);
  if (method.is_split) return period_of_zero_bubble(shape, costs);
  return method.keeps_whole_batch() ? period_of_gpipe(shape, costs) : period_of_1f1b(shape, costs);
}

double simulated_period(const PipelineShape& shape, const Costs& costs) {
  const Schedule schedule = make_schedule(shape.method->name, shape.depth(), shape.num_microbatches,
                                          shape.stages_per_rank);
  return simulate(schedule, costs, 1).period;
}

}  // namespace

// Raised from the busiest rank's work to the seconds of a circle that does not fit into it, until
// all do (Dinkelbach).
double seconds_per_microbatch_of_v(const PipelineShape& shape, const Costs& costs) {
  const Waits waits(shape, costs);
  double longest = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    longest = std::max(longest, work_of_rank(shape, costs, rank));
  }
  while (true) {
    Ends ends(waits, longest);
    std::optional<double> longer;
    while (!longer && ends.move()) longer = ends.circle();
    if (!longer || *longer <= longest) return longest;
    longest = *longer;
  }
}

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
  return std::max(period_of(shape, costs),
                  shape.microbatches_of_copy() * busiest_link(shape, costs));
}

double work_of_rank(const PipelineShape& shape, const Costs& costs, int rank) {
  double work = 0;
  for (const int stage : shape.stages_on(rank)) work += costs.stages[stage].work();
  return work;
}

double busiest_rank(const PipelineShape& shape, const Costs& costs) {
  double busiest = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double seconds = 0;
    double of_host = 0;
    for (const int stage : shape.stages_on(rank)) {
      const StageCosts& cost = costs.stages[stage];
      seconds += shape.microbatches_of_copy() * cost.work();
      if (costs.host) {
        of_host += cost.update;
      } else {
        const bool waits = shape.method->is_flushed() || shape.is_stashed();
        seconds += waits ? cost.seconds(kUpdate) : cost.update;
      }
    }
    busiest = std::max({busiest, seconds, of_host});
  }
  return busiest;
}

StepTime step_time(const PipelineShape& shape, const Costs& costs) {
  const double busy = busiest_rank(shape, costs);
  PipelineShape shorter = shape, longer = shape;
  shorter.num_microbatches = 4 * shape.ranks;
  longer.num_microbatches = 6 * shape.ranks;
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
