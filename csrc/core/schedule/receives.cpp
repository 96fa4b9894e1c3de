#include "core/schedule/receives.h"

#include "core/check.h"
#include "core/schedule/validate.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

using Lists = std::vector<std::vector<Action>>;  // by rank

constexpr int kNone = std::numeric_limits<int>::min();

bool moves_gradients(ActionKind kind) { return kind == kBackward || kind == kInputGrad; }

// Of a microbatch as a list's actions count: -1 for the batch before.
int relative_batch(int microbatch, int num_microbatches) {
  return microbatch >= 0 ? microbatch / num_microbatches
                         : -((num_microbatches - 1 - microbatch) / num_microbatches);
}

// The messages of all actions, by number. A channel is one direction of an edge of one pipeline.
class Messages {
 public:
  Messages(const Schedule& schedule, const std::vector<StageEdge>& edges, int lowest)
      : num_microbatches_(schedule.num_microbatches),
        lowest_(lowest),
        span_(schedule.num_microbatches - lowest),
        sent_forward_(schedule.num_stages),
        sent_backward_(schedule.num_stages),
        received_forward_(schedule.num_stages),
        received_backward_(schedule.num_stages) {
    for (int stage = 0; stage < schedule.num_stages; stage += schedule.depth()) {
      for (const StageEdge& edge : edges) {
        const int from = stage + edge.from;
        const int to = stage + edge.to;
        if (schedule.placement[from] == schedule.placement[to]) continue;
        add_channel(from, to, sent_forward_, received_forward_);
        add_channel(to, from, sent_backward_, received_backward_);
      }
    }
  }

  std::size_t size() const { return channels_.size() * span_; }

  Receive operator[](int message) const {
    Receive receive = channels_[message / span_];
    receive.microbatch = message % span_ + lowest_;
    return receive;
  }

  // The same for the messages of all batches that have one place in their batch.
  std::size_t num_places() const { return channels_.size() * num_microbatches_; }
  std::size_t place(int message) const {
    const int microbatch = (*this)[message].microbatch;
    return message / span_ * num_microbatches_ + microbatch -
           relative_batch(microbatch, num_microbatches_) * num_microbatches_;
  }

  // Calls use(message) for all that the action sends, or that it consumes.
  template <typename Use>
  void sent_by(const Action& action, Use use) const {
    for_each(action, sent_forward_, sent_backward_, use);
  }
  template <typename Use>
  void consumed_by(const Action& action, Use use) const {
    for_each(action, received_forward_, received_backward_, use);
  }

 private:
  using Channels = std::vector<std::vector<int>>;  // by stage

  void add_channel(int from, int to, Channels& sent, Channels& received) {
    const auto channel = static_cast<int>(channels_.size());
    channels_.push_back({.from = from, .to = to});
    sent[from].push_back(channel);
    received[to].push_back(channel);
  }

  template <typename Use>
  void for_each(const Action& action, const Channels& forward, const Channels& backward,
                Use use) const {
    if (action.kind != kForward && !moves_gradients(action.kind)) return;
    for (const int channel : (action.kind == kForward ? forward : backward)[action.stage]) {
      use(channel * span_ + action.microbatch - lowest_);
    }
  }

  const int num_microbatches_;
  const int lowest_;  // of the numbers of microbatches
  const int span_;
  std::vector<Receive> channels_;
  Channels sent_forward_, sent_backward_, received_forward_, received_backward_;
};

// One list of all ranks. Each rank waits for its device after every action, and before it begins
// whatever has been sent in earlier lists has been received.
class Walk {
 public:
  Walk(const Schedule& schedule, const std::vector<StageEdge>& edges, const Lists& lists)
      : schedule_(schedule),
        lists_(lists),
        messages_(schedule, edges, lowest(lists)),
        states_(messages_.size(), kReceived),
        launched_(messages_.size()),
        is_one_of_several_(messages_.size()),
        ranks_(lists.size()),
        early_(lists.size()),
        shares_(schedule.num_stages, kNone) {
    for_each_action([&](const Action& action) {
      messages_.sent_by(action, [&](int message) { states_[message] = kNotSent; });
      const std::optional<int> share = share_of(action);
      int& before = shares_[action.stage];
      if (share && (before == kNone || before >= *share)) before = *share - 1;
    });
  }

