#include "core/schedule/v_shape.h"

#include "core/floor.h"
#include "core/schedule/messages.h"
#include "core/schedule/walk.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

constexpr int kSlots = 6;  // of a period

// Where the way turns: slots from the last one of a pass to the first one of the next.
using Turns = std::array<int, 3>;

// A rank's actions of microbatch 0. W's have the two slots that are left of a period, in the order
// in which less is in flight.
struct Slots {
  std::array<int, 2> forward, input_grad, weight_grad;  // by chunk
};

// False: two actions have one slot.
bool give_slots(int ranks, const VSteps& steps, const Turns& turns, int rank, Slots& slots) {
  const int last = ranks - 1;
  const int bottom = steps.forward_down * last + turns[0];
  const int loss = bottom + steps.forward_up * last + turns[1];
  const int back = loss + steps.backward_down * last + turns[2];
  slots.forward = {steps.forward_down * rank, bottom + steps.forward_up * (last - rank)};
  slots.input_grad = {back + steps.backward_up * (last - rank), loss + steps.backward_down * rank};
  unsigned is_free = (1u << kSlots) - 1;
  for (const auto& pair : {slots.forward, slots.input_grad}) {
    for (const int slot : pair) is_free &= ~(1u << slot % kSlots);
  }
  if (std::popcount(is_free) != 2) return false;
  const int low = std::countr_zero(is_free);
  const int high = std::bit_width(is_free) - 1;
  const auto first_after = [](int slot, int phase) {
    return slot + 1 + floor_mod(phase - slot - 1, kSlots);
  };
  int least = std::numeric_limits<int>::max();
  for (const auto& [first, second] : {std::pair(low, high), std::pair(high, low)}) {
    const std::array<int, 2> tried = {first_after(slots.input_grad[0], first),
                                      first_after(slots.input_grad[1], second)};
    if (tried[0] + tried[1] < least) {
      least = tried[0] + tried[1];
      slots.weight_grad = tried;
    }
  }
  return true;
}

Period period_of(const Slots& slots) {
  std::vector<std::pair<int, PeriodAction>> by_slot;
  const int begin = slots.forward[0];
  const auto add = [&](int chunk, ActionKind kind, int slot) {
    by_slot.push_back({floor_mod(slot - begin, kSlots),
                       {.chunk = chunk, .kind = kind, .lag = floor_div(slot - begin, kSlots)}});
  };
  for (int chunk = 0; chunk < 2; ++chunk) {
    add(chunk, kForward, slots.forward[chunk]);
    add(chunk, kInputGrad, slots.input_grad[chunk]);
    add(chunk, kWeightGrad, slots.weight_grad[chunk]);
  }
  std::ranges::sort(by_slot, {}, &std::pair<int, PeriodAction>::first);
  Period period;
  for (const auto& [slot, action] : by_slot) period.push_back(action);
  return period;
}

std::optional<std::vector<Period>> periods_with(int ranks, const VSteps& steps,
                                                const Turns& turns) {
  std::vector<Period> periods;
  for (int rank = 0; rank < ranks; ++rank) {
    Slots slots;
    if (!give_slots(ranks, steps, turns, rank, slots)) return std::nullopt;
    periods.push_back(period_of(slots));
  }
  return periods;
}

// When the rank does this of microbatch 0: its place in the period, later by its lag.
int step_of(const Period& period, int chunk, ActionKind kind) {
  const auto found = std::ranges::find_if(period, [&](const PeriodAction& action) {
    return action.chunk == chunk && action.kind == kind;
  });
  return kSlots * found->lag + static_cast<int>(found - period.begin());
}

struct Pattern {
  std::vector<Period> periods;  // by rank
  int least_microbatches = 1;
  int most_on_round_trip = 1;
};

Pattern pattern_with(std::vector<Period> periods) {
  Pattern pattern = {.periods = std::move(periods)};
  pattern.most_on_round_trip = most_between(pattern.periods.front(), 0, kForward, kInputGrad);
  int& least = pattern.least_microbatches;
  for (const Period& period : pattern.periods) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      // W of microbatch m - 1 comes before F of microbatch 2 m.
      least = std::max(least, most_between(period, chunk, kForward, kWeightGrad) - 1);
    }
  }
  return pattern;
}

