// Breaks legal schedules in every small way: validate() must refuse exactly those that do not train
// right any more.

#include "core/schedule/validate.h"
#include "made_schedules.h"
#include "raises.h"
#include "sanitized.h"
#include "schedule_execution.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace pd2 {
namespace {

using testing::execution_problem;
using testing::value_error;

std::vector<Action>& list_of(RankActions& rank, int which) {
  return which == 0 ? rank.prologue : which == 1 ? rank.steady : rank.epilogue;
}

class Verdicts {
 public:
  void compare(const Schedule& schedule) {
    const std::string problem = execution_problem(schedule);
    const std::string error = value_error([&] { validate(schedule); });
    ASSERT_EQ(problem.empty(), error.empty())
        << "execution: " << problem << "\nvalidate: " << error << "\n"
        << to_text(schedule);
    ++(problem.empty() ? num_legal : num_refused);
  }

  int num_legal = 0;
  int num_refused = 0;
};

// Two chunks of the model on each of two ranks, backward split in two.
Schedule two_stages_a_rank() {
  return from_text(
      "0F0,0F1,2F0,2F1,,,2I0,2W0,2I1,2W1,,0I0,0I1,0W0,0W1\n"
      ",1F0,1F1,3F0,3B0,3F1,3B1,,1B0,1B1\n");
}

std::vector<Schedule> small_schedules() {
  std::vector<Schedule> schedules = {two_stages_a_rank()};
  const int most = testing::kSanitized ? 2 : 3;
  for (const Schedule& each : testing::made_schedules(2, most)) schedules.push_back(each);
  for (const char* name : {"2bw", "2bw_split", "1f1b"}) {
    schedules.push_back(make_schedule(name, 3, 3));
  }
  schedules.push_back(make_schedule("pipedream", 3, 1));
  return schedules;
}

// All lists of a schedule, prologue and steady together where they are the same.
template <typename Change>
void for_each_list(const Schedule& schedule, Change&& change) {
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (int which = 0; which < 3; ++which) change(rank, which);
  }
}

TEST(ValidateMutation, DroppedActions) {
  for (const Schedule& legal : small_schedules()) {
    for_each_list(legal, [&](std::size_t rank, int which) {
      Schedule copy = legal;
      const std::size_t size = list_of(copy.ranks[rank], which).size();
      for (std::size_t i = 0; i < size; ++i) {
        Schedule broken = legal;
        std::vector<Action>& list = list_of(broken.ranks[rank], which);
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        ASSERT_NE(execution_problem(broken), "");
        ASSERT_NE(value_error([&] { validate(broken); }), "") << to_text(broken);
      }
    });
  }
}

TEST(ValidateMutation, DuplicatedActions) {
  for (const Schedule& legal : small_schedules()) {
    for_each_list(legal, [&](std::size_t rank, int which) {
      Schedule copy = legal;
      const std::vector<Action> original = list_of(copy.ranks[rank], which);
      for (const Action& action : original) {
        for (std::size_t at = 0; at <= original.size(); ++at) {
          Schedule broken = legal;
          std::vector<Action>& list = list_of(broken.ranks[rank], which);
          list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), action);
          ASSERT_NE(execution_problem(broken), "");
          ASSERT_NE(value_error([&] { validate(broken); }), "") << to_text(broken);
        }
      }
    });
  }
}

TEST(ValidateMutation, SwappedActions) {
  Verdicts verdicts;
  for (const Schedule& legal : small_schedules()) {
    for_each_list(legal, [&](std::size_t rank, int which) {
      Schedule copy = legal;
      const std::size_t size = list_of(copy.ranks[rank], which).size();
      for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t j = i + 1; j < size; ++j) {
          Schedule changed = legal;
          std::vector<Action>& list = list_of(changed.ranks[rank], which);
          std::swap(list[i], list[j]);
          verdicts.compare(changed);
        }
      }
    });
  }
  EXPECT_GT(verdicts.num_legal, 10);
  EXPECT_GT(verdicts.num_refused, 100);
}

TEST(ValidateMutation, MovedActions) {
  Verdicts verdicts;
  for (const Schedule& legal : small_schedules()) {
    for_each_list(legal, [&](std::size_t rank, int which) {
      Schedule copy = legal;
      const std::size_t size = list_of(copy.ranks[rank], which).size();
      for (std::size_t from = 0; from < size; ++from) {
        for_each_list(legal, [&](std::size_t to_rank, int to_which) {
          Schedule changed = legal;
          std::vector<Action>& source = list_of(changed.ranks[rank], which);
          const Action action = source[from];
          source.erase(source.begin() + static_cast<std::ptrdiff_t>(from));
          const std::size_t places = list_of(changed.ranks[to_rank], to_which).size() + 1;
          for (std::size_t to = 0; to < places; ++to) {
            Schedule moved = changed;
            std::vector<Action>& target = list_of(moved.ranks[to_rank], to_which);
            target.insert(target.begin() + static_cast<std::ptrdiff_t>(to), action);
            verdicts.compare(moved);
          }
        });
      }
    });
  }
  EXPECT_GT(verdicts.num_legal, 100);
  EXPECT_GT(verdicts.num_refused, 1000);
}

