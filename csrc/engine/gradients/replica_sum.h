// The sum of a stage's gradients over its replicas.
#pragma once

#include "engine/gradients/exchange.h"
#include "engine/gradients/grad_accumulator.h"
#include "engine/gradients/gradient_buckets.h"
#include "engine/gradients/shares.h"
#include "engine/process_group.h"
#include "engine/streams.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

// The processes that hold a stage; without a group there is one.
struct Replicas {
  c10::intrusive_ptr<c10d::ProcessGroup> group{};
  // The group's ranks, in the order in which their gradients are added. Empty: the group's
  // all-reduce adds them, in an order of its own.
  std::vector<int> order{};
};

// Sums bucket by bucket (see GradientBuckets), so that all replicas begin them in one order.
//
// In the order of the replicas, a bucket is summed in parts of few bytes, each in two exchanges:
//
//   rank 0   a0 b0 c0                  s0           s0 s1 s2      s = a + b + c on all ranks,
//   rank 1   a1 b1 c1  -- to rank p -> s1 - to all  s0 s1 s2      from the first replica to the
//   rank 2   a2 b2 c2     piece p      s2           s0 s1 s2      last
//
// which move what a ring moves, 2 (w - 1) / w of the bytes to each replica and from it. What comes
// in the first is kept apart, in a few lanes that parts take turns in.
//
// Where ranks share the parameters out, a piece is what a rank steps of the part, and there is no
// second exchange but of what others need: flags, gradients that other stages add to, and those of
// parameters that are several ranks' where their norms are asked for. Instead all get the next
// version, by gather().
//
// With a hook nothing begins before the update, whose thread calls it: see call_hook().
//
// The stage's executor thread announces microbatches and ends batches; finish() may be called by
// the thread that makes the batch's update. All else is done by whichever of them may: a batch's
// exchanges begin when the batch before has none left to begin. Of a device's sums the executor's
// thread begins all, as GradientPath::exchanges_in_order() says why.
class ReplicaSum {
 public:
  using IsStopped = std::function<bool()>;
  // The sum of one batch: all replicas do the same things in the same order.
  struct Batch {
    std::size_t buffer = 0;
    std::size_t num_ready = 0, num_sent = 0, num_summed = 0;  // parts, from the first on
    std::vector<Exchange> works{};                            // by part, of its last exchange
    bool is_settled = false;                                  // nothing to wait for or to read
    std::atomic<bool> is_over = false;                        // nothing is left to begin
  };
  using UnderWay = std::shared_ptr<Batch>;
  // What replicas do in place of adding up: makes gradients the mean over all replicas of those
  // that it is given, in place, with collectives of its own. Gets the buckets that have parameters,
  // in their order, without flags; and the factor that takes the loss scale off them, none without
  // one. Returns false when stopped.
  using Hook =
      std::function<bool(const std::vector<at::Tensor>& buckets, std::optional<double> unscaling)>;

  // `gradients`: one for each dtype, with flags; they outlive this object. `stream`: of the sums.
  ReplicaSum(Replicas replicas, std::int64_t bucket_bytes,
             const std::vector<std::unique_ptr<GradAccumulator>>& gradients, MaybeStream stream);

  // Announces gradients of the batch's next microbatch, which will go to this buffer.
  void begin_microbatch(std::size_t buffer, bool is_last) {
    next_->buffer = buffer;
    buckets_.begin_microbatch(buffer, is_last);
  }
  void forget_microbatch() { buckets_.forget_microbatch(); }
  // Whether anything begins in a backward.
  bool begins_early() const { return buckets_.has_early(); }
  const std::vector<GradientBuckets::Bucket>& buckets() const { return buckets_.buckets(); }
  // All gradients of the batch are in this buffer: they may be summed. The sum of the batch before
  // is finished.
  UnderWay end_batch(std::size_t buffer);
  // Makes the sum, and waits for it, or lets the current stream wait; calls `then` with each bucket
  // that is there. Every replica calls it for a batch that has ended. Throws ChannelAborted when
  // stopped.
  using Then = std::function<void(const GradientBuckets::Bucket& bucket)>;
  void finish(
      Batch& batch, const IsStopped& is_stopped,
      const Then& then = [](const GradientBuckets::Bucket&) {});
  // While no batch has gradients. From then on call_hook() takes the place of finish().
  void set_hook(Hook hook);
  bool has_hook() const { return hook_ != nullptr; }
  // As finish(), but that the flags are added up at once, and gradients are the hook's to change.
  void call_hook(Batch& batch, std::optional<double> unscaling, const IsStopped& is_stopped);
  // As either, of a batch of which nobody reads the sums, and nobody steps; all that is left, if it
  // `is_finished`. With a hook it calls none: all replicas must know that the batch is discarded.
  void let_end(Batch& batch, const IsStopped& is_stopped, bool is_finished = false);
  // If a batch is complete but for end_batch(): waits for its sum, which all have then, after
  // which it may be moved. Every replica calls it. Throws ChannelAborted when stopped.
  void settle(const IsStopped& is_stopped);

