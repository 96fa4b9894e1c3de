#include "planner/plan/v_cycle.h"

#include "core/schedule/v_shape.h"
#include "planner/plan/period.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;

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

  double seconds(int stage, ActionKind kind) const {
    const StageCosts& costs = costs_.stages[stage];
    return kind == kForward     ? costs.forward
           : kind == kInputGrad ? costs.input_grad
                                : costs.weight_grad;
  }

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
                        seconds(stage, kind) + again, i == 0 ? 1 : 0});
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
    add_message(from, to, kForward, seconds_of(edge));
    add_message(to, from, kInputGrad, seconds_of(edge));
  }

  void add_message(int from, int to, ActionKind kind, double hop) {
    const Place sender = place_of(from, kind);
    const Place receiver = place_of(to, kind);
    waits_.push_back(
        {receiver.action, sender.action, hop + seconds(to, kind), receiver.lag - sender.lag});
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

}  // namespace pd2
