// A reference for plan_receives(): ranks with devices that spin, as NCCL makes them. Hosts launch
// ahead, devices follow, and wherever it is asked for, and memory is taken, a host waits for all
// that its device has to do. For memory of what it receives it waits for a header first. Updates
// that wait for each other have threads of their own, which tell the other stages what they read
// from their device; these, too, may wait for all that it has to do. It knows nothing of plans but
// where they say that a receive is posted, or an update waited for.

#pragma once

#include "core/schedule/receives.h"
#include "core/schedule/unroll.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace pd2::testing {

// At once: all of a batch when it begins, and nobody waits for a device, but the batch's lists must
// be done before the next one begins.
// Without joint: the plan knows of no updates that wait for each other, and nobody waits for one
// before what depends on it is computed.
enum class Posting { kPlanned, kPlannedWithoutJoint, kWhenConsumed, kTwoAhead, kAtOnce };

struct Drains {
  double in_actions = 0;       // the probability that a host waits at a place in an action
  double between_batches = 0;  // and that all wait before they begin the next batch
  double in_updates = 0;       // and that an update's thread does, at each of its steps
  double headers = 1;          // and that a host waits for a header before it posts a receive
  // Whether all streams of a device share a queue of the hardware: it does what it is given in that
  // order, of which each transfer ends before the next begins.
  bool in_one_queue = false;
};

class ReceiveExecution {
 public:
  ReceiveExecution(const Schedule& schedule, std::vector<StageEdge> edges, Posting posting,
                   unsigned seed, std::vector<JointUpdate> joint = {})
      : schedule_(schedule),
        edges_(std::move(edges)),
        posting_(posting),
        joint_(std::move(joint)),
        plan_(posting == Posting::kPlanned               ? plan_receives(schedule, edges_, joint_)
              : posting == Posting::kPlannedWithoutJoint ? plan_receives(schedule, edges_)
                                                         : ReceivePlan()),
        random_(seed) {}

  // Returns what is wrong, "" if runs of these numbers of batches, each drained, come to an end.
  std::string run(const std::vector<int>& batches_per_run, Drains drains) {
    drains_ = drains;
    for (const int num_batches : batches_per_run) {
      ranks_.assign(schedule_.ranks.size(), {});
      channels_.clear();
      shares_.assign(schedule_.num_stages, {});
      updates_.assign(schedule_.num_stages, {});
      for (int batch = 0; batch <= num_batches; ++batch) {
        const ListKind list = batch == num_batches ? ListKind::kEpilogue
                              : batch              ? ListKind::kSteady
                                                   : ListKind::kPrologue;
        submit(list, std::min(batch, num_batches - 1));
        const bool all_wait = batch == num_batches || chance(drains.between_batches);
        if (batch == num_batches) await_all();
        if (all_wait) {
          for (Rank& rank : ranks_)
            rank.program.push_back(
                {.kind = posting_ == Posting::kAtOnce ? Op::kFinish : Op::kDrain});
          go_on([] { return false; });
          if (!problem_.empty()) return problem_;
          for (const Rank& rank : ranks_) {
            if (!rank.program.empty()) return stuck();
          }
        } else {
          go_on([this] { return chance(0.02); });  // some way into the batch
        }
        if (!problem_.empty()) return problem_;
      }
      for (const auto& [ends, channel] : channels_) {
        if (channel.posted != channel.sent || channel.consumed != channel.sent) return "left over";
      }
    }
    return "";
  }

 private:
  using Ends = std::pair<int, int>;  // stages: from, to

  struct Op {
    enum Kind {
      kReserve,
      kPost,
      kConsume,
      kCompute,
      kAnnounce,
      kSend,
      kShare,
      kUpdate,
      kAwait,
      kDrain,
      kFinish
    } kind;
    Ends ends = {};      // of a message
    int microbatch = 0;  // from the run's first
    int stage = 0;       // of kShare, kUpdate and kAwait
    int batch = 0;       // of kUpdate and kAwait; there kLast: the last that has begun
  };
  static constexpr int kLast = std::numeric_limits<int>::max();
  struct Rank {
    std::deque<Op> program;   // what the host has not launched
    std::deque<Op> compute;   // what the compute stream has to do, in order
    int unfinished = 0;       // sends, receives and sums that were launched and go on
    int given = 0, done = 0;  // to the compute stream, and by it
    bool is_idle() const { return compute.empty() && unfinished == 0; }
  };
  // A stage's: the batches, and where the compute stream is to be for the last one.
  struct Update {
    int begun = -1, told = -1, over = -1;
    int after = 0, after_shares = 0;
    bool drains = false;  // before its next step
  };
  struct Channel {
    int expected = 0, posted = 0, consumed = 0;  // by the receiver's host
    int announced = 0, launched = 0;             // by the sender's host
    int sent = 0;                                // given to the network: computed, too
    int begun = 0;                               // posted, and the receiver's device is there
    int arrived = 0;
  };
  struct Share {
    int launched = 0, computed = 0, finished = 0;
  };