  // From now on ranks share the parameters out, or not. Of some elements of a dtype all ranks need
  // the sums, or the one that has the first of them needs all. Every replica calls it, settled and
  // drained.
  struct Range {
    std::size_t dtype;
    std::int64_t begin, end;
    bool is_for_all;
  };
  void share(bool is_shared, const MayCut& may_cut, const std::vector<Range>& wanted);
  bool is_shared() const { return is_shared_; }
  const std::vector<Share>& shares() const { return shares_; }  // of all ranks
  int rank() const { return rank_; }
  // Every rank's shares of flat buffers, one for each dtype, on all ranks; waits as finish() does.
  // Every replica calls it: after finish() of a `batch` for which ranks share parameters out, or
  // settled and drained without one.
  void gather(Batch* batch, const std::vector<at::Tensor>& flats, const IsStopped& is_stopped);
  // Begins it for the buckets before this one, of which this rank's shares are there.
  void begin_gather(std::size_t bucket, const std::vector<at::Tensor>& flats);

  // Of the lanes.
  std::int64_t bytes() const;
  void drop_connections() { release_group(replicas_.group); }

 private:
  // Of a bucket; elements.
  struct Part {
    std::size_t bucket;
    std::int64_t begin, end;
    std::vector<std::int64_t> pieces;  // elements, by rank
  };
  void cut();
  bool is_ordered() const { return !replicas_.order.empty(); }
  MaybeStream here() const;  // the current one of the stream's device
  void make_ready(std::size_t bucket);
  // Whatever may begin now, without waiting: on a device all that is ready.
  void begin(Batch& batch);
  void fill(std::size_t buffer);
  // Begins what is next of the batch: parts are sent until all lanes are taken, then one is summed
  // before another one is sent. Returns false if it has to wait first; null: it must not.
  bool advance(Batch& batch, const IsStopped* is_stopped);
  bool await(const Exchange& exchange, const IsStopped* is_stopped) const;
  Exchange send(std::size_t part, std::size_t buffer) const;
  Exchange sum(std::size_t part, std::size_t buffer) const;

  // A bucket's gradients, without flags; may be empty.
  at::Tensor gradients(const GradientBuckets::Bucket& bucket, std::size_t buffer) const;
  at::Tensor flat(const Part& part, std::size_t buffer) const;
  std::vector<std::int64_t> pieces(const Part& part) const;
  // The bytes by which a bucket is cut, as what ranks get of it lies in a lane.
  std::int64_t bytes_in_lane(const Part& part) const;
  // Where this rank's pieces come, from every other rank.
  std::vector<at::Tensor> received(std::size_t part) const;
  // What others need of a part of which each rank has its own alone.
  Exchange give_wanted(const Part& part, const at::Tensor& all) const;
  // Each rank's share of a bucket, to all.
  Exchange give_shares(const GradientBuckets::Bucket& bucket, const at::Tensor& flat) const;

  Replicas replicas_;
  // The group's own timeout, of a device's transfers, never comes.
  void leave_waits_to_engine() const;

  const int rank_, size_;  // of the group
  const double timeout_;
  const std::vector<std::unique_ptr<GradAccumulator>>& gradients_;
  const MaybeStream stream_;
  const std::int64_t part_bytes_;
  GradientBuckets buckets_;
  std::vector<Share> shares_;
  bool is_shared_ = false;
  struct Wanted {
    std::size_t dtype;
    int from;
    std::optional<int> to;  // none: all ranks
    std::int64_t begin, end;
  };
  std::vector<Wanted> wanted_;
  std::vector<Part> parts_;
  std::vector<at::Tensor> lanes_;  // bytes
  UnderWay next_ = std::make_shared<Batch>();
  UnderWay before_;               // which has ended; null: none
  Exchange gathered_;             // by gather(), so far
  std::size_t num_gathered_ = 0;  // buckets
  Hook hook_;
};

}  // namespace pd2
