#include "planner/simulate/simulate.h"

#include "core/check.h"
#include "core/schedule/messages.h"
#include "core/schedule/validate.h"
#include "core/schedule/walk.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

using Timeline = std::vector<std::vector<SimulatedAction>>;

void check_cost(const char* what, std::size_t index, double value) {
  PD2_CHECK(std::isfinite(value) && value >= 0, what, "[", index, "]: ", value,
            ": a cost must be finite and >= 0");
}

void check_edge(std::size_t index, const EdgeCosts& edge) {
  check_cost("latency", index, edge.latency);
  check_cost("message_bytes", index, edge.message_bytes);
  PD2_CHECK(edge.bandwidth >= 0, "bandwidth[", index, "]: ", edge.bandwidth,
            ": a bandwidth must be >= 0 (0: unlimited)");
}

// Each update is walked bucket by bucket.
constexpr int kMostBuckets = 1'000'000;

void check_host(const HostCosts& host) {
  for (const auto& [name, bandwidth] : {std::pair("down", host.down), std::pair("up", host.up)}) {
    PD2_CHECK(bandwidth >= 0, "host's ", name, ": ", bandwidth,
              ": a bandwidth must be >= 0 (0: unlimited)");
  }
  PD2_CHECK(host.buckets >= 1 && host.buckets <= kMostBuckets, "host's buckets: ", host.buckets,
            ": must be >= 1 and <= ", kMostBuckets);
}

void check_costs(const Costs& costs) {
  for (std::size_t i = 0; i < costs.stages.size(); ++i) {
    for (const auto& [name, cost] : kStageCosts) check_cost(name, i, costs.stages[i].*cost);
  }
  for (std::size_t i = 0; i < costs.edges.size(); ++i) check_edge(i, costs.edges[i]);
  if (costs.host) check_host(*costs.host);
}

// With one version on the device the next forward waits for the update in any case.
bool updates_beside(const Schedule& schedule, const Costs& costs, int stage) {
  return costs.host || schedule.num_versions[stage] > 1;
}

bool ends_flight(ActionKind kind) { return kind == kBackward || kind == kWeightGrad; }

// All ways between two stages, to the nearest ones first.
std::vector<SkipCosts> ways_of(int depth, const Costs& costs) {
  std::vector<SkipCosts> ways = costs.skips;
  for (const auto& [from, to] : chain_of(depth)) {
    ways.push_back({from, to, costs.edges.empty() ? EdgeCosts{} : costs.edges[from]});
  }
  std::ranges::stable_sort(ways, {}, [](const SkipCosts& way) { return way.to - way.from; });
  return ways;
}

std::vector<StageEdge> edges_of(const std::vector<SkipCosts>& ways) {
  std::vector<StageEdge> edges;
  for (const SkipCosts& way : ways) edges.push_back({way.from, way.to});
  return edges;
}

// ---------------------------------------------------------------- optimizers on the host

double copying(double bytes, double bandwidth) { return bandwidth > 0 ? bytes / bandwidth : 0; }

// The copy engines and the hosts of a run's ranks, by simulate()'s rules for costs.host. What it is
// told of a rank's stages comes in the order of the rank's list; without costs.host it is told
// nothing.
class HostUpdates {
 public:
  HostUpdates(const Schedule& schedule, const Costs& costs)
      : schedule_(schedule),
        costs_(costs),
        stages_(schedule.num_stages),
        ranks_(schedule.ranks.size()) {
    const int buckets = costs.host ? costs.host->buckets : 0;
    for (Stage& stage : stages_) stage.left.resize(buckets, 0);
  }

