#include "planner/simulate/simulate.h"

#include "core/check.h"
#include "core/schedule/errors.h"
#include "core/schedule/unroll.h"
#include "core/schedule/validate.h"
#include "planner/simulate/actions.h"
#include "planner/simulate/channels.h"
#include "planner/simulate/host_updates.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

using Timeline = std::vector<std::vector<SimulatedAction>>;

void check_cost(const char* what, std::size_t index, double value) {
  PD2_CHECK(std::isfinite(value) && value >= 0, what, "[", index, "]: ", value,
            ": a cost must be finite and >= 0");
}

void check_edge(const std::string& of, std::size_t index, const EdgeCosts& edge) {
  check_cost((of + "latency").c_str(), index, edge.latency);
  check_cost((of + "message_bytes").c_str(), index, edge.message_bytes);
  PD2_CHECK(edge.bandwidth >= 0, of, "bandwidth[", index, "]: ", edge.bandwidth,
            ": a bandwidth must be >= 0 (0: unlimited)");
}

void check_costs(const Schedule& schedule, const Costs& costs) {
  const int d = schedule.depth();
  PD2_CHECK(costs.stages.size() == static_cast<std::size_t>(d),
            "costs of stages: ", costs.stages.size(), ", num_stages: ", d, ": one for each stage");
  PD2_CHECK(costs.edges.empty() || costs.edges.size() == static_cast<std::size_t>(d - 1),
            "costs of edges: ", costs.edges.size(), ", num_stages: ", d,
            ": one for each two neighbours, num_stages - 1, or none");
  for (std::size_t i = 0; i < costs.stages.size(); ++i) {
    for (const auto& [name, cost] : kStageCosts) check_cost(name, i, costs.stages[i].*cost);
  }
  for (std::size_t i = 0; i < costs.edges.size(); ++i) check_edge("", i, costs.edges[i]);
  std::set<std::pair<int, int>> pairs;
  for (std::size_t i = 0; i < costs.skips.size(); ++i) {
    const auto& [from, to, edge] = costs.skips[i];
    PD2_CHECK(from >= 0 && from + 1 < to && to < d, "skips[", i, "]: from stage ", from, " to ", to,
              ", num_stages: ", d, ": from >= 0, to >= from + 2 and to < num_stages are needed");
    PD2_CHECK(pairs.emplace(from, to).second, "skips[", i, "]: from stage ", from, " to ", to,
              ": two stages have one skip at most");
    check_edge("skips' ", i, edge);
  }
  if (costs.host) check_host(*costs.host);
}

// With one version on the device the next forward waits for the update in any case.
bool updates_beside(const Schedule& schedule, const Costs& costs, int stage) {
  return costs.host || schedule.num_versions[stage] > 1;
}

bool ends_flight(ActionKind kind) { return kind == kBackward || kind == kWeightGrad; }

