// Random schedules: made ones, and what small changes make of them.

#pragma once

#include "core/check.h"
#include "core/schedule/generate.h"
#include "core/schedule/methods.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <utility>
#include <vector>

namespace pd2::testing {

// The same sequence for a seed everywhere: the standard's distributions differ between libraries.
class ScheduleMutator {
 public:
  explicit ScheduleMutator(unsigned seed) : random_(seed) {}

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  // Any name, up to max_stages stages, any number of them a rank.
  Schedule make(int max_stages, int max_microbatches) {
    const std::vector<std::string> names = schedule_names();
    const std::string& name = names[below(static_cast<int>(names.size()))];
    while (true) {
      const int d = 1 + below(max_stages);
      const int v = below(2) ? 1 : 1 + below(d);
      try {
        return make_schedule(name, d, 1 + below(max_microbatches), v);
      } catch (const ValueError&) {
      }
    }
  }

  // One small change. Most of them are made to all of a rank's lists alike: what trains on differs
  // from a made schedule in every batch.
  void change(Schedule& s) {
    const int rank = below(static_cast<int>(s.ranks.size()));
    const std::vector<Action> known = all_actions(s.ranks[rank]);
    if (known.empty()) return;
    const Action action = known[below(static_cast<int>(known.size()))];
    switch (below(21)) {
      case 0:
      case 1:
      case 2:
        return in_lists(s, rank, [&](auto& list) { swap_neighbours(s, list, action); });
      case 3:
      case 4:
        return in_lists(s, rank, [&](auto& list) { move_within(s, list, action); });
      case 5:
      case 6:
      case 7:
        return postpone(s, rank, action);
      case 8:
        return in_lists(s, rank, [&](auto& list) { split(s, list, action); });
      case 9:
        return in_lists(s, rank, [&](auto& list) { merge(s, list, action); });
      case 10:
        return in_lists(s, rank, [&](auto& list) {
          const int at = find(s, list, action);
          if (at >= 0) list.erase(list.begin() + at);
        });
      case 11:
        return in_lists(s, rank, [&](auto& list) {
          if (find(s, list, action) >= 0) insert(list, action);
        });
      case 12: {
        constexpr ActionKind kKinds[] = {ActionKind::kForward, ActionKind::kBackward,
                                         ActionKind::kInputGrad, ActionKind::kWeightGrad,
                                         ActionKind::kUpdate};
        const ActionKind kind = kKinds[below(5)];
        return edit(s, rank, action, [&](Action& each) { each.kind = kind; });
      }
      case 13: {
        const int stage = below(s.num_stages + 2) - 1;
        return edit(s, rank, action, [&](Action& each) { each.stage = stage; });
      }
      case 14: {
        const int steps[] = {-s.num_microbatches, -1, 1, s.num_microbatches};
        const int by = steps[below(4)];
        return edit(s, rank, action, [&](Action& each) { each.microbatch += by; });
      }
      case 15:
        s.delay[below(s.num_stages)] = below(3) ? below(4) - 1 : below(12);
        if (below(2)) {
          s.late_forwards = s.late_forwards_of_each();
          s.late_forwards[below(s.num_stages)] = below(s.num_microbatches + 3) - 1;
        }
        return;
      case 16: {
        // Often together: a delay that nobody keeps the versions for is soon found.
        const int stage = below(s.num_stages);
        s.num_versions[stage] = below(3) ? below(5) : below(12);
        if (below(4)) s.delay[stage] = std::max(s.num_versions[stage] - below(3), 0);
        return;
      }
      case 17:
        s.placement[below(s.num_stages)] = below(static_cast<int>(s.ranks.size()) + 2) - 1;
        return;
      case 18:
        return exchange_ranks(s);
      case 19:
        return in_lists(s, rank, [&](auto& list) { exchange_numbers(list, action); });
      default: {
        // From one list to another, as it is.
        std::vector<Action>& from = list_of(s.ranks[rank], below(3));
        if (from.empty()) return;
        const int at = below(static_cast<int>(from.size()));
        const Action moved = from[at];
        from.erase(from.begin() + at);
        insert(
            list_of(s.ranks[below(4) ? rank : below(static_cast<int>(s.ranks.size()))], below(3)),
            moved);
      }
    }
  }

 private:
  static std::vector<Action>& list_of(RankActions& rank, int which) {
    return which == 0 ? rank.prologue : which == 1 ? rank.steady : rank.epilogue;
  }

  static std::vector<Action> all_actions(const RankActions& rank) {
    std::vector<Action> all = rank.prologue;
    all.insert(all.end(), rank.steady.begin(), rank.steady.end());
    all.insert(all.end(), rank.epilogue.begin(), rank.epilogue.end());
    return all;
  }