  // The stage's last backward of a batch, or its W, made the gradients between these times.
  void complete(int stage, double start, double end) { stages_[stage].made = {start, end}; }
  // The U of that batch begins. Gives the time at which the last weights have come up.
  double update(int number, double begins) {
    const HostCosts& host = *costs_.host;
    const StageCosts& cost = cost_of(schedule_, costs_, number);
    Stage& stage = stages_[number];
    Rank& rank = ranks_[schedule_.placement[number]];
    const bool is_summed = cost.all_reduce > 0 || schedule_.twin(number);
    const double has_all = begins + cost.all_reduce;
    const Interval given = is_summed ? Interval{begins, has_all} : stage.made;
    const int n = host.buckets;
    std::vector<double> come(n);  // by bucket: when its gradients are on the host
    for (int k = 0; k < n; ++k) {
      const double ready = std::lerp(given.start, given.end, (k + 1.0) / n);
      rank.down = std::max({rank.down, ready, stage.stepped});
      rank.down += copying(cost.gradient_bytes, host.down) / n;
      come[k] = rank.down;
    }
    stage.gone = rank.down;
    for (int k = 0; k < n; ++k) {
      rank.host = std::max({rank.host, has_all, come[k], stage.left[k]}) + cost.update / n;
      rank.up = std::max({rank.up, rank.host, stage.gone});
      rank.up += copying(cost.weight_bytes, host.up) / n;
      stage.left[k] = rank.up;
    }
    stage.stepped = rank.host;
    return rank.up;
  }

  // By the stage's newest U: its gradients are down, and its last bucket has been stepped.
  double gone(int stage) const { return stages_[stage].gone; }
  double stepped(int stage) const { return stages_[stage].stepped; }

 private:
  struct Interval {
    double start = 0;
    double end = 0;
  };
  struct Stage {
    Interval made;
    double gone = 0;
    double stepped = 0;
    std::vector<double> left;  // by bucket: when its newest weights have come up
  };
  struct Rank {  // until when each of them is busy
    double down = 0;
    double host = 0;
    double up = 0;
  };

  const Schedule& schedule_;
  const Costs& costs_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
};

// ---------------------------------------------------------------- a run

// One run. All times depend on other times alone, never on the order in which ranks advance.
class Execution {
 public:
  Execution(const Schedule& schedule, const Costs& costs, int num_batches)
      : schedule_(schedule),
        costs_(costs),
        num_batches_(num_batches),
        ways_(ways_of(schedule.depth(), costs)),
        arrivals_({schedule,
                   edges_of(ways_),
                   {0, std::int64_t{schedule.num_microbatches} * num_batches}}),
        link_free_(arrivals_.messages().channels().size(), 0),
        updates_(std::size_t(schedule.num_stages) * num_batches),
        host_(schedule, costs),
        stage_costs_(schedule.num_stages),
        steps_(unroll(schedule, 0, num_batches)),
        free_at_(schedule.ranks.size(), 0),
        timeline_(schedule.ranks.size()) {
    for (int stage = 0; stage < schedule.num_stages; ++stage) {
      stage_costs_[stage] = &cost_of(schedule, costs, stage);
    }
  }

  Timeline run() && {
    for (std::size_t rank = 0; rank < steps_.size(); ++rank) {
      timeline_[rank].reserve(steps_[rank].size());
    }
    const auto waits = [this](const Step& step) { return waits_for(step); };
    const auto done = walk(schedule_, steps_, waits, [this](const Step& step) { run(step); });
    check_finished(schedule_, steps_, done, "deadlock", "waiting", [&](const Step& step) {
      const char* what = step.kind == kUpdate    ? "update"
                         : step.kind == kForward ? "output"
                                                 : "gradient";
      return detail::concat("the ", what, " of stage ", waits_for(step).value());
    });
    return std::move(timeline_);
  }

 private:
  static constexpr double kUnknown = -1;

  struct Update {
    double begun = kUnknown;  // when the stage's rank has come to it
    double end = 0;
  };

  int rank_of(int stage) const { return schedule_.placement[stage]; }
  int batch(const Step& step) const {
    return batch_of(step.microbatch, schedule_.num_microbatches);
  }
  Update& update(int stage, int batch) {
    return updates_[std::size_t(stage) * num_batches_ + batch];
  }

  std::optional<int> waits_for(const Step& step) {
    if (step.kind != kUpdate) return arrivals_.missing(step);
    const std::optional<int> twin = schedule_.twin(step.stage);
    if (!twin) return std::nullopt;
    update(step.stage, batch(step)).begun = free_at_[rank_of(step.stage)];
    return update(*twin, batch(step)).begun == kUnknown ? twin : std::nullopt;
  }

