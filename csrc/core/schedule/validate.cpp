#include "core/schedule/validate.h"

#include "core/schedule/errors.h"
#include "core/schedule/messages.h"
#include "core/schedule/walk.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;
using enum ScheduleRule;

// Batches first .. first + count - 1 and a drain.
struct BatchRange {
  int first_batch;
  int num_batches;
};

// A long run first: its errors are the easiest to read. The short ones meet what only a drain
// before the pipeline is full, or just then, can break.
std::vector<BatchRange> batch_ranges(const Schedule& schedule) {
  const int behind = std::max(most_batches_behind(schedule), 1);
  std::vector<BatchRange> ranges = {{0, behind + 3}};
  for (int num_batches = 1; num_batches <= behind + 1; ++num_batches) {
    ranges.push_back({ranges.back().first_batch + ranges.back().num_batches, num_batches});
  }
  return ranges;
}

template <typename... Parts>
[[noreturn]] void fail(const Schedule& schedule, ScheduleRule rule, const std::vector<Mark>& marks,
                       const Parts&... message) {
  throw_schedule_error(schedule, rule, marks, detail::concat(message...));
}

// For rules that no single cell breaks.
template <typename... Parts>
void check(bool holds, const Schedule& schedule, ScheduleRule rule, const Parts&... message) {
  if (!holds) fail(schedule, rule, {}, message...);
}

void check_sizes(const Schedule& schedule) {
  const int d = schedule.num_stages;
  const auto num_ranks = static_cast<int>(schedule.ranks.size());
  const auto check_size = [&](const char* what, std::size_t size, std::size_t expected) {
    check(size == expected, schedule, kSizes, what, " needs one entry per ", "stage: expected ",
          expected, ", found ", size);
  };
  const auto check_least = [&](const char* what, int value, int least) {
    check(value >= least, schedule, kSizes, what, ": expected >= ", least, ", found ", value);
  };
  check(schedule.num_pipelines == 1 || schedule.num_pipelines == 2, schedule, kSizes,
        "num_pipelines: expected 1 or 2, found ", schedule.num_pipelines);
  check_least("num_stages", d, 1);
  check(d % schedule.num_pipelines == 0, schedule, kSizes,
        "every pipeline has all stages: expected num_stages to be a multiple of ",
        schedule.num_pipelines, ", found ", d);
  check_least("num_microbatches", schedule.num_microbatches, 1);
  check_size("placement", schedule.placement.size(), d);
  check_size("delay", schedule.delay.size(), d);
  for (const int delay : schedule.delay) check_least("delay", delay, 0);
  if (!schedule.late_forwards.empty()) {
    check_size("late_forwards", schedule.late_forwards.size(), d);
    for (int stage = 0; stage < d; ++stage) {
      const int late = schedule.late_forwards[stage];
      const int most = schedule.num_microbatches;
      check(late >= 0 && late <= most, schedule, kSizes, "late_forwards of stage ", stage,
            ": expected 0 to ", most, " (num_microbatches), found ", late);
    }
  }
  check_size("num_versions", schedule.num_versions.size(), d);
  for (const int versions : schedule.num_versions) check_least("num_versions", versions, 1);

  for (int stage = 0; stage < d; ++stage) {
    const int rank = schedule.placement[stage];
    check(rank >= 0 && rank < num_ranks, schedule, kSizes, "placement of stage ", stage,
          ": expected a rank from 0 to ", num_ranks - 1, ", found ", rank);
  }
  for (int stage = 0; stage < d; ++stage) {
    const int twin = schedule.twin(stage).value_or(stage);
    if (twin <= stage) continue;
    check(schedule.placement[stage] != schedule.placement[twin], schedule, kSizes,
          "the two copies of a stage are on two ranks: expected stages ", stage, " and ", twin,
          " on different ranks, found both on rank ", schedule.placement[stage]);
    check(schedule.late_forwards.empty() ||
              schedule.late_forwards[stage] == schedule.late_forwards[twin],
          schedule, kSizes, "the two copies of a stage have equal late_forwards: stages ", stage,
          " and ", twin);
    check(schedule.delay[stage] == schedule.delay[twin], schedule, kSizes,
          "the two copies of a stage have one delay: expected ", schedule.delay[stage],
          " of stage ", twin, " as of stage ", stage, ", found ", schedule.delay[twin]);
  }
  const std::set<int> used(schedule.placement.begin(), schedule.placement.end());
  check(static_cast<int>(used.size()) == num_ranks, schedule, kSizes,
        "every rank needs a stage: expected ", num_ranks, " ranks in placement, found ",
        used.size());

  std::size_t num_actions = 0;
  for (const RankActions& rank : schedule.ranks) {
    num_actions += rank.prologue.size() + rank.epilogue.size();
  }
  // Before anything of size num_microbatches is made.
  check(num_actions >= static_cast<std::size_t>(schedule.num_microbatches), schedule, kSizes,
        "num_microbatches: ", schedule.num_microbatches,
        ", actions in prologue and epilogue: ", num_actions,
        ": every microbatch needs its actions");
}

