#include "stream_program.h"

#include "core/check.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace pd2::testing {
namespace {

using enum ActionKind;
using enum StreamKind;
using enum FenceKind;
using enum Access::How;

}  // namespace

std::string_view name_of(StreamKind stream) {
  constexpr std::string_view kNames[kNumStreams] = {"caller", "inputs", "receives", "compute",
                                                    "sends",  "update", "losses",   "copies",
                                                    "down",   "host",   "up"};
  return kNames[static_cast<int>(stream)];
}

std::string_view name_of(FenceKind fence) {
  constexpr std::string_view kNames[kNumFences] = {
      "inputs given",    "inputs taken", "inputs staged",      "given",         "received",
      "message ready",   "losses ready", "gradients complete", "version ready", "gradients free",
      "updated",         "computed",     "version made",       "copied",        "gradients given",
      "stepped",         "fetched",      "gradients fetched",  "sent",          "slot free",
      "weights stepped", "weights sent"};
  return kNames[static_cast<int>(fence)];
}

std::string_view name_of(MemoryKind memory) {
  constexpr std::string_view kNames[] = {"the caller's inputs",
                                         "inputs",
                                         "weights",
                                         "gradients",
                                         "optimizer state",
                                         "received",
                                         "sent",
                                         "losses",
                                         "the host's gradients",
                                         "the host's weights"};
  return kNames[static_cast<int>(memory)];
}

std::vector<Work> StreamProgram::begin_batch(int batch) const {
  const FenceId given = {kGiven, 0, batch};
  Work caller = {kCaller, "gives a batch", {}, {}, {given}};
  Work compute = {kCompute, "begins a batch", {given}, {}, {}};
  if (!has_inputs()) return {caller, compute};
  const MemoryId theirs = {MemoryKind::kCallerInputs, 0, 0};
  const FenceId inputs_given = {kInputsGiven, 0, batch};
  const FenceId staged = {kInputsStaged, 0, batch};
  if (batch > 0) caller.waits.push_back({kInputsTaken, 0, batch - 1});
  caller.accesses.push_back({kWrite, theirs});
  caller.records.push_back(inputs_given);
  compute.waits.push_back(staged);
  const Work inputs = {kInputs,
                       "copies inputs",
                       {inputs_given},
                       {{kRead, theirs}, {kWrite, {MemoryKind::kInputs, 0, batch}}},
                       {staged, {kInputsTaken, 0, batch}}};
  return {caller, inputs, compute};
}

bool StreamProgram::has_inputs() const {
  for (int stage = 0; stage < schedule_.num_stages; ++stage) {
    const bool takes_inputs = schedule_.is_first(stage) || schedule_.is_last(stage);
    if (takes_inputs && schedule_.placement[stage] == rank_) return true;
  }
  return false;
}

std::vector<Work> StreamProgram::works_of(const Action& action, std::int64_t microbatch) const {
  if (action.kind == kForward) return forward(action.stage, microbatch);
  if (action.kind != kUpdate) return backward(action, microbatch);
  return update(action.stage, batch_of(microbatch, schedule_.num_microbatches));
}

Work StreamProgram::receive(int stage, std::int64_t number) {
  const MemoryId memory = {MemoryKind::kReceived, stage, number};
  return {kReceives, "receives", {}, {{kWrite, memory}}, {{kReceived, stage, number}}};
}

void StreamProgram::send(std::vector<Work>& works, int stage, std::int64_t number) {
  const MemoryId memory = {MemoryKind::kSent, stage, number};
  works.back().accesses.push_back({kWrite, memory});
  works.back().records.push_back({kMessageReady, stage, number});
  works.push_back({kSends, "sends", {{kMessageReady, stage, number}}, {{kLast, memory}}, {}});
}