  bool posts_ahead() const {
    return posting_ == Posting::kTwoAhead || posting_ == Posting::kAtOnce;
  }

  bool chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random_) < probability;
  }

  int rank_of(int stage) const { return schedule_.placement[stage]; }
  static bool goes_back(ActionKind kind) {
    return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
  }

  // The messages that reach, or leave, the stage in a forward, or in a backward.
  std::vector<Ends> messages(int stage, ActionKind kind, bool outgoing) const {
    std::vector<Ends> found;
    if (kind != ActionKind::kForward && !goes_back(kind)) return found;
    for (int first = 0; first < schedule_.num_stages; first += schedule_.depth()) {
      for (const StageEdge& edge : edges_) {
        Ends ends = {first + edge.from, first + edge.to};
        if (goes_back(kind)) std::swap(ends.first, ends.second);
        const int mine = outgoing ? ends.first : ends.second;
        if (mine == stage && rank_of(ends.first) != rank_of(ends.second)) found.push_back(ends);
      }
    }
    return found;
  }

  void submit(ListKind list, int batch) {
    const int m = schedule_.num_microbatches;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      std::deque<Op>& program = ranks_[r].program;
      const auto drain = [&] {
        if (chance(drains_.in_actions)) program.push_back({.kind = Op::kDrain});
      };
      const std::vector<Action>& all = actions(schedule_.ranks[r], list);
      const auto post = [&](const Ends& ends, int number) {
        if (chance(drains_.headers)) program.push_back({Op::kReserve, ends, number});
        drain();
        program.push_back({Op::kPost, ends, number});
      };
      const auto early = [&](int place, Moment moment) {
        if (posting_ != Posting::kPlanned && posting_ != Posting::kPlannedWithoutJoint) return;
        for (const EarlyReceive& each : plan_.of(static_cast<int>(r), list)) {
          const int number = batch * m + each.receive.microbatch;
          if (each.action != place || each.moment != moment || number < 0) continue;
          post({each.receive.from, each.receive.to}, number);
        }
      };
      for (int place = 0; place < static_cast<int>(all.size()); ++place) {
        const Action& action = all[place];
        const int number = batch * m + action.microbatch;
        const bool exists = number >= 0;
        early(place, Moment::kBeforeUpdates);
        await_planned(static_cast<int>(r), list, place);
        const int needed = needed_by(action, number);
        const bool awaits = exists && !joint_of(action.stage).empty();
        const Op await = {.kind = Op::kAwait, .stage = action.stage, .batch = needed};
        if (awaits && posting_ == Posting::kPlanned) program.push_back(await);
        early(place, Moment::kBefore);
        if (exists && !posts_ahead()) {
          for (const Ends& ends : messages(action.stage, action.kind, false)) {
            post(ends, number);
          }
        }
        if (awaits) program.push_back(await);
        if (exists) {
          drain();
          for (const Ends& ends : messages(action.stage, action.kind, false)) {
            program.push_back({Op::kConsume, ends, number});
          }
          program.push_back({.kind = Op::kCompute});
          if (schedule_.num_pipelines == 2 && action.kind == ActionKind::kUpdate) {
            program.push_back({.kind = Op::kShare, .stage = action.stage});
          }
          if (awaits && action.kind == ActionKind::kUpdate) {
            program.push_back({.kind = Op::kUpdate, .stage = action.stage, .batch = number / m});
          }
          for (const Ends& ends : messages(action.stage, action.kind, true)) {
            drain();
            program.push_back({Op::kAnnounce, ends, number});
          }
        }
        early(place, Moment::kWithSends);
        if (exists) {
          for (const Ends& ends : messages(action.stage, action.kind, true)) {
            program.push_back({Op::kSend, ends, number});
          }
        }
        early(place, Moment::kAfterSends);
        if (exists) drain();
      }
      const auto end = static_cast<int>(all.size());
      early(end, Moment::kBeforeUpdates);
      await_planned(static_cast<int>(r), list, end);
      early(end, Moment::kBefore);
    }
    if (!posts_ahead() || list == ListKind::kEpilogue) return;
    for (int stage = 0; stage < schedule_.num_stages; ++stage) {
      for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
        for (const Ends& ends : messages(stage, kind, false)) {
          channels_[ends].expected += m;
          post_ahead(ends);
        }
      }
    }
  }

  std::vector<int> joint_of(int stage) const {
    std::vector<int> all;
    for (const JointUpdate& stages : joint_) {
      if (std::ranges::find(stages, stage) != stages.end()) {
        all.insert(all.end(), stages.begin(), stages.end());
      }
    }
    return all;
  }
  // Of the batch before an update, or of the one that makes the version that a forward reads.
  int needed_by(const Action& action, int number) const {
    const int batch = number / schedule_.num_microbatches;
    if (action.kind == ActionKind::kUpdate) return batch - 1;
    if (action.kind == ActionKind::kForward) {
      return batch - schedule_.delay_at(action.stage, number) - 1;
    }
    return -1;
  }
  void await_planned(int rank, ListKind list, int place) {
    if (posting_ != Posting::kPlanned) return;
    for (const AwaitedUpdate& each : plan_.awaited[static_cast<std::size_t>(list)].at(rank)) {
      if (each.action != place) continue;
      ranks_[rank].program.push_back({.kind = Op::kAwait, .stage = each.stage, .batch = kLast});
    }
  }
  void await_all() {
    for (int stage = 0; stage < schedule_.num_stages; ++stage) {
      ranks_[rank_of(stage)].program.push_back(
          {.kind = Op::kAwait, .stage = stage, .batch = kLast});
    }
  }

  void post_ahead(const Ends& ends) {
    Channel& channel = channels_[ends];
    const int ahead = posting_ == Posting::kTwoAhead ? 2 : channel.expected;
    while (channel.posted < channel.expected && channel.posted < channel.consumed + ahead) {
      channel.begun = ++channel.posted;
      ++ranks_[rank_of(ends.second)].unfinished;
    }
  }

  // Until nothing moves, or `stops` says so.
  void go_on(const std::function<bool()>& stops) {
    std::vector<std::size_t> order(ranks_.size());
    for (std::size_t r = 0; r < order.size(); ++r) order[r] = r;
    for (bool moved = true; moved && problem_.empty() && !stops();) {
      moved = false;
      std::shuffle(order.begin(), order.end(), random_);
      for (const std::size_t r : order) {
        for (int steps = 1 + static_cast<int>(random_() % 4); steps > 0; --steps) {
          moved = launch(ranks_[r]) || moved;
        }
        moved = compute(ranks_[r]) || moved;
      }
      moved = transfer() || moved;
      for (int stage = 0; stage < schedule_.num_stages; ++stage) {
        if (updates_[stage].over == updates_[stage].begun) continue;
        // It may be late.
        moved = (random_() % 4 == 0 ? update(stage) : can_update(stage)) || moved;
      }
    }
  }

  bool can_update(int stage) const {
    const Update& update = updates_[stage];
    const Rank& rank = ranks_[rank_of(stage)];
    if (update.drains) return rank.is_idle();
    if (update.told == update.begun) {
      return std::ranges::all_of(joint_of(stage),
                                 [&](int other) { return updates_[other].told >= update.begun; });
    }
    return rank.done >= update.after && shares_[stage].finished >= update.after_shares;
  }

  // The next step of the update's thread: it waits for the device, tells, waits, is over.
  bool update(int stage) {
    if (!can_update(stage)) return false;
    Update& update = updates_[stage];
    if (std::exchange(update.drains, false)) return true;
    (update.told == update.begun ? update.over : update.told) = update.begun;
    update.drains = update.over < update.begun && chance(drains_.in_updates);
    return true;
  }

  // The host's next step.
  bool launch(Rank& rank) {
    if (rank.program.empty()) return false;
    const Op op = rank.program.front();
    Channel& channel = channels_[op.ends];
    switch (op.kind) {
      case Op::kDrain:
        if (!rank.is_idle()) return false;
        break;
      case Op::kUpdate:
        updates_[op.stage].begun = op.batch;
        updates_[op.stage].after = rank.given;
        updates_[op.stage].after_shares = shares_[op.stage].launched;
        updates_[op.stage].drains = chance(drains_.in_updates);
        break;
      case Op::kAwait: {
        const Update& update = updates_[op.stage];
        if (update.over < (op.batch == kLast ? update.begun : op.batch)) return false;
        break;
      }
      case Op::kFinish:
        if (!rank.compute.empty()) return false;
        break;
      case Op::kReserve:
        if (channel.announced <= op.microbatch) return false;
        break;
      case Op::kAnnounce:
        ++channel.announced;
        break;
      case Op::kPost:
        if (channel.posted > op.microbatch) break;  // it has been, early
        if (channel.posted != op.microbatch) problem_ = "receives are posted in another order";
        ++channel.posted;
        ++rank.unfinished;
        if (drains_.in_one_queue) {
          rank.compute.push_back(op);
        } else {
          channel.begun = channel.posted;
        }
        break;
      case Op::kConsume:
        if (channel.posted <= op.microbatch) problem_ = "a receive was not posted";
        ++channel.consumed;
        if (posts_ahead()) post_ahead(op.ends);
        rank.compute.push_back(op);
        break;
      case Op::kCompute:
        rank.compute.push_back(op);
        break;
      case Op::kSend:
        ++channel.launched;
        ++rank.unfinished;
        rank.compute.push_back(op);
        break;
      case Op::kShare:
        ++rank.unfinished;
        rank.compute.push_back(op);
        rank.compute.back().batch = shares_[op.stage].launched++;
        break;
    }
    rank.program.pop_front();
    rank.given = rank.done + static_cast<int>(rank.compute.size());
    return true;
  }

  bool compute(Rank& rank) {
    if (rank.compute.empty()) return false;
    const Op& op = rank.compute.front();
    Channel& channel = channels_[op.ends];
    if (op.kind == Op::kConsume && channel.arrived <= op.microbatch) return false;
    if (op.kind == Op::kPost) channel.begun = op.microbatch + 1;
    if (op.kind == Op::kSend) channel.sent = op.microbatch + 1;
    if (op.kind == Op::kShare) shares_[op.stage].computed = op.batch + 1;
    if (drains_.in_one_queue) {
      const bool is_transfer = op.kind == Op::kPost || op.kind == Op::kSend;
      if (is_transfer && channel.arrived <= op.microbatch) return false;
      if (op.kind == Op::kShare && shares_[op.stage].finished <= op.batch) return false;
    }
    rank.compute.pop_front();
    ++rank.done;
    return true;
  }

  bool transfer() {
    bool moved = false;
    for (auto& [ends, channel] : channels_) {
      for (; channel.arrived < std::min(channel.sent, channel.begun); ++channel.arrived) {
        --ranks_[rank_of(ends.first)].unfinished;
        --ranks_[rank_of(ends.second)].unfinished;
        moved = true;
      }
    }
    for (int stage = 0; stage < static_cast<int>(shares_.size()); ++stage) {
      if (schedule_.num_pipelines == 1) break;
      Share& share = shares_[stage];
      const Share& other = shares_[*schedule_.twin(stage)];
      for (; share.finished < std::min(share.computed, other.computed); ++share.finished) {
        --ranks_[rank_of(stage)].unfinished;
        moved = true;
      }
    }
    return moved;
  }

  std::string stuck() const {
    std::string text = "stuck:";
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      text += " rank " + std::to_string(r) + " has " + std::to_string(ranks_[r].program.size()) +
              " steps left,";
    }
    return text;
  }

  const Schedule& schedule_;
  const std::vector<StageEdge> edges_;
  const Posting posting_;
  const std::vector<JointUpdate> joint_;
  const ReceivePlan plan_;
  std::mt19937 random_;
  Drains drains_;
  std::vector<Rank> ranks_;
  std::map<Ends, Channel> channels_;
  std::vector<Share> shares_;
  std::vector<Update> updates_;  // by stage
  std::string problem_;
};

}  // namespace pd2::testing