void check_cells(const Schedule& schedule) {
  const int m = schedule.num_microbatches;
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    for (const ListKind list : {ListKind::kPrologue, ListKind::kSteady, ListKind::kEpilogue}) {
      int index = 0;
      for (const Action& action : actions(schedule.ranks[rank], list)) {
        const std::vector<Mark> marks = {{{rank, list, index++}}};
        if (action.stage < 0 || action.stage >= schedule.num_stages) {
          fail(schedule, kPlacement, marks,
               "every action's stage exists: expected a stage from 0 to ", schedule.num_stages - 1,
               ", found ", to_string(action));
        }
        if (schedule.placement[action.stage] != rank) {
          fail(schedule, kPlacement, marks, "a stage's actions are on its rank: expected ",
               to_string(action), " on rank ", schedule.placement[action.stage], ", found on rank ",
               rank);
        }
        const int lowest = list == ListKind::kPrologue ? 0 : -m * schedule.num_stages;
        if (action.microbatch < lowest || action.microbatch >= m) {
          fail(schedule, kNumbering, marks, "microbatch numbers in the ", to_string(list),
               ": expected ", lowest, " to ", m - 1, ", found ", to_string(action));
        }
      }
    }
  }
}

// Does not depend on the lists: a batch's forwards come before its own update (rule 7), so the
// newest version is the batch's number at most, and is that after a drain.
void check_versions(const Schedule& schedule) {
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const std::int64_t delay = schedule.delay[stage];
    const int kept = schedule.num_versions[stage];
    check(kept > delay, schedule, kWeightVersions,
          "versions alive never above num_versions: expected at most ", kept, " on stage ", stage,
          ", found ", delay + 1, ": after a drain batch t reads version t - ", delay,
          " when version t is made");
  }
}

// Checks one run over a range of batches, which begins and ends with an empty pipeline.
class RangeCheck {
 public:
  RangeCheck(const Schedule& schedule, BatchRange range)
      : schedule_(schedule),
        range_(range),
        m_(schedule.num_microbatches),
        first_microbatch_(std::int64_t{range.first_batch} * m_),
        end_microbatch_(first_microbatch_ + std::int64_t{range.num_batches} * m_),
        by_rank_(unroll(schedule, range.first_batch, range.num_batches)),
        by_stage_(schedule.num_stages) {
    for (const std::vector<Step>& steps : by_rank_) {
      for (const Step& step : steps) by_stage_[step.stage].push_back(step);
    }
  }

  void check() const {
    for (int stage = 0; stage < schedule_.num_stages; ++stage) check_exactly_once(stage);
    for (int stage = 0; stage < schedule_.num_stages; ++stage) check_order(stage);
    check_deadlock();
  }

 private:
  int batch(std::int64_t microbatch) const { return batch_of(microbatch, m_); }
  int version_read(int stage, std::int64_t microbatch) const {
    return std::max(batch(microbatch) - schedule_.delay_at(stage, microbatch), 0);
  }

  std::string place(std::int64_t microbatch) const { return pd2::place(microbatch, m_); }
  std::string describe(const Step& step) const { return pd2::describe(schedule_, step); }

