#include "core/schedule/walk.h"

#include "core/schedule/errors.h"

namespace pd2 {

void check_finished(const Schedule& schedule, const std::vector<std::vector<Step>>& lists,
                    const std::vector<std::size_t>& done, std::string_view why,
                    std::string_view how, const std::function<std::string(const Step&)>& for_what) {
  std::vector<Mark> marks;
  std::string stuck;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    if (done[rank] == lists[rank].size()) continue;
    const Step& step = lists[rank][done[rank]];
    marks.push_back({step.cell});
    stuck += detail::concat("\n  rank ", rank, " waits in ", describe(schedule, step), " for ",
                            for_what(step));
  }
  if (marks.empty()) return;
  throw_schedule_error(schedule, ScheduleRule::kDeadlock, marks,
                       detail::concat(why, ": expected every rank to finish, found ", marks.size(),
                                      " of ", lists.size(), " ", how, ":", stuck));
}

}  // namespace pd2