std::vector<Work> StreamProgram::forward(int stage, std::int64_t microbatch) const {
  const int m = schedule_.num_microbatches;
  const int batch = batch_of(microbatch, m);
  const int version = std::max(batch - schedule_.delay_at(stage, microbatch), 0);
  Work work = {kCompute, "F", {}, {{kRead, weights(stage, version)}}, {}};
  const int before =
      microbatch == 0 ? 0 : batch_of(microbatch - 1, m) - schedule_.delay_at(stage, microbatch - 1);
  if (version > std::max(before, 0)) work.waits.push_back({kVersionReady, stage, version});
  std::vector<Work> works;
  if (!schedule_.is_first(stage)) {
    works.push_back(receive(stage, microbatch));
    work.waits.push_back({kReceived, stage, microbatch});
    work.accesses.push_back({kRead, {MemoryKind::kReceived, stage, microbatch}});
  }
  if (schedule_.is_first(stage) || schedule_.is_last(stage)) {  // arguments, targets
    work.accesses.push_back({kRead, {MemoryKind::kInputs, 0, batch}});
  }
  works.push_back(std::move(work));
  if (!schedule_.is_last(stage)) {
    send(works, stage, microbatch);
    return works;
  }
  const MemoryId losses = {MemoryKind::kLosses, stage, batch};
  works.back().accesses.push_back({kWrite, losses});
  if (microbatch % m == m - 1) {
    const FenceId ready = {kLossesReady, stage, batch};
    works.back().records.push_back(ready);
    works.push_back({kLosses, "reads the losses", {ready}, {{kLast, losses}}, {}});
  }
  return works;
}

std::vector<Work> StreamProgram::backward(const Action& action, std::int64_t microbatch) const {
  const int stage = action.stage;
  const int m = schedule_.num_microbatches;
  const int batch = batch_of(microbatch, m);
  const bool gives_input_grad = action.kind != kWeightGrad;
  const bool gives_weight_grad = action.kind != kInputGrad;
  const std::int64_t number = -1 - microbatch;
  Work work = {kCompute, name_of(action.kind), {}, {}, {}};
  const int version = std::max(batch - schedule_.delay_at(stage, microbatch), 0);
  work.accesses.push_back({kRead, weights(stage, version)});
  const auto received = [&](std::int64_t of) {
    const MemoryId memory = {MemoryKind::kReceived, stage, of};
    work.accesses.push_back({gives_weight_grad ? kLast : kRead, memory});
  };
  std::vector<Work> works;
  if (!schedule_.is_first(stage)) received(microbatch);
  if (!schedule_.is_last(stage)) {
    if (gives_input_grad) {
      works.push_back(receive(stage, number));
      work.waits.push_back({kReceived, stage, number});
    }
    received(number);
  }
  if (gives_weight_grad) {
    const int after = version_before_gradients(stage, batch);
    if (microbatch % m == 0 && after > 0) work.waits.push_back({kGradientsFree, stage, after});
    if (microbatch % m == 0 && batch > 0 && gradients_ == GradientPlaces::kOneOfHost) {
      work.waits.push_back({kGradientsFetched, stage, batch - 1});
    }
    work.accesses.push_back({kWrite, gradients(stage, batch)});
  }
  works.push_back(std::move(work));
  if (gives_input_grad && !schedule_.is_first(stage)) send(works, stage, number);
  return works;
}

std::vector<Work> StreamProgram::update(int stage, int batch) const {
  Work begin = {kCompute, "begins U", {}, {}, {{kGradientsComplete, stage, batch}}};
  if (saves_ && batch > first_batch_) begin.waits.push_back({kCopied, stage, batch});
  if (steps_on_host()) begin.records.push_back({kGradientsGiven, stage, batch});
  std::vector<Work> works = {begin};
  const std::vector<Work> made = steps_on_host() ? step_on_host(stage, batch) : step(stage, batch);
  works.insert(works.end(), made.begin(), made.end());
  for (const FenceKind kind : {kVersionReady, kGradientsFree}) {
    works.back().records.push_back({kind, stage, batch + 1});
  }
  if (!saves_) return works;
  works.back().records.push_back({kVersionMade, stage, batch + 1});
  works.push_back(save(stage, batch + 1));
  return works;
}