  static int find(const Schedule& s, const std::vector<Action>& list, const Action& action) {
    const int m = std::max(s.num_microbatches, 1);
    for (std::size_t i = 0; i < list.size(); ++i) {
      const bool same_place = (list[i].microbatch - action.microbatch) % m == 0;
      if (list[i].stage == action.stage && list[i].kind == action.kind && same_place) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  // In all lists of the rank, or in one.
  template <typename Change>
  void in_lists(Schedule& s, int rank, Change&& change) {
    const int only = below(4) > 0 ? -1 : below(3);
    for (int which = 0; which < 3; ++which) {
      if (only < 0 || only == which) change(list_of(s.ranks[rank], which));
    }
  }

  template <typename Change>
  void edit(Schedule& s, int rank, const Action& action, Change&& change) {
    in_lists(s, rank, [&](std::vector<Action>& list) {
      const int at = find(s, list, action);
      if (at >= 0) change(list[at]);
    });
  }

  void insert(std::vector<Action>& list, const Action& action, int from = 0) {
    const int at = from + below(static_cast<int>(list.size()) - from + 1);
    list.insert(list.begin() + at, action);
  }

  void swap_neighbours(const Schedule& s, std::vector<Action>& list, const Action& action) {
    const int at = find(s, list, action);
    if (at >= 0 && at + 1 < static_cast<int>(list.size())) std::swap(list[at], list[at + 1]);
  }

  void move_within(const Schedule& s, std::vector<Action>& list, const Action& action) {
    const int at = find(s, list, action);
    if (at < 0) return;
    const Action moved = list[at];
    list.erase(list.begin() + at);
    insert(list, moved);
  }

  // B becomes I and, later, W.
  void split(const Schedule& s, std::vector<Action>& list, Action action) {
    action.kind = ActionKind::kBackward;
    const int at = find(s, list, action);
    if (at < 0) return;
    list[at].kind = ActionKind::kInputGrad;
    Action weights = list[at];
    weights.kind = ActionKind::kWeightGrad;
    insert(list, weights, below(3) ? at + 1 : 0);
  }

  void merge(const Schedule& s, std::vector<Action>& list, Action action) {
    action.kind = ActionKind::kInputGrad;
    const int input = find(s, list, action);
    action.kind = ActionKind::kWeightGrad;
    const int weights = find(s, list, action);
    if (input < 0 || weights < 0) return;
    const int stays = below(2) ? input : weights;
    list[stays].kind = ActionKind::kBackward;
    list.erase(list.begin() + (stays == input ? weights : input));
  }

  // From a batch's own lists to those of the batch after, and the drain's.
  void postpone(Schedule& s, int rank, const Action& action) {
    RankActions& lists = s.ranks[rank];
    const int at = find(s, lists.prologue, action);
    const int again = find(s, lists.steady, action);
    if (at < 0 || again < 0) return;
    Action late = lists.steady[again];
    late.microbatch -= s.num_microbatches;
    lists.epilogue.insert(lists.epilogue.begin() +
                              (below(2) ? 0 : below(static_cast<int>(lists.epilogue.size()) + 1)),
                          lists.prologue[at]);
    lists.prologue.erase(lists.prologue.begin() + at);
    lists.steady.erase(lists.steady.begin() + again);
    if (below(2)) {
      insert(lists.steady, late);
    } else {
      lists.steady.insert(lists.steady.begin(), late);
    }
  }

  // Of two actions of a kind on a stage.
  void exchange_numbers(std::vector<Action>& list, const Action& like) {
    std::vector<int> places;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].stage == like.stage && list[i].kind == like.kind) {
        places.push_back(static_cast<int>(i));
      }
    }
    if (places.empty()) return;
    const int count = static_cast<int>(places.size());
    std::swap(list[places[below(count)]].microbatch, list[places[below(count)]].microbatch);
  }

  // The lists, and most of the time the placement: then only the ranks' names change.
  void exchange_ranks(Schedule& s) {
    const int one = below(static_cast<int>(s.ranks.size()));
    const int other = below(static_cast<int>(s.ranks.size()));
    std::swap(s.ranks[one], s.ranks[other]);
    if (below(4) == 0) return;
    for (int& placed : s.placement) {
      placed = placed == one ? other : placed == other ? one : placed;
    }
  }

  std::mt19937 random_;
};

// A walk over legal schedules: each is a few changes away from the one before, so that in the end
// little of the made schedule is left. `visit` tells whether what it is given is legal.
template <typename Visit>
void walk(ScheduleMutator& mutator, Schedule schedule, int steps, Visit&& visit) {
  for (int step = 0; step < steps; ++step) {
    Schedule changed = schedule;
    const int changes = mutator.below(3) ? 1 : 2 + mutator.below(2);
    for (int i = 0; i < changes; ++i) mutator.change(changed);
    if (changed != schedule && visit(changed)) schedule = std::move(changed);
  }
}

}  // namespace pd2::testing