// With the turns that hold the fewest activations.
std::optional<Pattern> find_pattern(int ranks, const VSteps& steps) {
  std::optional<Pattern> best;
  std::tuple<int, int, int> least;
  for (int first = 1; first <= kSlots; ++first) {
    for (int second = 1; second <= kSlots; ++second) {
      for (int third = 1; third <= kSlots; ++third) {
        auto periods = periods_with(ranks, steps, {first, second, third});
        if (!periods) continue;
        int most = 0, sum = 0;
        for (const Period& period : *periods) {
          const int halves = most_halves_in_flight(period);
          most = std::max(most, halves);
          sum += halves;
        }
        const std::tuple cost = {most, sum, first + second + third};
        if (best && cost >= least) continue;
        least = cost;
        best = pattern_with(*std::move(periods));
      }
    }
  }
  return best;
}

const std::optional<Pattern>& pattern_of(int ranks, const VSteps& steps) {
  static std::mutex mutex;
  static std::map<std::pair<int, VSteps>, std::optional<Pattern>> found;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = found.try_emplace({ranks, steps});
  if (is_new) place->second = find_pattern(ranks, steps);
  return place->second;
}

// Behind a batch's last backward of the stage its update, too.
void append(std::vector<Action>& list, const Action& action, int m) {
  list.push_back(action);
  const bool ends_backward = action.kind == kBackward || action.kind == kWeightGrad;
  if (ends_backward && floor_mod(action.microbatch, m) == m - 1) {
    list.push_back({.stage = action.stage, .kind = kUpdate, .microbatch = action.microbatch});
  }
}

RankActions lists_of(const Period& period, int ranks, int rank, int m, bool drains) {
  return repeated(period, m, m, drains, [&](const PeriodAction& of, int microbatch) -> Action {
    const int stage = of.chunk == 0 ? rank : 2 * ranks - 1 - rank;
    return {.stage = stage, .kind = of.kind, .microbatch = microbatch};
  });
}

// A rank of a batch that drains, where all actions take one slot, and messages none.
struct DrainingRank {
  int slot = 0;  // the next one that is free
  std::size_t forwards_left = 0;
  std::deque<Action> weight_grads;  // the I's that are done and whose W's are not
  std::vector<Action> list;

  void take_weight_grad(int m) {
    const Action& of = weight_grads.front();
    append(list, {.stage = of.stage, .kind = kWeightGrad, .microbatch = of.microbatch}, m);
    weight_grads.pop_front();
    ++slot;
  }
};

// The lists of a batch that drains: as the periods have them to a rank's last F, and after it every
// I as soon as its message is there, and W's while it is not.
std::vector<std::vector<Action>> drained_lists(const Schedule& schedule,
                                               const std::vector<Period>& periods) {
  const int m = schedule.num_microbatches;
  const auto num_ranks = static_cast<int>(periods.size());
  std::vector<DrainingRank> ranks(num_ranks);
  std::vector<std::vector<Action>> orders(num_ranks);  // without the W's after the last F
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::vector<Action> whole = lists_of(periods[rank], num_ranks, rank, m, true).prologue;
    std::size_t& forwards = ranks[rank].forwards_left;
    forwards = std::ranges::count(whole, kForward, &Action::kind);
    std::size_t passed = 0;
    for (const Action& action : whole) {
      if (action.kind == kUpdate || (action.kind == kWeightGrad && passed == forwards)) continue;
      passed += action.kind == kForward;
      orders[rank].push_back(action);
    }
  }
  Arrivals arrivals({schedule, chain_of(schedule.depth()), {0, m}});
  const auto waits_for = [&](const Action& action) { return arrivals.missing(action); };
  walk(schedule, orders, waits_for, [&](const Action& action) {
    DrainingRank& rank = ranks[schedule.placement[action.stage]];
    if (action.kind == kWeightGrad) return rank.take_weight_grad(m);
    const int begin = static_cast<int>(arrivals.latest(action, 0));
    while (rank.forwards_left == 0 && rank.slot < begin && !rank.weight_grads.empty()) {
      rank.take_weight_grad(m);
    }
    rank.slot = std::max(rank.slot, begin) + 1;
    arrivals.send(action, [&](int) { return rank.slot; });
    rank.list.push_back(action);
    if (action.kind == kForward) --rank.forwards_left;
    if (action.kind == kInputGrad) rank.weight_grads.push_back(action);
  });
  std::vector<std::vector<Action>> lists;
  for (DrainingRank& rank : ranks) {
    while (!rank.weight_grads.empty()) rank.take_weight_grad(m);
    lists.push_back(std::move(rank.list));
  }
  return lists;
}

}  // namespace