std::vector<Work> StreamProgram::step(int stage, int batch) const {
  Work work = {kUpdates, "U", {{kGradientsComplete, stage, batch}}, {}, {}};
  work.accesses = {{kRead, gradients(stage, batch)},
                   {kRead, weights(stage, batch)},
                   {kWrite, {MemoryKind::kState, stage, 0}},
                   {kWrite, weights(stage, batch + 1)}};
  return {work};
}

std::vector<Work> StreamProgram::step_on_host(int stage, int batch) const {
  const MemoryId fetched = {MemoryKind::kHostGradients, stage, 0};
  const MemoryId newest = {MemoryKind::kHostWeights, stage, 0};
  Work down = {kDown,
               "fetches gradients",
               {{kGradientsGiven, stage, batch}},
               {{kRead, gradients(stage, batch)}, {kWrite, fetched}},
               {{kFetched, stage, batch}, {kGradientsFetched, stage, batch}}};
  const Work begin = {
      kUpdates, "U", {{kGradientsComplete, stage, batch}}, {}, {{kSlotFree, stage, batch}}};
  Work step = {kHost,
               "steps",
               {{kFetched, stage, batch}},
               {{kRead, fetched}, {kWrite, {MemoryKind::kState, stage, 0}}, {kWrite, newest}},
               {{kStepped, stage, batch}, {kWeightsStepped, stage, batch}}};
  if (batch > 0) {
    down.waits.push_back({kStepped, stage, batch - 1});
    step.waits.push_back({kSent, stage, batch - 1});
  }
  const Work up = {kUp,
                   "sends weights",
                   {{kSlotFree, stage, batch}, {kWeightsStepped, stage, batch}},
                   {{kRead, newest}, {kWrite, weights(stage, batch + 1)}},
                   {{kSent, stage, batch}, {kWeightsSent, stage, batch}}};
  const Work end = {kUpdates, "ends U", {{kWeightsSent, stage, batch}}, {}, {}};
  return {down, begin, step, up, end};
}

Work StreamProgram::save(int stage, int version) const {
  Work work = {kCopies,
               "copies a version",
               {{kVersionMade, stage, version}},
               {{kRead, {MemoryKind::kState, stage, 0}}},
               {{kCopied, stage, version}}};
  for (int older = std::max(version - schedule_.delay[stage], 0); older <= version; ++older) {
    work.accesses.push_back({kRead, weights(stage, older)});
  }
  if (steps_on_host()) work.accesses.push_back({kRead, {MemoryKind::kHostWeights, stage, 0}});
  return work;
}

std::vector<Work> StreamProgram::drain() const {
  const FenceId updated = {kUpdated, 0, next_batch_};
  const FenceId computed = {kComputed, 0, next_batch_};
  Work compute = {kCompute, "ends a run", {}, {}, {computed}};
  Work caller = {kCaller, "takes the weights", {updated, computed}, {}, {}};
  for (int stage = 0; stage < schedule_.num_stages; ++stage) {
    if (schedule_.placement[stage] != rank_) continue;
    if (saves_) compute.waits.push_back({kCopied, stage, next_batch_});
    for (int slot = 0; slot < num_slots(stage); ++slot) {  // it may load others
      caller.accesses.push_back({kWrite, weights(stage, slot)});
    }
    caller.accesses.push_back({kWrite, {MemoryKind::kState, stage, 0}});
    if (steps_on_host()) {
      caller.accesses.push_back({kWrite, {MemoryKind::kHostWeights, stage, 0}});
    }
  }
  return {{kUpdates, "ends a run", {}, {}, {updated}}, compute, caller};
}