TEST(ValidateMutation, ChangedActions) {
  Verdicts verdicts;
  for (const Schedule& legal : small_schedules()) {
    for_each_list(legal, [&](std::size_t rank, int which) {
      Schedule copy = legal;
      const std::size_t size = list_of(copy.ranks[rank], which).size();
      const int m = legal.num_microbatches;
      for (std::size_t i = 0; i < size; ++i) {
        for (int microbatch = -m - 1; microbatch <= m; ++microbatch) {
          Schedule changed = legal;
          list_of(changed.ranks[rank], which)[i].microbatch = microbatch;
          verdicts.compare(changed);
        }
        for (int stage = -1; stage <= legal.num_stages; ++stage) {
          Schedule changed = legal;
          list_of(changed.ranks[rank], which)[i].stage = stage;
          verdicts.compare(changed);
        }
        for (const char kind : {'F', 'B', 'I', 'W', 'U'}) {
          Schedule changed = legal;
          list_of(changed.ranks[rank], which)[i].kind = static_cast<ActionKind>(kind);
          verdicts.compare(changed);
        }
      }
    });
  }
  EXPECT_GT(verdicts.num_legal, 100);
  EXPECT_GT(verdicts.num_refused, 1000);
}

TEST(ValidateMutation, OtherDelaysVersionsAndPlacements) {
  Verdicts verdicts;
  for (const Schedule& legal : small_schedules()) {
    for (int delay = -1; delay <= 3; ++delay) {
      for (int versions = 0; versions <= 4; ++versions) {
        for (int stage = 0; stage < legal.num_stages; ++stage) {
          Schedule changed = legal;
          changed.delay[stage] = delay;
          changed.num_versions[stage] = versions;
          verdicts.compare(changed);
        }
        Schedule changed = legal;
        changed.delay.assign(legal.num_stages, delay);
        changed.num_versions.assign(legal.num_stages, versions);
        verdicts.compare(changed);
      }
    }
    for (int stage = 0; stage < legal.num_stages; ++stage) {
      for (int rank = -1; rank <= legal.num_stages; ++rank) {
        Schedule changed = legal;
        changed.placement[stage] = rank;
        verdicts.compare(changed);
      }
    }
    for (int m = 0; m <= legal.num_microbatches + 1; ++m) {
      Schedule changed = legal;
      changed.num_microbatches = m;
      verdicts.compare(changed);
    }
  }
  EXPECT_GT(verdicts.num_legal, 10);
  EXPECT_GT(verdicts.num_refused, 100);
}

TEST(ValidateMutation, AllOrdersOfTwoStagesAndOneMicrobatchOrTwo) {
  Verdicts verdicts;
  for (const int m : {1, 2}) {
    std::vector<Action> batch;
    for (int j = 0; j < m; ++j) batch.push_back({0, ActionKind::kForward, j});
    for (int j = 0; j < m; ++j) batch.push_back({0, ActionKind::kBackward, j});
    batch.push_back({0, ActionKind::kUpdate, m - 1});
    std::sort(batch.begin(), batch.end());
    std::vector<Action> first = batch;
    do {
      std::vector<Action> second = batch;
      do {
        Schedule schedule = make_schedule("gpipe", 2, m);
        schedule.ranks[0].prologue = schedule.ranks[0].steady = first;
        schedule.ranks[1].prologue = schedule.ranks[1].steady = second;
        for (Action& each : schedule.ranks[1].prologue) each.stage = 1;
        for (Action& each : schedule.ranks[1].steady) each.stage = 1;
        verdicts.compare(schedule);
      } while (std::next_permutation(second.begin(), second.end()));
    } while (std::next_permutation(first.begin(), first.end()));
  }
  // m = 1: F B U on both. m = 2: F0 F1 B0 B1 or F0 B0 F1 B1, where stage 0 doing the latter and
  // stage 1 the former wait for each other.
  EXPECT_EQ(verdicts.num_legal, 1 + 3);
}

TEST(ValidateMutation, SeveralRandomChanges) {
  Verdicts verdicts;
  std::mt19937 random(6);
  const auto below = [&](std::size_t n) { return random() % n; };
  const std::vector<Schedule> schedules = small_schedules();
  for (int round = 0; round < 6000; ++round) {
    Schedule changed = schedules[below(schedules.size())];
    for (std::size_t i = 2 + below(4); i > 0; --i) {
      std::vector<Action>& list =
          list_of(changed.ranks[below(changed.ranks.size())], static_cast<int>(below(3)));
      if (list.size() < 2) continue;
      // Neighbours most of the time: what stays legal is a few small steps away.
      const std::size_t at = below(list.size() - 1);
      std::swap(list[at], list[below(4) > 0 ? at + 1 : below(list.size())]);
    }
    verdicts.compare(changed);
  }
  EXPECT_GT(verdicts.num_legal, 100);
  EXPECT_GT(verdicts.num_refused, 1000);
}

}  // namespace
}  // namespace pd2