  const Messages& messages() const { return messages_; }
  // No earlier list has sent it.
  void expect(int message) { states_[message] = kNotSent; }

  EarlyReceives run() {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) wake(rank);
    do {
      while (!awake_.empty()) {
        const int rank = awake_.front();
        awake_.pop_front();
        ranks_[rank].is_awake = false;
        advance(rank);
      }
      post_what_was_sent();
    } while (!awake_.empty());
    check_finished();
    return std::move(early_);
  }

  template <typename Use>
  void for_each_action(Use use) const {
    for (const std::vector<Action>& list : lists_) std::ranges::for_each(list, use);
  }

 private:
  enum State : std::uint8_t { kNotSent, kPosted, kSent, kReceived };
  struct RankState {
    int next = 0;
    bool waits_for_device = false;  // after `next`; if not, for messages, or it has finished
    bool is_awake = false;
    int launched = 0;        // when its last action was
    std::vector<int> sends;  // launched, and not known to be received
  };

  static int lowest(const Lists& lists) {
    int lowest = 0;
    for (const auto& list : lists) {
      for (const Action& action : list) lowest = std::min(lowest, action.microbatch);
    }
    return lowest;
  }

  const Action& action(int rank) const { return lists_[rank][ranks_[rank].next]; }
  bool has_finished(int rank) const {
    return ranks_[rank].next == static_cast<int>(lists_[rank].size());
  }

  void wake(int rank) {
    if (!std::exchange(ranks_[rank].is_awake, true)) awake_.push_back(rank);
  }

  void advance(int rank) {
    RankState& state = ranks_[rank];
    while (!has_finished(rank)) {
      if (!state.waits_for_device) {
        if (!receive_all(rank)) return;
        launch(rank);
        state.waits_for_device = true;
      }
      std::erase_if(state.sends, [&](int message) { return states_[message] == kReceived; });
      if (!state.sends.empty() || waits_for_copy(rank)) return;
      state.waits_for_device = false;
      ++state.next;
    }
  }

  // Posts what the next action consumes; whether all of it is there.
  bool receive_all(int rank) {
    std::vector<int> messages;
    messages_.consumed_by(action(rank), [&](int message) { messages.push_back(message); });
    std::ranges::sort(messages, {}, [&](int message) { return launched_[message]; });
    bool is_there = true;
    for (const int message : messages) {
      const State before = states_[message];
      if (messages.size() > 1 && before == kNotSent) is_one_of_several_[message] = true;
      if (messages.size() > 1 && before == kSent) post_in_order(message);
      post(message);
      is_there = is_there && states_[message] == kReceived;
    }
    return is_there;
  }

  // A post may wait for its message's header, and so for its sending: of several messages that are
  // consumed together the one that is sent first has to be posted first.
  void post_in_order(int message) {
    const Receive& receive = messages_[message];
    const int rank = schedule_.placement[receive.to];
    early_[rank].push_back(
        {.action = ranks_[rank].next, .moment = Moment::kBefore, .receive = receive});
  }

  void post(int message) {
    if (states_[message] == kNotSent) states_[message] = kPosted;
    if (states_[message] != kSent) return;
    states_[message] = kReceived;
    wake(schedule_.placement[messages_[message].from]);
  }

  void launch(int rank) {
    const Action& action = this->action(rank);
    ranks_[rank].launched = ++num_launched_;
    messages_.sent_by(action, [&](int message) {
      launched_[message] = num_launched_;
      if (states_[message] == kPosted) {
        if (is_one_of_several_[message]) post_in_order(message);
        states_[message] = kReceived;
        wake(schedule_.placement[messages_[message].to]);
      } else {
        states_[message] = kSent;
        ranks_[rank].sends.push_back(message);
        sent_.push_back(message);
      }
    });
    const std::optional<int> share = share_of(action);
    if (schedule_.num_pipelines == 2 && share) {
      shares_[action.stage] = *share;
      wake(schedule_.placement[*schedule_.twin(action.stage)]);
    }
  }

  // The two copies of a stage add up their gradients in the update: the device is busy until the
  // other copy has come there too. Gives the batch.
  std::optional<int> share_of(const Action& action) const {
    if (action.kind != kUpdate) return std::nullopt;
    return relative_batch(action.microbatch, schedule_.num_microbatches);
  }
  bool waits_for_copy(int rank) const {
    const std::optional<int> twin = schedule_.twin(action(rank).stage);
    const std::optional<int> share = share_of(action(rank));
    return twin && share && shares_[*twin] < *share;
  }

  void post_what_was_sent() {
    for (const int message : std::exchange(sent_, {})) {
      if (states_[message] == kReceived) continue;
      const Receive& receive = messages_[message];
      const int rank = schedule_.placement[receive.to];
      const RankState& receiver = ranks_[rank];
      const bool is_at_end = has_finished(rank) && receiver.next > 0;
      // An update sends nothing, and the sum in it may last.
      const bool is_before =
          !is_at_end && (!receiver.waits_for_device || action(rank).kind == kUpdate);
      const Moment moment = is_before                                ? Moment::kBefore
                            : launched_[message] < receiver.launched ? Moment::kWithSends
                                                                     : Moment::kAfterSends;
      early_[rank].push_back(
          {.action = receiver.next - (is_at_end ? 1 : 0), .moment = moment, .receive = receive});
      post(message);
    }
  }

  void check_finished() const {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      PD2_CHECK(has_finished(rank), "schedule ", schedule_.name, ": rank ", rank, " waits in ",
                to_string(action(rank)), " for ",
                ranks_[rank].waits_for_device ? "the gradients of the stage's copy, and that one "
                                                "for this rank"
                                              : "a message that is sent in a later batch's list",
                ": wherever receives are posted, waiting for the device could last for ever");
    }
  }

  const Schedule& schedule_;
  const Lists& lists_;
  const Messages messages_;
  std::vector<State> states_;  // by message
  std::vector<int> launched_;  // by message: when the action that sends it was
  int num_launched_ = 0;
  std::vector<bool> is_one_of_several_;  // that were posted by an action that consumes them
  std::vector<RankState> ranks_;
  EarlyReceives early_;
  std::vector<int> shares_;  // by stage: the last of its sums with its copy
  std::deque<int> awake_;
  std::vector<int> sent_;  // since the last time that no rank could go on
};