// One run. A rank advances until it waits for messages that have not been sent yet; whoever makes
// the last one's time of arrival known wakes it. Times depend on nothing but other times, so the
// order in which ranks advance is free, and no queue by time is needed.
class Execution {
 public:
  Execution(const Schedule& schedule, const Costs& costs, int num_batches)
      : schedule_(schedule),
        costs_(costs),
        channels_(schedule, costs),
        num_microbatches_(std::int64_t{schedule.num_microbatches} * num_batches),
        arrival_((channels_.count() + schedule.num_stages) * num_microbatches_, kUnknown),
        link_free_(channels_.count(), 0),
        num_batches_(num_batches),
        update_end_(std::size_t(schedule.num_stages) * num_batches, 0),
        host_(schedule, costs),
        ranks_(schedule.ranks.size()),
        timeline_(schedule.ranks.size()) {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      ranks_[rank].steps = unroll(schedule, rank, 0, num_batches);
      timeline_[rank].reserve(ranks_[rank].steps.size());
      ready_.push_back(rank);
    }
  }

  Timeline run() && {
    while (!ready_.empty()) {
      const int rank = ready_.back();
      ready_.pop_back();
      advance(rank);
    }
    check_deadlock();
    return std::move(timeline_);
  }

 private:
  static constexpr double kUnknown = -1;
  static constexpr double kAwaited = -2;  // unknown, too, and a rank is stuck for it

  struct Rank {
    std::vector<Step> steps;
    std::size_t next = 0;
    double free_at = 0;
    bool has_recomputed = false;  // for the next step
    int num_missing = 0;          // of what it is stuck for
  };

  const std::vector<int>& inputs(const Step& step) const {
    return channels_.inputs(step.stage, step.kind);
  }

  std::int64_t index(int channel, std::int64_t microbatch) const {
    return channel * num_microbatches_ + microbatch;
  }

  // The index in arrival_ of when the stage comes to the update of the microbatch's batch.
  std::int64_t update_index(int stage, std::int64_t microbatch) const {
    const int m = schedule_.num_microbatches;
    return (channels_.count() + stage) * num_microbatches_ + batch_of(microbatch, m) * m;
  }

  int rank_of(int stage) const { return schedule_.placement[stage]; }

  double& update_end(int stage, int batch) {
    return update_end_[std::size_t(stage) * num_batches_ + batch];
  }

  void advance(int number) {
    Rank& rank = ranks_[number];
    for (; rank.next < rank.steps.size(); ++rank.next) {
      const Step& step = rank.steps[rank.next];
      recompute(number, step);
      double start = rank.free_at;
      for (const int channel : inputs(step)) {
        start = std::max(start, arrival(rank, index(channel, step.microbatch)));
      }
      if (const std::optional<int> twin = schedule_.twin(step.stage);
          twin && step.kind == kUpdate) {
        arrive(update_index(step.stage, step.microbatch), rank_of(*twin), rank.free_at);
        start = std::max(start, arrival(rank, update_index(*twin, step.microbatch)));
      }
      if (rank.num_missing > 0) return;
      const int batch = batch_of(step.microbatch, schedule_.num_microbatches);
      const bool is_beside = step.kind == kUpdate && updates_beside(schedule_, costs_, step.stage);
      if (is_beside && batch > 0) {
        start = std::max(
            start, costs_.host ? host_.stepped(step.stage) : update_end(step.stage, batch - 1));
      }
      if (const int read = batch - schedule_.delay[step.stage]; step.kind == kForward && read > 0) {
        start = std::max(start, update_end(step.stage, read - 1));
      }
      if (waits_for_gradients_buffer(step)) start = std::max(start, host_.gone(step.stage));
      const double end = end_of(step, start);
      timeline_[number].push_back(simulated(schedule_, step, start, end));
      rank.free_at = is_beside ? start : end;
      if (step.kind == kUpdate) {
        update_end(step.stage, batch) = end;
      }
      rank.has_recomputed = false;
      send(rank, step);
    }
  }

  bool waits_for_gradients_buffer(const Step& step) const {
    return costs_.host && costs_.host->one_buffer && begins_backward(step.kind) &&
           step.microbatch % schedule_.num_microbatches == 0;
  }

  // Also tells the host of what concerns it.
  double end_of(const Step& step, double start) {
    if (costs_.host && step.kind == kUpdate) return host_.update(step.stage, start);
    const double end = start + seconds(cost_of(schedule_, costs_, step.stage), step.kind);
    const bool is_last = (step.microbatch + 1) % schedule_.num_microbatches == 0;
    if (costs_.host && is_last && ends_flight(step.kind)) host_.complete(step.stage, start, end);
    return end;
  }

  // Makes the time of arrival known to the rank that may be stuck for it.
  void arrive(std::int64_t slot, int receiver, double time) {
    const bool is_awaited = arrival_[slot] == kAwaited;
    arrival_[slot] = time;
    if (is_awaited && --ranks_[receiver].num_missing == 0) ready_.push_back(receiver);
  }

  // The time of arrival, or a number below any time: then the rank is stuck.
  double arrival(Rank& rank, std::int64_t slot) {
    if (arrival_[slot] == kUnknown) {
      arrival_[slot] = kAwaited;
      ++rank.num_missing;
    }
    return arrival_[slot];
  }

  void recompute(int number, const Step& step) {
    Rank& rank = ranks_[number];
    const double takes = cost_of(schedule_, costs_, step.stage).recompute;
    if (takes == 0 || !begins_backward(step.kind) || rank.has_recomputed) return;
    rank.has_recomputed = true;
    Step again = step;
    again.kind = kRecompute;
    timeline_[number].push_back(simulated(schedule_, again, rank.free_at, rank.free_at + takes));
    rank.free_at += takes;
  }

  void send(const Rank& sender, const Step& step) {
    for (const int number : channels_.outputs(step.stage, step.kind)) {
      const Channel& channel = channels_[number];
      const int receiver = rank_of(channel.receiver);
      const std::int64_t slot = index(number, step.microbatch);
      if (&sender == &ranks_[receiver]) {
        arrival_[slot] = sender.free_at;
        continue;
      }
      const EdgeCosts& edge = channel.edge;
      link_free_[number] = std::max(sender.free_at, link_free_[number]) + seconds(edge);
      arrive(slot, receiver, link_free_[number] + edge.latency);
    }
  }

  int missing_sender(const Step& step) const {
    const auto missing = std::ranges::find_if(inputs(step), [&](int channel) {
      return arrival_[index(channel, step.microbatch)] == kAwaited;
    });
    return channels_[*missing].sender;
  }

  void check_deadlock() const {
    std::vector<Mark> marks;
    std::string stuck;
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      const Rank& rank = ranks_[number];
      if (rank.next == rank.steps.size()) continue;
      const Step& step = rank.steps[rank.next];
      marks.push_back({step.cell});
      stuck += detail::concat("\n  rank ", number, " waits in ", describe(schedule_, step));
      stuck += step.kind == kUpdate
                   ? detail::concat(" for the update of stage ", *schedule_.twin(step.stage))
                   : detail::concat(" for the ", step.kind == kForward ? "output" : "gradient",
                                    " of stage ", missing_sender(step));
    }
    if (marks.empty()) return;
    throw_schedule_error(schedule_, ScheduleRule::kDeadlock, marks,
                         detail::concat("deadlock: expected every rank to finish, found ",
                                        marks.size(), " of ", ranks_.size(), " waiting:", stuck));
  }

  const Schedule& schedule_;
  const Costs& costs_;
  const Channels channels_;
  const std::int64_t num_microbatches_;  // of the run
  // Times of arrival by channel and microbatch, then those at updates by stage and microbatch.
  std::vector<double> arrival_;
  std::vector<double> link_free_;  // by channel
  const int num_batches_;
  std::vector<double> update_end_;  // by stage and batch
  HostUpdates host_;
  std::vector<Rank> ranks_;
  std::vector<int> ready_;
  Timeline timeline_;
};

