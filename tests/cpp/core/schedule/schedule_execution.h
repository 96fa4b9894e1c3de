// A reference for validate(): runs a schedule on toy stages and looks at what comes out. It knows
// no rules, only weights in slots, messages in queues, activations and a gradient.

#pragma once

#include "core/schedule/schedule.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace pd2::testing {

// Returns why the schedule is wrong, "" if every run of it trains as it should.
class ScheduleExecution {
 public:
  explicit ScheduleExecution(const Schedule& schedule) : schedule_(schedule) {}

  std::string run(const std::vector<int>& batches_per_run) {
    if (!is_well_formed()) return "sizes";
    stages_.resize(schedule_.num_stages);
    for (int i = 0; i < schedule_.num_stages; ++i) {
      stages_[i].slots.assign(schedule_.num_versions[i], -1);
      stages_[i].slots[0] = 0;
    }
    for (const int num_batches : batches_per_run) {
      if (!run_and_drain(num_batches)) return problem_;
    }
    return "";
  }

 private:
  struct Stage {
    std::vector<int> slots;              // version v is in slot v mod the number of slots
    std::deque<long> inputs, gradients;  // messages, in the order they were sent
    std::map<long, bool> activations;    // by microbatch; true: its input gradient is done
    std::vector<long> gradient_sum;      // microbatches that were added up, in order
    std::vector<long> statistics;        // forwards in order, as BatchNorm sees them
    long num_input_gradients = 0;        // done
    int num_updates = 0;
    int num_at_update = 0;                // updates that the rank has come to
    std::map<int, int> gradient_version;  // by batch: the weights that its gradients are of
  };

  // Of two pipelines the second one's stages follow the first one's.
  bool begins_pipeline(int stage) const {
    return stage == 0 || (schedule_.num_pipelines == 2 && stage == schedule_.num_stages / 2);
  }
  bool ends_pipeline(int stage) const {
    return stage == schedule_.num_stages - 1 || begins_pipeline(stage + 1);
  }
  int other_copy(int stage) const {
    const int half = schedule_.num_stages / 2;
    return stage < half ? stage + half : stage - half;
  }

  bool is_well_formed() const {
    const auto d = static_cast<std::size_t>(schedule_.num_stages);
    if (schedule_.num_pipelines < 1 || schedule_.num_pipelines > 2) return false;
    if (schedule_.num_stages % schedule_.num_pipelines != 0) return false;
    if (schedule_.num_stages < 1 || schedule_.num_microbatches < 1) return false;
    if (schedule_.placement.size() != d || schedule_.num_versions.size() != d ||
        schedule_.delay.size() != d) {
      return false;
    }
    for (const int delay : schedule_.delay) {
      if (delay < 0) return false;
    }
    for (const int versions : schedule_.num_versions) {
      if (versions < 1) return false;
    }
    for (std::size_t stage = 0; stage < schedule_.late_forwards.size() && stage < d; ++stage) {
      // A stage keeps the versions of its delay also where no forward is late.
      if (schedule_.num_versions[stage] <= schedule_.delay[stage]) return false;
      const auto twin = schedule_.num_pipelines == 2 ? other_copy(static_cast<int>(stage)) : stage;
      if (twin < schedule_.late_forwards.size() &&
          schedule_.late_forwards[twin] != schedule_.late_forwards[stage]) {
        return false;
      }
    }
    for (const int late : schedule_.late_forwards) {
      if (late < 0 || late > schedule_.num_microbatches) return false;
    }
    return schedule_.late_forwards.empty() || schedule_.late_forwards.size() == d;
  }