  [[noreturn]] void fail_missing(int stage, ActionKind kind, std::int64_t microbatch) const {
    const bool is_first = batch(microbatch) == range_.first_batch;
    const Action missing = {
        .stage = stage, .kind = kind, .microbatch = static_cast<int>(microbatch % m_)};
    const Mark mark = {.cell = {.rank = schedule_.placement[stage],
                                .list = is_first ? ListKind::kPrologue : ListKind::kSteady},
                       .missing = detail::concat(to_string(missing), "?")};
    fail(schedule_, kExactlyOnce, {mark}, "every action exactly once: expected one ",
         to_string(missing), " for batch ", batch(microbatch), " in a run of ", range_.num_batches,
         " batches and a drain, found none");
  }

  void check_exactly_once(int stage) const {
    const std::int64_t count = end_microbatch_ - first_microbatch_;
    std::vector<const Step*> steps(kActionKinds.size() *
                                   count);  // an update's at its batch's first
    const auto seen = [&](ActionKind kind, std::int64_t n) -> const Step*& {
      const auto place = std::ranges::find(kActionKinds, kind) - kActionKinds.begin();
      return steps[place * count + n - first_microbatch_];
    };
    for (const Step& step : by_stage_[stage]) {
      const std::int64_t n =
          step.kind == kUpdate ? std::int64_t{batch(step.microbatch)} * m_ : step.microbatch;
      const Step* const other = std::exchange(seen(step.kind, n), &step);
      if (other == nullptr) continue;
      fail(schedule_, kExactlyOnce, {{step.cell}, {other->cell}},
           "every action exactly once: expected ", describe(*other), " only, found ",
           describe(step), " too");
    }
    for (std::int64_t n = first_microbatch_; n < end_microbatch_; ++n) {
      if (!seen(kForward, n)) fail_missing(stage, kForward, n);
      const Step* const whole = seen(kBackward, n);
      const Step* const input = seen(kInputGrad, n);
      const Step* const weight = seen(kWeightGrad, n);
      if (!whole && !input && !weight) fail_missing(stage, kBackward, n);
      if (!whole && !input) fail_missing(stage, kInputGrad, n);
      if (!whole && !weight) fail_missing(stage, kWeightGrad, n);
      for (const Step* const half : {input, weight}) {
        if (!whole || !half) continue;
        fail(schedule_, kExactlyOnce, {{half->cell}, {whole->cell}},
             "every action exactly once: expected either B, or I and W, found ", describe(*whole),
             " and ", describe(*half));
      }
    }
    for (std::int64_t n = first_microbatch_; n < end_microbatch_; n += m_) {
      if (!seen(kUpdate, n)) fail_missing(stage, kUpdate, n + m_ - 1);
    }
  }

  // Counts what a stage has done so far. All of a kind happen in microbatch order, so a count says
  // which.
  struct Progress {
    std::int64_t forwards = 0;
    std::int64_t input_grads = 0;
    std::int64_t weight_grads = 0;
    int newest_version = 0;
  };

  Progress at_start() const {
    // After a drain all earlier batches have been updated with.
    return {first_microbatch_, first_microbatch_, first_microbatch_, range_.first_batch};
  }

  void check_next(const Step& step, std::int64_t next, const char* rule) const {
    if (step.microbatch == next) return;
    fail(schedule_, kMicrobatchOrder, {{step.cell}}, rule, ": expected ", place(next), ", found ",
         describe(step));
  }

  void check_forward(const Step& step, const Progress& progress) const {
    check_next(step, progress.forwards, "a stage's forwards are in microbatch order");
    const int version = version_read(step.stage, step.microbatch);
    const int newest = progress.newest_version;
    if (newest >= version) return;
    fail(schedule_, kWeightVersions, {{step.cell}},
         "an update comes before the first forward that reads the ",
         "version it makes: expected the update of batch ", version - 1, " before ", describe(step),
         " reads version ", version, ", found version ", newest, " as the newest");
  }

