// When each rank posts its receives, where a transfer keeps a device busy.
//
// On such a device (NCCL) a posted receive is a kernel that spins until its message comes, and a
// send spins until its receive is posted. Whatever waits for the whole device (the user's
// synchronize(), a kernel's first use, memory that is given back) waits for them. A receive that is
// posted too early then waits for a message that needs what this rank has not launched yet; one
// that is posted too late keeps its sender waiting for ever.
//
// A plan is safe just if ranks come through that wait for their device after every action, and
// before a batch that all of them have finished: what they really wait for is part of that. 2bw,
// d = 2, m = 3, where each rank sends to the other one:
//
//   rank 0 | F0 F1 B0 F2 B1 | F0'B-1 ...   rank 1's gradients of 0, 1 and 2 in F1, F2 and B1
//   rank 1 | F0 B0 F1 B1 F2 B2 | F0' ...   rank 0's values of 1 and 2 in B0 and B1
//
// Posted in B0, B1 and the next batch, the gradients keep rank 1 waiting after its B0 while rank 0
// waits after its F1; posted two ahead, rank 0 waits after its F0 for what it has not begun.
//
// A device has fewer queues than streams, and what is behind a transfer in its queue waits for it.
// So a plan is safe, too, if a device has one queue, and does what it is given in that order.
//
// So by default a receive is posted in the action that consumes its message. When no rank can go on
// (each waits for its device, or for a message), every send that has been launched gets its receive
// posted where the receiver is. Nothing waits for such a post: its message is under way.
//
// Memory for a message may take a wait for the device, and comes first for what an action sends,
// before any of it begins. A receive is posted with an action's sends if its message was launched
// before the action was, so that it does not depend on it; else after them, when the message, and
// so its size, may depend on them. Ranks that wait there, for their sends, wait for ranks whose
// actions were launched earlier: in no circle.
//
// Where actions send several messages (skip connections), one of them is behind the other in the
// device's queue, and a rank's receives are posted in the order in which their messages were
// launched: ahead of what the rank launches later.
//
// Updates may wait for other stages (for a norm, a scale, tied gradients), though these do not wait
// for the messages of the update's rank: `joint`. Such an update reads numbers from its device, in
// a thread of its own, and there it may wait for whatever this has to do: a receive that has been
// posted for the next batch, whose sender waits for the same norm before it goes on. So a rank
// waits, before it posts an action's own receives, for the update whose version a forward reads,
// and for the one before an update (an update begins when the one before is over). A rank that
// others wait for earlier than that must have told its part before it posts anything that depends
// on them: it waits for the update in a further place, that of `awaited`. For 2bw that is the end
// of a list in which the last stage has come to the next update: nothing is posted between there
// and the forward that reads the version.
//
// The sums of gradients over stages' copies, whose kernels spin as well, must be launched in the
// update alone.

#pragma once

#include "core/schedule/joint_progress.h"
#include "core/schedule/messages.h"
#include "core/schedule/unroll.h"

#include <array>
#include <cstdint>
#include <vector>

namespace pd2 {

// In an action: before it waits for updates, before its own receives are posted, with its sends, or
// after them.
enum class Moment : std::uint8_t { kBeforeUpdates, kBefore, kWithSends, kAfterSends };

// A receive that is posted before the action that consumes its message.
struct EarlyReceive {
  // In the list that is being run; after its last one: {their number, kBeforeUpdates or kBefore}.
  // The action itself may be skipped, as one of a microbatch before the run's first; a receive of
  // such a microbatch is skipped, and no other.
  int action = 0;
  Moment moment = Moment::kBefore;
  Receive receive;

  bool operator==(const EarlyReceive&) const = default;
};

// By rank, in the order in which they are posted.
using EarlyReceives = std::vector<std::vector<EarlyReceive>>;

// The receives that are posted early, all others being posted, together, when the action begins
// that consumes their messages. Every list has its own, of the messages that are sent while it is
// run: whatever is sent in a batch's list is received before the next batch needs to be begun.
struct ReceivePlan {
  std::array<EarlyReceives, 3> lists;  // by ListKind
  // Of one microbatch's way through the (first) pipeline, a rank's stages in their order: `action`
  // counts these.
  EarlyReceives evaluation;
  // By ListKind: the updates that ranks wait for besides.
  std::array<AwaitedUpdates, 3> awaited;

  const std::vector<EarlyReceive>& of(int rank, ListKind list) const {
    return lists[static_cast<std::size_t>(list)].at(rank);
  }
};

// Plans for a schedule that passes validate(), in which the model's stages have these edges
// (between stages of one rank nothing is received). Throws ValueError if there is no safe plan: if
// a rank waits in a batch's list for what another one does in the next batch's, or if it comes to
// no update of `joint` stages before it needs what depends on that. These pass
// check_joint_updates().
ReceivePlan plan_receives(const Schedule& schedule, const std::vector<StageEdge>& edges,
                          const std::vector<JointUpdate>& joint = {});

}  // namespace pd2