  bool wrong(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  bool run_and_drain(int num_batches) {
    const long m = schedule_.num_microbatches;
    std::vector<std::deque<Action>> todo;
    std::vector<std::deque<long>> base;
    for (const RankActions& rank : schedule_.ranks) {
      todo.emplace_back();
      base.emplace_back();
      const auto add = [&](const std::vector<Action>& list, int batch) {
        for (const Action& action : list) {
          if (batch * m + action.microbatch < first_batch_ * m) continue;
          todo.back().push_back(action);
          base.back().push_back(batch * m);
        }
      };
      for (int t = 0; t < num_batches; ++t) add(t ? rank.steady : rank.prologue, first_batch_ + t);
      add(rank.epilogue, first_batch_ + num_batches - 1);
    }
    // One action at a time from whichever rank can go on.
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < todo.size(); ++rank) {
        if (todo[rank].empty()) continue;
        const Action action = todo[rank].front();
        if (action.stage < 0 || action.stage >= schedule_.num_stages) return wrong("no stage");
        if (schedule_.placement[action.stage] != static_cast<int>(rank)) return wrong("rank");
        const long microbatch = base[rank].front() + action.microbatch;
        if (action.kind == ActionKind::kUpdate) {
          Stage& stage = stages_[action.stage];
          moved |= stage.num_at_update == stage.num_updates;
          stage.num_at_update = stage.num_updates + 1;
        }
        if (!can_run(action)) continue;
        if (!execute(action, microbatch)) return false;
        todo[rank].pop_front();
        base[rank].pop_front();
        moved = true;
      }
    }
    for (const auto& list : todo) {
      if (!list.empty()) return wrong("deadlock");
    }
    first_batch_ += num_batches;
    for (const Stage& stage : stages_) {
      if (!stage.inputs.empty() || !stage.gradients.empty()) return wrong("message left");
      if (!stage.activations.empty()) return wrong("activation left");
      if (!stage.gradient_sum.empty()) return wrong("gradient left");
      if (stage.num_updates != first_batch_) return wrong("updates");
      if (static_cast<long>(stage.statistics.size()) != first_batch_ * m) return wrong("forwards");
      for (std::size_t i = 0; i < stage.statistics.size(); ++i) {
        if (stage.statistics[i] != static_cast<long>(i)) return wrong("statistics");
      }
    }
    return true;
  }

  // Are the messages there? The wrong message is taken, and found wrong.
  bool can_run(const Action& action) const {
    const Stage& stage = stages_[action.stage];
    const bool is_last = ends_pipeline(action.stage);
    if (action.kind == ActionKind::kForward) {
      return begins_pipeline(action.stage) || !stage.inputs.empty();
    }
    if (action.kind == ActionKind::kUpdate && schedule_.num_pipelines == 2) {
      return stages_[other_copy(action.stage)].num_at_update > stage.num_updates;
    }
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGrad) {
      return is_last || !stage.gradients.empty();
    }
    return true;
  }

  bool reads_its_version(int index, long microbatch) const {
    const Stage& stage = stages_[index];
    const int batch = static_cast<int>(microbatch / schedule_.num_microbatches);
    const auto place = microbatch % schedule_.num_microbatches;
    const bool is_late = schedule_.late_forwards.empty() || place < schedule_.late_forwards[index];
    const int delay = is_late ? schedule_.delay[index] : 0;
    const int version = batch > delay ? batch - delay : 0;
    return stage.slots[version % stage.slots.size()] == version;
  }

  bool execute(const Action& action, long microbatch) {
    Stage& stage = stages_[action.stage];
    const bool is_first = begins_pipeline(action.stage);
    const bool is_last = ends_pipeline(action.stage);
    const ActionKind kind = action.kind;
    if (kind == ActionKind::kForward) {
      if (!is_first) {
        if (stage.inputs.front() != microbatch) return wrong("another microbatch's input");
        stage.inputs.pop_front();
      }
      if (!reads_its_version(action.stage, microbatch)) return wrong("forward's version");
      stage.statistics.push_back(microbatch);
      if (!stage.activations.emplace(microbatch, false).second) return wrong("forward twice");
      if (!is_last) stages_[action.stage + 1].inputs.push_back(microbatch);
      return true;
    }
    if (kind == ActionKind::kUpdate) {
      const int t = static_cast<int>(microbatch / schedule_.num_microbatches);
      if (t != stage.num_updates) return wrong("update");
      std::vector<long> expected;
      for (int j = 0; j < schedule_.num_microbatches; ++j) {
        expected.push_back(long{t} * schedule_.num_microbatches + j);
      }
      if (stage.gradient_sum != expected) return wrong("gradient");
      if (schedule_.num_pipelines == 2) {
        Stage& other = stages_[other_copy(action.stage)];
        if (!other.gradient_version.contains(t)) return wrong("no gradient of the other copy");
        if (other.gradient_version[t] != stage.gradient_version[t]) {
          return wrong("sum of gradients of two versions");
        }
      }
      stage.gradient_sum.clear();
      ++stage.num_updates;
      stage.slots[stage.num_updates % stage.slots.size()] = stage.num_updates;
      return true;
    }
    const auto activation = stage.activations.find(microbatch);
    if (activation == stage.activations.end()) return wrong("no activation");
    if (!reads_its_version(action.stage, microbatch)) return wrong("backward's version");
    if (kind != ActionKind::kWeightGrad) {
      if (activation->second) return wrong("input gradient twice");
      activation->second = true;
      // Of a single stage nothing leaves: there the order is a convention.
      if (microbatch != stage.num_input_gradients++) return wrong("order of input gradients");
      if (!is_last) {
        if (stage.gradients.front() != microbatch) return wrong("another microbatch's gradient");
        stage.gradients.pop_front();
      }
      if (!is_first) stages_[action.stage - 1].gradients.push_back(microbatch);
    }
    if (kind != ActionKind::kInputGrad) {
      if (!activation->second) return wrong("weight gradient before input gradient");
      stage.gradient_sum.push_back(microbatch);
      const int t = static_cast<int>(microbatch / schedule_.num_microbatches);
      stage.gradient_version[t] = std::max(t - schedule_.delay[action.stage], 0);
      stage.activations.erase(activation);
    }
    return true;
  }

  const Schedule& schedule_;
  std::vector<Stage> stages_;
  int first_batch_ = 0;
  std::string problem_;
};

inline std::string execution_problem(const Schedule& schedule) {
  return ScheduleExecution(schedule).run({3, 1, 1, 2, 5, 2});
}

}  // namespace pd2::testing