  void run(const Step& step) {
    const int number = rank_of(step.stage);
    const int m = schedule_.num_microbatches;
    const int t = batch(step);
    const auto place = static_cast<int>(step.microbatch - std::int64_t{t} * m);  // in the batch
    double& free_at = free_at_[number];
    const auto add = [&](ActionKind kind, int microbatch, int version, double start, double end) {
      timeline_[number].push_back({.stage = step.stage,
                                   .kind = kind,
                                   .batch = t,
                                   .microbatch = microbatch,
                                   .version = version,
                                   .start = start,
                                   .end = end});
    };
    if (step.kind == kUpdate) {
      const auto [start, end] = update_at(step.stage, t, free_at);
      add(kUpdate, m - 1, t + 1, start, end);
      free_at = updates_beside(schedule_, costs_, step.stage) ? start : end;
      update(step.stage, t).end = end;
      return;
    }
    const StageCosts& cost = *stage_costs_[step.stage];
    const int version = std::max(t - schedule_.delay_at(step.stage, step.microbatch), 0);
    if (cost.recompute > 0 && begins_backward(step.kind)) {  // while its message may be under way
      add(kRecompute, place, version, free_at, free_at + cost.recompute);
      free_at += cost.recompute;
    }
    double start = arrivals_.latest(step, free_at);
    if (step.kind == kForward && version > 0) {
      start = std::max(start, update(step.stage, version - 1).end);
    }
    if (costs_.host && costs_.host->one_buffer && begins_backward(step.kind) && place == 0) {
      start = std::max(start, host_.gone(step.stage));
    }
    free_at = start + cost.seconds(step.kind);
    if (costs_.host && place == m - 1 && ends_flight(step.kind)) {
      host_.complete(step.stage, start, free_at);
    }
    add(step.kind, place, version, start, free_at);
    send(number, step);
  }

  // When the batch's update begins and ends if the rank comes to it then.
  std::pair<double, double> update_at(int stage, int batch, double start) {
    if (const auto twin = schedule_.twin(stage)) {
      start = std::max(start, update(*twin, batch).begun);
    }
    if (batch > 0 && updates_beside(schedule_, costs_, stage)) {
      const double before = costs_.host ? host_.stepped(stage) : update(stage, batch - 1).end;
      start = std::max(start, before);
    }
    const double end =
        costs_.host ? host_.update(stage, start) : start + stage_costs_[stage]->seconds(kUpdate);
    return {start, end};
  }

  void send(int number, const Step& step) {
    arrivals_.send(step, [&](int channel) {
      const auto& [from, to, way] = arrivals_.messages().channels()[channel];
      if (rank_of(to) == number) return free_at_[number];
      const EdgeCosts& edge = ways_[way].edge;
      link_free_[channel] = std::max(free_at_[number], link_free_[channel]) + edge.busy_seconds();
      return link_free_[channel] + edge.latency;
    });
  }

  const Schedule& schedule_;
  const Costs& costs_;
  const int num_batches_;
  const std::vector<SkipCosts> ways_;
  Arrivals arrivals_;
  std::vector<double> link_free_;  // by channel
  std::vector<Update> updates_;    // by stage and batch
  HostUpdates host_;
  std::vector<const StageCosts*> stage_costs_;
  const std::vector<std::vector<Step>> steps_;  // by rank, as what follows
  std::vector<double> free_at_;
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
           (cost.seconds(kForward) + cost.seconds(kRecompute) + cost.seconds(kBackward));
    if (!updates_beside(schedule, costs, stage)) sum += cost.seconds(kUpdate);
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

double StageCosts::seconds(ActionKind kind) const {
  switch (kind) {
    case kForward:
      return forward;
    case kBackward:
      return input_grad + weight_grad;
    case kInputGrad:
      return input_grad;
    case kWeightGrad:
      return weight_grad;
    case kUpdate:
      return all_reduce + update;
    case kRecompute:
      return recompute;
  }
  return 0;
}

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
  check_costs(costs);
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
