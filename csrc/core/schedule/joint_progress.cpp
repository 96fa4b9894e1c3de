#include "core/schedule/joint_progress.h"

#include "core/schedule/unroll.h"

#include <algorithm>
#include <set>

namespace pd2 {
namespace {

std::vector<std::vector<int>> joined_stages(int num_stages, const std::vector<JointUpdate>& joint) {
  std::vector<std::set<int>> sets(num_stages);
  for (const JointUpdate& stages : joint) {
    std::set<int> all(stages.begin(), stages.end());
    for (const int stage : stages) all.insert(sets[stage].begin(), sets[stage].end());
    for (const int stage : all) sets[stage] = all;
  }
  std::vector<std::vector<int>> joined;
  for (const std::set<int>& set : sets) joined.emplace_back(set.begin(), set.end());
  return joined;
}

}  // namespace

JointProgress::JointProgress(const Schedule& schedule, const std::vector<JointUpdate>& joint)
    : schedule_(schedule),
      joined_(joined_stages(schedule.num_stages, joint)),
      begun_(schedule.num_stages, -1),
      told_(schedule.num_stages, -1) {}

// By the stage's actions of a steady list.
int JointProgress::last_needed(int stage) const {
  int last = -schedule_.delay[stage] - 2;
  for (const Action& action : schedule_.ranks[schedule_.placement[stage]].steady) {
    if (action.stage == stage) last = std::max(last, needed_by(action).value_or(last));
  }
  return last;
}

void JointProgress::begin_epilogue(const AwaitedUpdates& at_end) {
  for (int stage = 0; stage < schedule_.num_stages; ++stage) {
    const RankActions& rank = schedule_.ranks[schedule_.placement[stage]];
    for (const Action& action : rank.steady) {
      if (action.stage == stage && action.kind == ActionKind::kUpdate) {
        begun_[stage] = batch_in_list(action.microbatch, schedule_.num_microbatches);
      }
    }
    const auto& awaited = at_end[schedule_.placement[stage]];
    const AwaitedUpdate here = {.action = static_cast<int>(rank.steady.size()), .stage = stage};
    told_[stage] =
        std::ranges::find(awaited, here) != awaited.end() ? begun_[stage] : last_needed(stage);
  }
}

void JointProgress::begin_steady(const AwaitedUpdates& at_end) {
  begin_epilogue(at_end);  // of the batch before
  for (int& batch : begun_) --batch;
  for (int& batch : told_) --batch;
}

std::optional<int> JointProgress::needed_by(const Action& action) const {
  if (joined_[action.stage].empty()) return std::nullopt;
  const int batch = batch_in_list(action.microbatch, schedule_.num_microbatches);
  if (action.kind == ActionKind::kForward) {
    return batch - schedule_.delay_at(action.stage, action.microbatch) - 1;
  }
  if (action.kind == ActionKind::kUpdate) return batch - 1;
  return std::nullopt;
}

void JointProgress::begin_update(const Action& action) {
  begun_[action.stage] = batch_in_list(action.microbatch, schedule_.num_microbatches);
}

bool JointProgress::tell(int stage, int batch) {
  bool is_new = false;
  for (const int other : joined_[stage]) {
    if (schedule_.placement[other] != schedule_.placement[stage] || begun_[other] < batch ||
        told_[other] >= batch) {
      continue;
    }
    told_[other] = batch;
    is_new = true;
  }
  return is_new;
}

bool JointProgress::is_over(int stage, int batch) const {
  return std::ranges::all_of(joined_[stage], [&](int other) { return told_[other] >= batch; });
}

std::vector<int> JointProgress::untold(int stage, int batch) const {
  std::vector<int> stages;
  for (const int other : joined_[stage]) {
    if (told_[other] < batch && begun_[other] >= batch) stages.push_back(other);
  }
  return stages;
}

}  // namespace pd2
