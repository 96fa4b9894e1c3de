#include "core/schedule/receives.h"

#include "core/check.h"
#include "core/schedule/validate.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

using Lists = std::vector<std::vector<Action>>;  // by rank

constexpr int kNone = std::numeric_limits<int>::min();
constexpr int kAll = -1;  // no message's number

// One list of all ranks. Each rank waits for its device after every action, and before it begins
// whatever has been sent in earlier lists has been received.
class ListWalk {
 public:
  struct Updates {
    JointProgress joint;
    const AwaitedUpdates& awaited;
  };

  ListWalk(const Schedule& schedule, const std::vector<StageEdge>& edges, const Lists& lists,
           Updates updates)
      : schedule_(schedule),
        lists_(lists),
        messages_(schedule, edges, {lowest(lists), schedule.num_microbatches - lowest(lists)},
                  Between::kRanks),
        states_(messages_.size(), kReceived),
        launched_(messages_.size()),
        is_one_of_several_(messages_.size()),
        ranks_(lists.size()),
        outstanding_(lists.size()),
        early_(lists.size()),
        updates_(std::move(updates.joint)),
        awaited_(updates.awaited),
        shares_(schedule.num_stages, kNone) {
    for_each_action([&](const Action& action) {
      messages_.sent_by(action, [&](int message) { states_[message] = kNotSent; });
      const std::optional<int> share = share_of(action);
      int& before = shares_[action.stage];
      if (share && (before == kNone || before >= *share)) before = *share - 1;
    });
  }

  // Gives updates that ranks have to wait for too, of which the others were none: begin anew, then.
  AwaitedUpdates run(ListKind kind) {
    expect_unsent(kind);
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
    AwaitedUpdates more = what_others_wait_for();
    if (std::ranges::all_of(more, &std::vector<AwaitedUpdate>::empty)) check_finished();
    return more;
  }

  EarlyReceives take_early() { return std::move(early_); }

 private:
  enum State : std::uint8_t { kNotSent, kPosted, kSent, kReceived };
  struct RankState {
    int next = 0;
    bool waits_for_device = false;  // after `next`; if not, for one of these, or it has finished
    bool waits_for_updates = false;
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

  // Where no other list can have sent a message, it must be sent in this one. (Only the steady list
  // follows lists of other batches, in which the same messages have other numbers.)
  void expect_unsent(ListKind kind) {
    std::vector<int> sent_as(messages_.num_places(), kNone);  // the number of the list's microbatch
    for_each_action([&](const Action& action) {
      messages_.sent_by(
          action, [&](int message) { sent_as[messages_.place(message)] = action.microbatch; });
    });
    for_each_action([&](const Action& action) {
      messages_.consumed_by(action, [&](int message) {
        const bool is_earlier =
            kind == ListKind::kEpilogue ||
            (kind == ListKind::kSteady && sent_as[messages_.place(message)] > action.microbatch);
        if (!is_earlier) states_[message] = kNotSent;
      });
    });
  }

  template <typename Use>
  void for_each_action(Use use) const {
    for (const std::vector<Action>& list : lists_) std::ranges::for_each(list, use);
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
    while (true) {
      if (!state.waits_for_device) {
        state.waits_for_updates = !are_updates_over(rank);
        if (state.waits_for_updates || has_finished(rank) || !receive_all(rank)) return;
        launch(rank);
        state.waits_for_device = true;
      }
      std::erase_if(state.sends, [&](int message) { return states_[message] == kReceived; });
      if (!state.sends.empty() || waits_for_copy(rank)) return;
      state.waits_for_device = false;
      ++state.next;
    }
  }

  // Those that the rank waits for before it posts what its next action consumes, or at the end.
  bool are_updates_over(int rank) {
    bool are_over = true;
    for_each_needed(rank, [&](int stage, int batch) {
      if (updates_.tell(stage, batch)) {
        for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
          if (other != rank && ranks_[other].waits_for_updates) wake(other);
        }
      }
      are_over = are_over && updates_.is_over(stage, batch);
    });
    return are_over;
  }

  // Calls use(stage, batch).
  template <typename Use>
  void for_each_needed(int rank, Use use) const {
    for (const AwaitedUpdate& each : awaited_[rank]) {
      if (each.action == ranks_[rank].next) use(each.stage, updates_.begun(each.stage));
    }
    if (has_finished(rank)) return;
    const std::optional<int> batch = updates_.needed_by(action(rank));
    if (batch) use(action(rank).stage, *batch);
  }

