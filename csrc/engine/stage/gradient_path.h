// The way of a stage's gradients, from autograd's hooks to the step.
#pragma once

#include "engine/gradients/copy_sum.h"
#include "engine/gradients/grad_accumulator.h"
#include "engine/gradients/replica_sum.h"
#include "engine/gradients/tied_sum.h"
#include "engine/stage/host_mirror.h"
#include "engine/stage/slots.h"
#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace pd2 {

// Who else has gradients of the same batch for a stage: nobody, the replicas that hold it, or its
// copy in this process.
using OthersOfStage = std::variant<std::monostate, Replicas, CopySumEnd>;

struct GradientPathOptions {
  OthersOfStage others{};
  std::int64_t bucket_bytes = 0;  // of gradients that leave together
  bool to_host = false;           // the step is made there: see HostMirror
};

// Microbatches' gradients are added up in a buffer, then with those of the stage's others, then
// with those of other stages that hold the same parameters; they may end in the host's memory:
//
//   hooks -> GradAccumulator -> ReplicaSum, its hook, or CopySum -> HostMirror -> TiedSum -> step
//
// Used by the stage's executor thread. What belongs to the update that has begun may be called by
// the thread that makes it, until the update ends. All is given to the calling thread's stream.
class GradientPath {
 public:
  using IsStopped = std::function<bool()>;

  // Gradients lie in the buffers of `slots` where these can take turns, else in one of their own.
  GradientPath(const StageLayout& layout, const Slots& slots, const StageStreams& streams,
               GradientPathOptions options);

  void attach(std::size_t parameter, const at::Tensor& slot_parameter);
  // Other stages hold these parameters, too: all their gradients are added up. `copy` is the
  // stage's number among those of `sum`. Before the first batch.
  void tie(std::shared_ptr<TiedSum> sum, std::size_t copy, std::vector<std::size_t> parameters);
  bool is_tied() const { return !ties_.empty(); }
  // Null: there are none.
  ReplicaSum* replicas() const {
    const auto* sum = std::get_if<std::unique_ptr<ReplicaSum>>(&others_);
    return sum ? sum->get() : nullptr;
  }
  bool is_shared() const { return replicas() && replicas()->is_shared(); }
  // Null: the step is made where the stage is.
  HostMirror* host() const { return host_.get(); }

  const GradAccumulator& of_dtype(std::size_t dtype) const { return *gradients_[dtype]; }

  // Gradients of a batch, or of any of its microbatches, are about to come to the buffer.
  void begin_batch(std::size_t buffer);
  void begin_microbatch(std::size_t buffer, bool is_last);
  // By dtype: see GradAccumulator.
  using State = std::vector<std::pair<const void*, std::vector<bool>>>;
  State state() const;
  // As if a device had come to this state by itself: whatever else hooks have been given in this
  // microbatch is forgotten. Not where they begin something with it.
  void set_state(const State& state);
  // Whether the hooks of a batch's last backward begin to add up gradients, or to copy them.
  bool begins_early() const {
    return (replicas() && replicas()->begins_early()) || (host_ && host_->fetches_early());
  }
  void hold(std::vector<HeldGradient>* where);  // see GradAccumulator

  bool has_hook() const { return replicas() && replicas()->has_hook(); }
  // While drained: uses `count` buffers, and moves what is there from one to another.
  void move(std::size_t count, std::size_t from, std::size_t to);
  // Shares parameters out, or not: see ReplicaSum. Some may be cut; of these the replica with the
  // first elements gets all gradients, if it gives their `norms`.
  void share(bool shares, const std::vector<bool>& may_cut, bool norms);
  // Whether gradients leave their buffer before an update that waits for other stages does.
  bool frees_buffer() const { return host_ && !std::holds_alternative<CopySumEnd>(others_); }

  // The gradients of a batch are complete, in this buffer: begins its update.
  void begin_update(std::size_t buffer);
  // Instead of it: the batch is discarded. Replicas that may not know yet get what they wait for,
  // from a buffer; none: all know.
  void begin_nothing(std::optional<std::size_t> buffer);

  // The following belong to the update that has begun.

  // Makes the gradients the sums over replicas, which have begun, or over copies, which this
  // begins; waits for them, once. Throws ChannelAborted when stopped. `unscaling`: takes a loss
  // scale off what a hook is given, and so off all gradients.
  void reduce(const IsStopped& is_stopped, std::optional<double> unscaling = std::nullopt);
  // After that: adds the gradients of the other stages that hold a parameter; waits for them.
  void sum_ties(std::int64_t batch, const IsStopped& is_stopped);
  // Instead of both: waits for the sums that have begun, whose results nobody reads.
  void let_sums_end(const IsStopped& is_stopped);
  // Whether exchange_shares() is for the thread that gives the device its backwards: an exchange
  // keeps a device busy until the other replicas begin theirs, and a thread that waits for its
  // device keeps others from beginning anything. So all of them begin exchanges between the same
  // actions.
  bool exchanges_in_order() const { return is_shared() && has_streams(device_); }
  // After the step: replicas that share the parameters out give each other what they have stepped,
  // as far as they do not since, and wait for it.
  void exchange_shares(const std::vector<at::Tensor>& stepped, const IsStopped& is_stopped);
  // Before the version is published, or dropped.
  void end_update();

  at::Tensor gradient(std::size_t parameter) const;
  bool has_gradient(std::size_t parameter) const;
  // What a step reads: flat, and by its parameters whether there are any.
  const at::Tensor& flat(std::size_t dtype) const;
  const std::vector<bool>& has_gradients(std::size_t dtype) const;

  // Releases the connections to replicas and other stages, which ends their waiting for this one.
  void drop_connections();

 private:
  // Whether gradients are added up with those of replicas or of the stage's copy.
  bool is_summed() const { return !std::holds_alternative<std::monostate>(others_); }
  void sum_copies(const CopySumEnd& copies, const IsStopped& is_stopped);

  const StageLayout& layout_;
  const c10::Device device_;
  std::vector<std::unique_ptr<GradAccumulator>> gradients_;  // by dtype
  std::variant<std::monostate, std::unique_ptr<ReplicaSum>, CopySumEnd> others_;
  std::unique_ptr<HostMirror> host_;
  struct Tie {
    std::shared_ptr<TiedSum> sum;
    std::size_t copy;
    std::vector<std::size_t> parameters;
  };
  std::vector<Tie> ties_;
  struct Update {
    std::size_t buffer = 0;
    ReplicaSum::UnderWay sum = nullptr;  // null: none, or all has been exchanged
    bool is_reduced = false;
  };
  Update update_;
};

}  // namespace pd2
