#include "planner/simulate/launches.h"

#include "core/schedule/unroll.h"
#include "planner/simulate/actions.h"
#include "planner/simulate/channels.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <queue>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

// By time, and of one time by order of making.
class Events {
 public:
  void at(double time, std::function<void()> happens) {
    events_.push({time, next_++, std::move(happens)});
  }
  double now() const { return now_; }
  void run() {
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      event.happens();
    }
  }

 private:
  struct Event {
    double time;
    std::int64_t number;
    std::function<void()> happens;
    bool operator<(const Event& other) const {
      return std::pair(other.time, other.number) < std::pair(time, number);
    }
  };
  std::priority_queue<Event> events_;
  std::int64_t next_ = 0;
  double now_ = 0;
};

class LaunchedExecution {
 public:
  LaunchedExecution(const Schedule& schedule, const Costs& costs, const LaunchCosts& launches,
                    int num_batches)
      : schedule_(schedule),
        costs_(costs),
        launches_(launches),
        channels_(schedule, costs),
        num_microbatches_(std::int64_t{schedule.num_microbatches} * num_batches),
        arrival_(channels_.count() * num_microbatches_, kUnknown),
        link_free_(channels_.count(), 0),
        versions_(schedule.num_stages),
        ranks_(schedule.ranks.size()) {
    result_.timeline.resize(ranks_.size());
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      ranks_[rank].steps = unroll(schedule, rank, 0, num_batches);
    }
    for (Stage& stage : versions_) {
      stage.has_come.resize(num_batches, kUnknown);
      stage.launched.resize(num_batches + 1);
      stage.stepped.resize(num_batches + 1, kUnknown);
      stage.made.resize(num_batches + 1, kUnknown);
    }
  }

  LaunchedRun run(int first, int last) && {
    first_ = first;
    last_ = last;
    result_.idle.resize(ranks_.size());
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      events_.at(0, [this, rank] { launch_next(rank); });
    }
    events_.run();
    for (IdleTime& idle : result_.idle) {
      for (double* seconds : {&idle.messages, &idle.updates, &idle.host}) *seconds /= last - first;
    }
    return std::move(result_);
  }

 private:
  static constexpr double kUnknown = -1;

  // Work of a stream.
  struct Work {
    std::optional<Step> step;  // none: a norm
    double takes = 0;
    double all_launched = 0;          // when the host has launched the end of it
    std::int64_t after = 0;           // so much of the rank's compute stream has been done
    std::function<void()> done = {};  // by the device
  };
  struct Stream {
    std::deque<Work> work;
    bool is_busy = false;
    std::int64_t given = 0;
    std::int64_t done = 0;
  };
  struct Begun {
    Step step;
    std::int64_t after;
  };
  struct Rank {
    std::vector<Step> steps;
    std::size_t next = 0;
    bool waits = false;     // for an update to be launched
    double idle_since = 0;  // of forwards and backwards
    double in_steps = 0;    // seconds since then, on the same stream
    Stream compute;
    Stream update;
    std::deque<Begun> coming;  // updates whose gradients are not complete on the device
  };
  struct Stage {
    std::vector<double> has_come;  // to the update, by batch: when
    std::vector<bool> launched;    // by version
    std::vector<double> stepped;   // by version: when the step that makes it begins
    std::vector<double> made;      // by version: when
    std::deque<Begun> updates;
    bool is_updating = false;
  };

  int rank_of(int stage) const { return schedule_.placement[stage]; }
  int batch(const Step& step) const {
    return batch_of(step.microbatch, schedule_.num_microbatches);
  }
  int version_read(const Step& step) const { return pd2::version_read(schedule_, step); }
  bool is_made(const Step& step) const {
    return version_read(step) == 0 || versions_[step.stage].made[version_read(step)] != kUnknown;
  }
  Stream& updates_of(Rank& rank) const { return launches_.one_stream ? rank.compute : rank.update; }

  double seconds(const Step& step) const {
    return pd2::seconds(cost_of(schedule_, costs_, step.stage), step.kind);
  }

  // The host of a rank.
  void launch_next(int number) {
    Rank& rank = ranks_[number];
    for (; rank.next < rank.steps.size() && rank.steps[rank.next].kind == kUpdate; ++rank.next) {
      begin_update(rank.steps[rank.next]);
    }
    if (rank.next == rank.steps.size()) return;
    const Step step = rank.steps[rank.next];
    const Stage& stage = versions_[step.stage];
    rank.waits =
        step.kind == kForward && version_read(step) > 0 && !stage.launched[version_read(step)];
    if (rank.waits) return;
    ++rank.next;
    const double takes = cost_of(schedule_, costs_, step.stage).recompute;
    const double now = events_.now();
    if (takes > 0 && begins_backward(step.kind)) {
      Step again = step;
      again.kind = kRecompute;
      give(number, rank.compute, {again, takes, now});
    }
    const int launches = step.kind == kForward ? launches_.forward : launches_.backward;
    const double end = now + launches * launches_.seconds;
    const double begin = now + std::min(launches, 1) * launches_.seconds;
    events_.at(begin, [this, number, step, end] {
      give(number, ranks_[number].compute, {step, seconds(step), end});
    });
    events_.at(end, [this, number] { launch_next(number); });
  }

  // The thread of a stage's updates.
  void begin_update(const Step& step) {
    const int number = rank_of(step.stage);
    Stage& stage = versions_[step.stage];
    stage.updates.push_back({step, ranks_[number].compute.given});
    ranks_[number].coming.push_back(stage.updates.back());
    come(number);
    if (!stage.is_updating) next_update(step.stage);
  }

  // The device has the gradients of the updates that it has come to.
  void come(int number) {
    Rank& rank = ranks_[number];
    for (; !rank.coming.empty() && rank.coming.front().after <= rank.compute.done;
         rank.coming.pop_front()) {
      const Step& step = rank.coming.front().step;
      versions_[step.stage].has_come[batch(step)] = events_.now();
      if (const std::optional<int> twin = schedule_.twin(step.stage)) try_all(rank_of(*twin));
    }
  }

  void next_update(int number) {
    Stage& stage = versions_[number];
    stage.is_updating = !stage.updates.empty();
    if (!stage.is_updating) return;
    const Begun begun = stage.updates.front();
    stage.updates.pop_front();
    read_norm(begun, launches_.reads);
  }

  void read_norm(const Begun& update, int reads) {
    const int number = rank_of(update.step.stage);
    if (reads == 0) return launch_update(update);
    events_.at(events_.now() + launches_.seconds, [=, this] {
      const double now = events_.now();
      give(number, updates_of(ranks_[number]), {std::nullopt, 0, now, update.after, [=, this] {
                                                  events_.at(
                                                      events_.now() + launches_.read_seconds,
                                                      [=, this] { read_norm(update, reads - 1); });
                                                }});
    });
  }

  void launch_update(const Begun& update) {
    const Step& step = update.step;
    const double end = events_.now() + launches_.update * launches_.seconds;
    events_.at(end, [=, this] {
      const int number = rank_of(step.stage);
      Rank& rank = ranks_[number];
      const int version = batch(step) + 1;
      give(number, updates_of(rank), {step, seconds(step), end, update.after, [=, this] {
                                        versions_[step.stage].made[version] = events_.now();
                                      }});
      versions_[step.stage].launched[version] = true;
      if (rank.waits) launch_next(number);
      next_update(step.stage);
    });
  }

  void give(int rank, Stream& stream, Work work) {
    ++stream.given;
    stream.work.push_back(std::move(work));
    try_all(rank);
  }

  void try_all(int rank) {
    begin(rank, ranks_[rank].compute);
    begin(rank, ranks_[rank].update);
  }

  bool can_begin(const Rank& rank, const Work& work) const {
    if (!launches_.one_stream && rank.compute.done < work.after) return false;
    if (!work.step) return true;
    const Step& step = *work.step;
    for (const int channel : channels_.inputs(step.stage, step.kind)) {
      if (arrival_[index(channel, step.microbatch)] == kUnknown) return false;
    }
    const std::optional<int> twin = schedule_.twin(step.stage);
    if (step.kind == kUpdate) return !twin || versions_[*twin].has_come[batch(step)] != kUnknown;
    return step.kind != kForward || is_made(step);
  }

  void begin(int number, Stream& stream) {
    Rank& rank = ranks_[number];
    if (stream.is_busy || stream.work.empty() || !can_begin(rank, stream.work.front())) return;
    const Work work = std::move(stream.work.front());
    stream.work.pop_front();
    stream.is_busy = true;
    const double now = events_.now();
    const double end = std::max(now + work.takes, work.all_launched);
    if (work.step) {
      result_.timeline[number].push_back(simulated(schedule_, *work.step, now, end));
      if (work.step->kind == kUpdate) {
        versions_[work.step->stage].stepped[batch(*work.step) + 1] = now;
      } else {
        add_idle(*work.step, number);
      }
    }
    events_.at(end, [this, number, &stream, work] {
      stream.is_busy = false;
      ++stream.done;
      come(number);
      if (work.step) end_step(number, stream, work);
      if (work.done) work.done();
      try_all(number);
    });
  }

  void end_step(int number, const Stream& stream, const Work& work) {
    Rank& rank = ranks_[number];
    if (work.step->kind != kUpdate) {
      rank.idle_since = events_.now();
      rank.in_steps = 0;
    } else if (&stream == &rank.compute) {
      rank.in_steps += work.takes;
    }
    send(number, *work.step);
  }

  // What it would have waited for without hosts comes first: messages, the stage's copy, the step.
  void add_idle(const Step& step, int number) {
    if (batch(step) <= first_ || batch(step) > last_) return;
    IdleTime& idle = result_.idle[number];
    double since = ranks_[number].idle_since;
    const auto until = [&since](double time, double& cause) {
      cause += std::max(time - since, 0.0);
      since = std::max(time, since);
    };
    for (const int channel : channels_.inputs(step.stage, step.kind)) {
      until(arrival_[index(channel, step.microbatch)], idle.messages);
    }
    if (const int version = version_read(step); step.kind == kForward && version > 0) {
      const Stage& stage = versions_[step.stage];
      if (const std::optional<int> twin = schedule_.twin(step.stage)) {
        until(versions_[*twin].has_come[version - 1], idle.updates);
      }
      until(stage.stepped[version], idle.host);
      until(stage.made[version], idle.updates);
    }
    until(std::min(since + ranks_[number].in_steps, events_.now()), idle.updates);
    until(events_.now(), idle.host);
  }

  void send(int number, const Step& step) {
    if (step.kind == kRecompute) return;
    for (const int each : channels_.outputs(step.stage, step.kind)) {
      const Channel& channel = channels_[each];
      const int receiver = rank_of(channel.receiver);
      const std::int64_t slot = index(each, step.microbatch);
      double time = events_.now();
      if (receiver != number) {
        link_free_[each] = std::max(time, link_free_[each]) + pd2::seconds(channel.edge);
        time = link_free_[each] + channel.edge.latency;
      }
      events_.at(time, [this, slot, receiver] {
        arrival_[slot] = events_.now();
        try_all(receiver);
      });
    }
  }

  std::int64_t index(int channel, std::int64_t microbatch) const {
    return channel * num_microbatches_ + microbatch;
  }

  const Schedule& schedule_;
  const Costs& costs_;
  const LaunchCosts& launches_;
  const Channels channels_;
  const std::int64_t num_microbatches_;  // of the run
  int first_ = 0, last_ = 0;
  Events events_;
  std::vector<double> arrival_;    // by channel and microbatch
  std::vector<double> link_free_;  // by channel
  std::vector<Stage> versions_;    // by stage
  std::vector<Rank> ranks_;
  LaunchedRun result_;
};

}  // namespace

LaunchedRun run_launched(const Schedule& schedule, const Costs& costs, const LaunchCosts& launches,
                         int num_batches, int first, int last) {
  return LaunchedExecution(schedule, costs, launches, num_batches).run(first, last);
}

}  // namespace pd2
