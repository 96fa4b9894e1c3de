#include "core/schedule/errors.h"

namespace pd2 {

const char* to_string(ScheduleRule rule) {
  constexpr const char* kNames[] = {
      "sizes",        "placement",       "numbering",
      "exactly once", "after forward",   "microbatch order",
      "update order", "weight versions", "deadlock",
  };
  return kNames[static_cast<int>(rule)];
}

void throw_schedule_error(const Schedule& schedule, ScheduleRule rule,
                          const std::vector<Mark>& marks, const std::string& text) {
  std::string whole = detail::concat("schedule ", schedule.name, ": ", text);
  std::optional<ScheduleError::Place> place;
  if (!marks.empty()) {
    whole += detail::concat("\n", grid(schedule, marks));
    const auto& [cell, missing] = marks.front();
    place = {cell.rank, cell.list, missing.empty() ? std::optional(cell.index) : std::nullopt};
  }
  if (rule == ScheduleRule::kDeadlock) throw Deadlock(whole, place);
  throw ScheduleError(whole, rule, place);
}

}  // namespace pd2
