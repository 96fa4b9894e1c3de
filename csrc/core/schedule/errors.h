// An illegal schedule, as data: which rule is broken, and where.

#pragma once

#include "core/check.h"
#include "core/schedule/unroll.h"

#include <optional>
#include <string>
#include <vector>

namespace pd2 {

// The rules of core/schedule/validate.h, in their order.
enum class ScheduleRule {
  kSizes,
  kPlacement,
  kNumbering,
  kExactlyOnce,
  kAfterForward,
  kMicrobatchOrder,
  kUpdateOrder,
  kWeightVersions,
  kDeadlock,
};

const char* to_string(ScheduleRule rule);

// The text states the rule, what was expected and what was found, and shows the grid. Python sees
// it as pipedream2bw.errors.ScheduleError.
class ScheduleError : public ValueError {
 public:
  // The first action that breaks the rule; without a position something is missing in that list.
  struct Place {
    int rank = 0;
    ListKind list = ListKind::kPrologue;
    std::optional<int> position;
  };

  ScheduleError(const std::string& text, ScheduleRule rule, std::optional<Place> place)
      : ValueError(text), rule_(rule), place_(place) {}

  ScheduleRule rule() const { return rule_; }
  const std::optional<Place>& place() const { return place_; }

 private:
  ScheduleRule rule_;
  std::optional<Place> place_;
};

// Ranks wait for each other. Python sees it as pipedream2bw.errors.Deadlock.
class Deadlock : public ScheduleError {
 public:
  Deadlock(const std::string& text, std::optional<Place> place)
      : ScheduleError(text, ScheduleRule::kDeadlock, place) {}
};

// A cell to be marked in the grid of an error's text.
struct Mark {
  Cell cell;
  // Shown after the row's last action instead of an action: what is missing there ("2B3?").
  // The cell's index is not used then.
  std::string missing = {};
};

// Throws ScheduleError, for kDeadlock Deadlock, with "schedule NAME: text" and, if there are marks,
// the grid with their cells marked; the first mark is the error's place.
[[noreturn]] void throw_schedule_error(const Schedule& schedule, ScheduleRule rule,
                                       const std::vector<Mark>& marks, const std::string& text);

}  // namespace pd2