MemoryId StreamProgram::gradients(int stage, int batch) const {
  if (rotates()) return weights(stage, batch + 1);
  return {MemoryKind::kGradients, stage, gradients_ == GradientPlaces::kTwo ? batch % 2 : 0};
}

int StreamProgram::version_before_gradients(int stage, int batch) const {
  if (rotates()) return batch + 2 - num_slots(stage);
  const bool has_room = gradients_ == GradientPlaces::kTwo || steps_on_host();
  return has_room ? batch - 1 : batch;
}

namespace {

// What a stream, or a fence, knows to be done: of each stream so many pieces of work.
using Clock = std::array<std::int64_t, kNumStreams>;

class OrderCheck {
 public:
  explicit OrderCheck(std::optional<FenceKind> without) : without_(without) {}

  void add(const Work& work) {
    if (!problem_.empty()) return;
    const auto stream = static_cast<int>(work.stream);
    Clock& clock = streams_[stream];
    for (const FenceId& fence : work.waits) wait(fence, clock);
    const std::int64_t now = ++clock[stream];
    for (const Access& access : work.accesses) use(work, access, now);
    for (const FenceId& fence : work.records) {
      if (fence.kind != without_) fences_.emplace(fence, clock);
    }
  }

  const std::string& problem() const { return problem_; }

 private:
  struct Done {
    int stream = 0;
    std::int64_t number = 0;
    std::string_view what;
  };
  struct Memory {
    std::optional<Done> write;
    std::vector<Done> reads;  // since the write, one a stream
  };

  void wait(const FenceId& fence, Clock& clock) {
    if (fence.kind == without_) return;
    const auto recorded = fences_.find(fence);
    PD2_ASSERT(recorded != fences_.end(), name_of(fence.kind), " of stage ", fence.stage, ", ",
               fence.number, ": is waited for before it is recorded");
    for (int i = 0; i < kNumStreams; ++i) clock[i] = std::max(clock[i], recorded->second[i]);
    fences_.erase(recorded);
  }

  void use(const Work& work, const Access& access, std::int64_t now) {
    Memory& memory = memory_[access.memory];
    const auto stream = static_cast<int>(work.stream);
    if (memory.write) check(work, access, *memory.write);
    if (access.how == kWrite) {
      for (const Done& read : memory.reads) check(work, access, read);
      memory = {Done{stream, now, work.what}, {}};
      return;
    }
    if (access.how == kLast) {
      memory_.erase(access.memory);
      return;
    }
    const auto same = std::ranges::find(memory.reads, stream, &Done::stream);
    if (same == memory.reads.end()) {
      memory.reads.push_back({stream, now, work.what});
    } else {
      *same = {stream, now, work.what};
    }
  }

  void check(const Work& work, const Access& access, const Done& before) {
    if (streams_[static_cast<int>(work.stream)][before.stream] >= before.number) return;
    problem_ = detail::concat(
        "\"", work.what, "\" on stream ", name_of(work.stream), " is not after \"", before.what,
        "\" on stream ", name_of(static_cast<StreamKind>(before.stream)), ", which used ",
        name_of(access.memory.kind), " ", access.memory.number, " of stage ", access.memory.stage);
  }

  const std::optional<FenceKind> without_;
  std::array<Clock, kNumStreams> streams_ = {};
  std::map<FenceId, Clock> fences_;  // recorded, not waited for
  std::map<MemoryId, Memory> memory_;
  std::string problem_;
};

}  // namespace

std::string stream_problem(const Schedule& schedule, GradientPlaces gradients,
                           std::optional<FenceKind> without, bool saves) {
  const int behind = most_batches_behind(schedule);
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    StreamProgram program(schedule, rank, gradients, saves);
    OrderCheck check(without);
    for (const int num_batches : {behind + 3, 1, 2}) {
      program.run(num_batches, [&](const Work& work) { check.add(work); });
    }
    if (!check.problem().empty()) return detail::concat("rank ", rank, ": ", check.problem());
  }
  return "";
}

}  // namespace pd2::testing