  bool awaits_updates_at(int rank, int action) const {
    return std::ranges::find(awaited_[rank], action, &AwaitedUpdate::action) !=
           awaited_[rank].end();
  }

  // A rank that could tell, but need not here, does so before it posts more.
  AwaitedUpdates what_others_wait_for() const {
    AwaitedUpdates more(ranks_.size());
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (!ranks_[rank].waits_for_updates) continue;
      for_each_needed(rank, [&](int stage, int batch) {
        for (const int other : updates_.untold(stage, batch)) {
          const int teller = schedule_.placement[other];
          const AwaitedUpdate here = {.action = ranks_[teller].next, .stage = other};
          if (std::ranges::find(more[teller], here) == more[teller].end()) {
            more[teller].push_back(here);
          }
        }
      });
    }
    return more;
  }

  // Posts what the next action consumes; whether all of it is there.
  bool receive_all(int rank) {
    std::vector<int> messages;
    messages_.consumed_by(action(rank), [&](int message) { messages.push_back(message); });
    std::ranges::sort(messages, {}, [&](int message) { return launched_[message]; });
    bool is_there = true;
    for (const int message : messages) {
      const State before = states_[message];
      if (before == kSent) post_outstanding(rank, Moment::kBefore, message);
      if (messages.size() > 1 && before == kNotSent) is_one_of_several_[message] = true;
      if (messages.size() > 1 && before == kSent) post_early(message, Moment::kBefore);
      post(message);
      is_there = is_there && states_[message] == kReceived;
    }
    return is_there;
  }

  // Posts what the rank has been sent, in the order of sending, up to a message; kAll: all of it.
  // An action that sends several messages gives its device one after the other: the second can
  // wait, by way of a third rank, for whatever the receiver of the first one launches before it
  // takes that. So ranks post receives, among themselves and with their sends, in the order in
  // which the messages were launched.
  void post_outstanding(int rank, Moment moment, int until = kAll) {
    std::deque<int>& outstanding = outstanding_[rank];
    for (; !outstanding.empty() && outstanding.front() != until; outstanding.pop_front()) {
      const int message = outstanding.front();
      if (states_[message] == kReceived) continue;
      post_early(message, moment);
      post(message);
    }
  }

  // A post may wait for its message's header, and so for its sending: of several messages that are
  // consumed together the one that is sent first has to be posted first.
  void post_early(int message, Moment moment) {
    const Receive& receive = messages_[message];
    const int rank = schedule_.placement[receive.to];
    early_[rank].push_back({.action = ranks_[rank].next, .moment = moment, .receive = receive});
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
    post_outstanding(rank, action.kind == kUpdate ? Moment::kBefore : Moment::kWithSends);
    messages_.sent_by(action, [&](int message) {
      launched_[message] = num_launched_;
      if (states_[message] == kPosted) {
        post_outstanding(schedule_.placement[messages_[message].to], Moment::kBefore);
        if (is_one_of_several_[message]) post_early(message, Moment::kBefore);
        states_[message] = kReceived;
        wake(schedule_.placement[messages_[message].to]);
      } else {
        states_[message] = kSent;
        ranks_[rank].sends.push_back(message);
        sent_.push_back(message);
        if (messages_.come_together()) {
          outstanding_[schedule_.placement[messages_[message].to]].push_back(message);
        }
      }
    });
    const std::optional<int> share = share_of(action);
    if (share) updates_.begin_update(action);
    if (schedule_.num_pipelines == 2 && share) {
      const int other = schedule_.placement[*schedule_.twin(action.stage)];
      if (ranks_[other].waits_for_device && waits_for_copy(other)) {
        post_outstanding(other, Moment::kBefore);  // its part of the sum ends with this one
      }
      shares_[action.stage] = *share;
      wake(other);
    }
  }

  // The two copies of a stage add up their gradients in the update: the device is busy until the
  // other copy has come there too. Gives the batch.
  std::optional<int> share_of(const Action& action) const {
    if (action.kind != kUpdate) return std::nullopt;
    return batch_in_list(action.microbatch, schedule_.num_microbatches);
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
      // With the last action, unless the rank waits for updates after it.
      const bool is_at_end =
          has_finished(rank) && receiver.next > 0 && !awaits_updates_at(rank, receiver.next);
      // An update sends nothing, and the sum in it may last.
      const bool is_before = !is_at_end && (!receiver.waits_for_device || has_finished(rank) ||
                                            action(rank).kind == kUpdate);
      const Moment moment = is_before && receiver.waits_for_updates  ? Moment::kBeforeUpdates
                            : is_before                              ? Moment::kBefore
                            : launched_[message] < receiver.launched ? Moment::kWithSends
                                                                     : Moment::kAfterSends;
      early_[rank].push_back(
          {.action = receiver.next - (is_at_end ? 1 : 0), .moment = moment, .receive = receive});
      post(message);
    }
  }

  void check_finished() const {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      const bool is_at_end = has_finished(rank);
      PD2_CHECK(is_at_end && !ranks_[rank].waits_for_updates, "schedule ", schedule_.name,
                ": rank ", rank, " waits ",
                is_at_end ? "behind its last action" : "in " + to_string(action(rank)), " for ",
                ranks_[rank].waits_for_device ? "the gradients of the stage's copy, and that one "
                                                "for this rank"
                : ranks_[rank].waits_for_updates ? "an update of all its stages, and one of these "
                                                   "for this rank"
                                                 : "a message that is sent in a later batch's list",
                ": wherever receives are posted, waiting for the device could last for ever");
    }
  }

  const Schedule& schedule_;
  const Lists& lists_;
  const MessageTable messages_;
  std::vector<State> states_;  // by message
  std::vector<int> launched_;  // by message: when the action that sends it was
  int num_launched_ = 0;
  std::vector<bool> is_one_of_several_;  // that were posted by an action that consumes them
  std::vector<RankState> ranks_;
  std::vector<std::deque<int>> outstanding_;  // by receiving rank: sent, perhaps not received
  EarlyReceives early_;
  JointProgress updates_;
  const AwaitedUpdates& awaited_;
  std::vector<int> shares_;  // by stage: the last of its sums with its copy
  std::deque<int> awake_;
  std::vector<int> sent_;  // since the last time that no rank could go on
};

}  // namespace