  void check_gradient_buffer(const Step& step, const Progress& progress) const {
    const int t = batch(step.microbatch);
    if (t == progress.newest_version) return;
    fail(schedule_, kUpdateOrder, {{step.cell}},
         "an update comes before the first backward of the next batch, ",
         "there is one gradient buffer: expected the update of batch ", t - 1, " before ",
         describe(step), ", found ", progress.newest_version - range_.first_batch,
         " updates in this run");
  }

  void check_after_forward(const Step& step, const Progress& progress) const {
    if (step.microbatch < progress.forwards) return;
    fail(schedule_, kAfterForward, {{step.cell}}, "a backward comes after its forward: expected ",
         step.stage, "F of ", place(step.microbatch), " before ", describe(step), ", found ",
         progress.forwards - first_microbatch_, " forwards done");
  }

  void check_update(const Step& step, const Progress& progress) const {
    const int t = batch(step.microbatch);
    const std::int64_t needed = std::int64_t{t + 1} * m_ - first_microbatch_;
    const std::int64_t done = progress.weight_grads - first_microbatch_;
    if (done >= needed) return;
    fail(schedule_, kUpdateOrder, {{step.cell}},
         "an update comes after its batch's last backward: expected ", needed,
         " backwards of this run before ", describe(step), ", found ", done);
  }

  void check_order(int stage) const {
    Progress progress = at_start();
    for (const Step& step : by_stage_[stage]) {
      const bool gives_input_grad = step.kind == kBackward || step.kind == kInputGrad;
      const bool gives_weight_grad = step.kind == kBackward || step.kind == kWeightGrad;
      if (step.kind == kForward) {
        check_forward(step, progress);
        ++progress.forwards;
      }
      if (gives_input_grad) {
        check_after_forward(step, progress);
        check_next(step, progress.input_grads, "a stage's backwards are in microbatch order");
        ++progress.input_grads;
      }
      if (gives_weight_grad) {
        if (step.microbatch >= progress.input_grads) {
          fail(schedule_, kAfterForward, {{step.cell}}, "W comes after its I: expected ",
               step.stage, "I of ", place(step.microbatch), " before ", describe(step), ", found ",
               progress.input_grads - first_microbatch_, " input gradients done");
        }
        check_next(step, progress.weight_grads,
                   "the gradients of a batch add up in microbatch order");
        check_gradient_buffer(step, progress);
        ++progress.weight_grads;
      }
      if (step.kind == kUpdate) {
        check_update(step, progress);
        ++progress.newest_version;
      }
    }
  }

  void check_deadlock() const {
    Arrivals arrivals({schedule_,
                       chain_of(schedule_.depth()),
                       {first_microbatch_, end_microbatch_ - first_microbatch_}});
    std::vector<int> reached(schedule_.num_stages, range_.first_batch);  // batches, by their U
    const auto waits_for = [&](const Step& step) {
      if (step.kind != kUpdate) return arrivals.missing(step);
      const std::optional<int> twin = schedule_.twin(step.stage);
      if (!twin) return std::optional<int>();
      const int t = batch(step.microbatch);
      reached[step.stage] = std::max(reached[step.stage], t + 1);
      return reached[*twin] <= t ? twin : std::nullopt;
    };
    const auto done = walk(schedule_, by_rank_, waits_for,
                           [&](const Step& step) { arrivals.send(step, [](int) { return 0; }); });
    check_finished(
        schedule_, by_rank_, done, "deadlock", "waiting for each other",
        [&](const Step& step) { return detail::concat("stage ", waits_for(step).value()); });
  }

  const Schedule& schedule_;
  const BatchRange range_;
  const int m_;
  const std::int64_t first_microbatch_;
  const std::int64_t end_microbatch_;
  std::vector<std::vector<Step>> by_rank_;
  std::vector<std::vector<Step>> by_stage_;
};

}  // namespace

void check_form(const Schedule& schedule) {
  check_sizes(schedule);
  check_cells(schedule);
}

void validate(const Schedule& schedule) {
  check_form(schedule);
  check_versions(schedule);
  for (const BatchRange& range : batch_ranges(schedule)) RangeCheck(schedule, range).check();
}

}  // namespace pd2