RankActions repeated(const Period& period, int num_periods, int m, bool drains,
                     const std::function<Action(const PeriodAction& of, int number)>& action) {
  int end = num_periods;  // the period after which all of a batch is done
  for (const PeriodAction& of : period) end = std::max(end, num_periods + of.lag);
  const auto add = [&](std::vector<Action>& list, int begin, int last, int first_number) {
    for (int k = begin; k < last; ++k) {
      for (const PeriodAction& of : period) {
        const int number = k - of.lag;
        if (number >= first_number && number < num_periods) append(list, action(of, number), m);
      }
    }
  };
  RankActions actions;
  add(actions.prologue, 0, drains ? end : num_periods, 0);
  if (drains) {
    actions.steady = actions.prologue;
  } else {
    add(actions.steady, 0, num_periods, -end);
    add(actions.epilogue, num_periods, end, -end);
  }
  return actions;
}

std::array<int, 2> in_flight_at(const Period& period, int place) {
  std::array<int, 2> in_flight{};
  for (int chunk = 0; chunk < 2; ++chunk) {
    // Begun by the end of this place, and not ended before it.
    const int begun = floor_div(place - step_of(period, chunk, kForward), kSlots);
    const int ended = floor_div(place - 1 - step_of(period, chunk, kWeightGrad), kSlots);
    in_flight[chunk] = begun - ended;
  }
  return in_flight;
}

int most_halves_in_flight(const Period& period) {
  int most = 0;
  for (int place = 0; place < kSlots; ++place) {
    const auto [first, second] = in_flight_at(period, place);
    most = std::max(most, first + second);
  }
  return most;
}

int most_between(const Period& period, int chunk, ActionKind from, ActionKind to) {
  return floor_div(step_of(period, chunk, to) - step_of(period, chunk, from), kSlots) + 1;
}

int least_microbatches(int ranks, const VSteps& steps) {
  return pattern_of(ranks, steps).value().least_microbatches;
}

int most_on_round_trip(int ranks, const VSteps& steps) {
  return pattern_of(ranks, steps).value().most_on_round_trip;
}

std::optional<std::vector<Period>> v_periods(int ranks, const VSteps& steps) {
  const std::optional<Pattern>& pattern = pattern_of(ranks, steps);
  return pattern ? std::optional(pattern->periods) : std::nullopt;
}

Schedule make_v_schedule(std::string_view name, const std::vector<Period>& periods,
                         int num_microbatches, bool is_flushed) {
  const int ranks = static_cast<int>(periods.size());
  const int delay = is_flushed ? 0 : 1;
  Schedule schedule;
  schedule.name = name;
  schedule.num_stages = 2 * ranks;
  schedule.num_microbatches = num_microbatches;
  schedule.delay.assign(2 * ranks, delay);
  schedule.num_versions.assign(2 * ranks, delay + 1);
  for (int stage = 0; stage < 2 * ranks; ++stage) {
    schedule.placement.push_back(std::min(stage, 2 * ranks - 1 - stage));
  }
  if (is_flushed) {
    for (const std::vector<Action>& list : drained_lists(schedule, periods)) {
      schedule.ranks.push_back({.prologue = list, .steady = list, .epilogue = {}});
    }
    return schedule;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.ranks.push_back(lists_of(periods[rank], ranks, rank, num_microbatches, false));
  }
  return schedule;
}

}  // namespace pd2