// The two batches whose ends are compared, in a run of num_batches.
struct Window {
  int first;
  int last;
};

Window steady_window(int num_batches, int batches_behind) {
  const int last = num_batches - 1 - batches_behind;
  return {last / 2, last};
}

// The shortest run whose window begins after all stages are filled. Where messages take time, the
// steady state may repeat only every so many microbatches as there are in flight, hence a window of
// many times that.
int least_batches_to_measure(const Schedule& schedule, int batches_behind) {
  const auto num_ranks = static_cast<int>(schedule.ranks.size());
  const int many = 16 * num_ranks / schedule.num_microbatches;
  const int window = std::max({2, batches_behind + 2, many});
  return 2 * window + batches_behind;
}

double measure_period(const Timeline& timeline, Window window) {
  double slowest = 0;
  for (const std::vector<SimulatedAction>& actions : timeline) {
    double first_end = 0;
    double last_end = 0;
    for (const SimulatedAction& action : actions) {
      if (action.batch == window.first) first_end = action.end;
      if (action.batch == window.last) last_end = action.end;
    }
    slowest = std::max(slowest, (last_end - first_end) / (window.last - window.first));
  }
  return slowest;
}

double busy_seconds_of_batch(const Schedule& schedule, const Costs& costs, int rank) {
  double sum = 0;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.placement[stage] != rank) continue;
    const StageCosts& cost = cost_of(schedule, costs, stage);
    sum += schedule.num_microbatches *
           (seconds(cost, kForward) + seconds(cost, kRecompute) + seconds(cost, kBackward));
    if (!updates_beside(schedule, costs, stage)) sum += seconds(cost, kUpdate);
  }
  return sum;
}

