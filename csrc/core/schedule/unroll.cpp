#include "core/schedule/unroll.h"

#include "core/check.h"
#include "core/floor.h"

#include <algorithm>

namespace pd2 {
namespace {

template <typename Counts>
int batches_behind(const Schedule& schedule, const Counts& counts) {
  int lowest = 0;
  for (const RankActions& rank : schedule.ranks) {
    for (const ListKind list : {ListKind::kSteady, ListKind::kEpilogue}) {
      for (const Action& action : actions(rank, list)) {
        if (counts(action)) lowest = std::min(lowest, action.microbatch);
      }
    }
  }
  return -floor_div(lowest, schedule.num_microbatches);
}

}  // namespace

const char* to_string(ListKind list) {
  constexpr const char* kNames[] = {"prologue", "steady", "epilogue"};
  return kNames[static_cast<int>(list)];
}

const std::vector<Action>& actions(const RankActions& rank, ListKind list) {
  if (list == ListKind::kPrologue) return rank.prologue;
  return list == ListKind::kSteady ? rank.steady : rank.epilogue;
}

int batch_of(std::int64_t microbatch, int num_microbatches) {
  PD2_ASSERT(microbatch >= 0 && num_microbatches > 0, microbatch, " of ", num_microbatches);
  return static_cast<int>(microbatch / num_microbatches);
}

int batch_in_list(int microbatch, int num_microbatches) {
  return floor_div(microbatch, num_microbatches);
}

std::string place(std::int64_t microbatch, int num_microbatches) {
  return detail::concat("microbatch ", microbatch % num_microbatches, " of batch ",
                        batch_of(microbatch, num_microbatches));
}

std::string describe(const Schedule& schedule, const Step& step) {
  const Cell& cell = step.cell;
  const Action& action = actions(schedule.ranks[cell.rank], cell.list).at(cell.index);
  const int m = schedule.num_microbatches;
  const std::string what = step.kind == ActionKind::kUpdate
                               ? detail::concat("batch ", batch_of(step.microbatch, m))
                               : place(step.microbatch, m);
  return detail::concat(to_string(action), " (", to_string(cell.list), ", ", what, ")");
}

int most_batches_behind(const Schedule& schedule) {
  return batches_behind(schedule, [](const Action&) { return true; });
}

int forward_batches_behind(const Schedule& schedule) {
  return batches_behind(schedule,
                        [](const Action& action) { return action.kind == ActionKind::kForward; });
}

std::vector<Step> unroll(const Schedule& schedule, int rank, int first_batch, int num_batches) {
  std::vector<Step> steps;
  const RankActions& lists = schedule.ranks.at(rank);
  const std::int64_t first_of_run = std::int64_t{first_batch} * schedule.num_microbatches;
  const auto append = [&](ListKind list, int batch) {
    const std::int64_t first_microbatch = std::int64_t{batch} * schedule.num_microbatches;
    int index = -1;
    for (const Action& action : actions(lists, list)) {
      ++index;
      const std::int64_t microbatch = first_microbatch + action.microbatch;
      if (microbatch < first_of_run) continue;
      steps.push_back({.stage = action.stage,
                       .kind = action.kind,
                       .microbatch = microbatch,
                       .cell = {.rank = rank, .list = list, .index = index}});
    }
  };
  for (int batch = first_batch; batch < first_batch + num_batches; ++batch) {
    append(batch == first_batch ? ListKind::kPrologue : ListKind::kSteady, batch);
  }
  append(ListKind::kEpilogue, first_batch + num_batches - 1);
  return steps;
}

std::vector<std::vector<Step>> unroll(const Schedule& schedule, int first_batch, int num_batches) {
  std::vector<std::vector<Step>> ranks;
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    ranks.push_back(unroll(schedule, rank, first_batch, num_batches));
  }
  return ranks;
}

std::vector<int> update_order(const Schedule& schedule, int rank) {
  std::vector<int> stages;
  for (const Step& step : unroll(schedule, rank, 0, most_batches_behind(schedule) + 1)) {
    const bool is_first_batch = step.microbatch < schedule.num_microbatches;
    if (step.kind == ActionKind::kUpdate && is_first_batch) stages.push_back(step.stage);
  }
  return stages;
}

}  // namespace pd2