Lists lists_of(const Schedule& schedule, ListKind list) {
  Lists lists;
  for (const RankActions& rank : schedule.ranks) lists.push_back(actions(rank, list));
  return lists;
}

Lists evaluation_lists(const Schedule& schedule) {
  Lists lists(schedule.ranks.size());
  for (int stage = 0; stage < schedule.depth(); ++stage) {
    lists[schedule.placement[stage]].push_back({.stage = stage, .kind = kForward});
  }
  return lists;
}

// Where no other list can have sent a message, it must be sent in this one. (Only the steady list
// follows lists of other batches, in which the same messages have other numbers.)
EarlyReceives early_receives(const Schedule& schedule, const std::vector<StageEdge>& edges,
                             const Lists& lists, ListKind kind) {
  Walk walk(schedule, edges, lists);
  const Messages& messages = walk.messages();
  std::vector<int> sent_as(messages.num_places(), kNone);  // the number of the list's microbatch
  walk.for_each_action([&](const Action& action) {
    messages.sent_by(action,
                     [&](int message) { sent_as[messages.place(message)] = action.microbatch; });
  });
  walk.for_each_action([&](const Action& action) {
    messages.consumed_by(action, [&](int message) {
      const bool is_earlier =
          kind == ListKind::kEpilogue ||
          (kind == ListKind::kSteady && sent_as[messages.place(message)] > action.microbatch);
      if (!is_earlier) walk.expect(message);
    });
  });
  return walk.run();
}

}  // namespace

ReceivePlan plan_receives(const Schedule& schedule, const std::vector<StageEdge>& edges) {
  check_form(schedule);
  for (const StageEdge& edge : edges) {
    PD2_CHECK(0 <= edge.from && edge.from < edge.to && edge.to < schedule.depth(),
              "edges: ", edge.from, " -> ", edge.to,
              ": an edge goes from a stage to a later one, of ", schedule.depth());
  }
  ReceivePlan plan;
  for (const ListKind list : {ListKind::kPrologue, ListKind::kSteady, ListKind::kEpilogue}) {
    plan.lists[static_cast<std::size_t>(list)] =
        early_receives(schedule, edges, lists_of(schedule, list), list);
  }
  plan.evaluation =
      early_receives(schedule, edges, evaluation_lists(schedule), ListKind::kPrologue);
  return plan;
}

}  // namespace pd2