ReceivePlan plan_receives(const Schedule& schedule, const std::vector<StageEdge>& edges,
                          const std::vector<JointUpdate>& joint) {
  check_form(schedule);
  for (const StageEdge& edge : edges) {
    PD2_CHECK(0 <= edge.from && edge.from < edge.to && edge.to < schedule.depth(),
              "edges: ", edge.from, " -> ", edge.to,
              ": an edge goes from a stage to a later one, of ", schedule.depth());
  }
  ReceivePlan plan;
  const auto early_receives = [&](const Lists& lists, ListKind kind, AwaitedUpdates& awaited) {
    awaited.resize(lists.size());
    const AwaitedUpdates& at_end = plan.awaited[static_cast<std::size_t>(ListKind::kSteady)];
    while (true) {
      JointProgress progress(schedule, joint);
      if (kind == ListKind::kSteady) progress.begin_steady(at_end);
      if (kind == ListKind::kEpilogue) progress.begin_epilogue(at_end);
      ListWalk walk(schedule, edges, lists, {std::move(progress), awaited});
      const AwaitedUpdates more = walk.run(kind);
      std::size_t num_more = 0;
      for (std::size_t rank = 0; rank < more.size(); ++rank) {
        awaited[rank].insert(awaited[rank].end(), more[rank].begin(), more[rank].end());
        num_more += more[rank].size();
      }
      if (num_more == 0) return walk.take_early();
    }
  };
  for (const ListKind list : {ListKind::kPrologue, ListKind::kSteady, ListKind::kEpilogue}) {
    Lists lists;
    for (const RankActions& rank : schedule.ranks) lists.push_back(actions(rank, list));
    const auto place = static_cast<std::size_t>(list);
    plan.lists[place] = early_receives(lists, list, plan.awaited[place]);
  }
  Lists lists(schedule.ranks.size());
  for (int stage = 0; stage < schedule.depth(); ++stage) {
    lists[schedule.placement[stage]].push_back({.stage = stage, .kind = kForward});
  }
  AwaitedUpdates none;
  plan.evaluation = early_receives(lists, ListKind::kPrologue, none);
  return plan;
}

}  // namespace pd2
