// The walk over a schedule: every rank runs its list strictly in order, as far as what it waits for
// allows.
//
// Whatever is found on a walk depends on what has been done, and on no order of time. So ranks may
// advance in any order, and a rank that has to wait is left until another one lets it go on.

#pragma once

#include "core/schedule/unroll.h"

#include <cstddef>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pd2 {

// Calls run(step) for the steps of each rank's list, in its order. A step is run as soon as
// waits_for(step) names no stage that has to do something before; it is asked again when that
// stage's rank has run something. It may note that its own rank has come to the step, if that
// matters to nobody but the stage that it names.
//
// Gives how many steps each rank has run: all of its list's unless ranks wait for each other.
// Takes time linear in the number of steps if few ranks at a time wait for one.
template <typename Each, typename WaitsFor, typename Run>
std::vector<std::size_t> walk(const Schedule& schedule, const std::vector<std::vector<Each>>& lists,
                              WaitsFor&& waits_for, Run&& run) {
  std::vector<std::size_t> done(lists.size(), 0);
  std::vector<std::vector<int>> waiting(lists.size());  // by the rank that they wait for
  std::vector<int> ready(lists.size());
  std::iota(ready.begin(), ready.end(), 0);
  while (!ready.empty()) {
    const int rank = ready.back();
    ready.pop_back();
    const std::vector<Each>& list = lists[rank];
    std::size_t next = done[rank];
    std::optional<int> awaited;
    while (next < list.size() && !(awaited = waits_for(list[next]))) run(list[next++]);
    if (awaited) waiting[schedule.placement[*awaited]].push_back(rank);
    if (next == std::exchange(done[rank], next)) continue;
    ready.insert(ready.end(), waiting[rank].begin(), waiting[rank].end());
    waiting[rank].clear();
  }
  return done;
}

// Throws Deadlock if walk() did not run all steps. The text: "`why`: expected every rank to finish,
// found 2 of 3 `how`:", and the step that each of these waits in, with what `for_what` says of it.
void check_finished(const Schedule& schedule, const std::vector<std::vector<Step>>& lists,
                    const std::vector<std::size_t>& done, std::string_view why,
                    std::string_view how, const std::function<std::string(const Step&)>& for_what);

}  // namespace pd2