std::vector<int> count_in_flight(int num_stages, const Timeline& timeline) {
  std::vector<int> in_flight(num_stages, 0);
  std::vector<int> most(num_stages, 0);
  for (const std::vector<SimulatedAction>& actions : timeline) {
    for (const SimulatedAction& action : actions) {
      int& count = in_flight[action.stage];
      count += (action.kind == kForward) - ends_flight(action.kind);
      most[action.stage] = std::max(most[action.stage], count);
    }
  }
  return most;
}

}  // namespace

std::vector<MemoryStep> memory_over_time(const Schedule& schedule, const Costs& costs,
                                         const std::vector<SimulatedAction>& actions, int rank) {
  MemoryStep now;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.placement[stage] != rank) continue;
    const StageCosts& cost = cost_of(schedule, costs, stage);
    now.bytes +=
        schedule.num_versions[stage] * cost.weight_bytes + cost.gradient_bytes + cost.state_bytes;
  }
  std::vector<MemoryStep> steps = {now};
  for (const SimulatedAction& action : actions) {
    const StageCosts& cost = cost_of(schedule, costs, action.stage);
    const bool recomputes = cost.recompute > 0;
    if (action.kind == kForward) {
      now = {action.start, now.bytes + (recomputes ? cost.input_bytes : cost.activation_bytes)};
    } else if (action.kind == kRecompute) {
      now = {action.start, now.bytes + cost.activation_bytes};
    } else if (ends_flight(action.kind)) {
      now = {action.end, now.bytes - cost.activation_bytes - (recomputes ? cost.input_bytes : 0)};
    } else {
      continue;
    }
    steps.push_back(now);
  }
  return steps;
}

double second_batch(const Schedule& schedule, const Costs& costs) {
  return measure_period(Execution(schedule, costs, 2).run(), {.first = 0, .last = 1});
}

Simulation simulate(const Schedule& schedule, const Costs& costs, int num_batches) {
  check_form(schedule);
  check_costs(schedule, costs);
  PD2_CHECK(num_batches >= 1, "num_batches: ", num_batches, ": a run needs num_batches >= 1");

  Simulation result;
  result.timeline = Execution(schedule, costs, num_batches).run();
  const int behind = most_batches_behind(schedule);
  const int enough = std::max(num_batches, least_batches_to_measure(schedule, behind));
  const Window window = steady_window(enough, behind);
  result.period = enough == num_batches
                      ? measure_period(result.timeline, window)
                      : measure_period(Execution(schedule, costs, enough).run(), window);
  for (const std::vector<SimulatedAction>& actions : result.timeline) {
    for (const SimulatedAction& action : actions) {
      result.makespan = std::max(result.makespan, action.end);
    }
  }
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    const double work = busy_seconds_of_batch(schedule, costs, rank);
    result.bubbles.push_back(result.period > 0 ? 1 - work / result.period : 0);
    double peak = 0;
    for (const MemoryStep& step : memory_over_time(schedule, costs, result.timeline[rank], rank)) {
      peak = std::max(peak, step.bytes);
    }
    result.peak_bytes.push_back(peak);
  }
  result.most_in_flight = count_in_flight(schedule.num_stages, result.timeline);
  return result;
}

}  // namespace pd2
