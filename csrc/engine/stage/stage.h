// The trainable state of one stage: weight slots, gradients, optimizer state.
#pragma once

#include "engine/gradients/copy_sum.h"
#include "engine/gradients/grad_accumulator.h"
#include "engine/gradients/replica_sum.h"
#include "engine/gradients/tied_sum.h"
#include "engine/stage/host_mirror.h"
#include "engine/streams.h"
#include "engine/weights/flat_buffer.h"
#include "engine/weights/fused_optimizer.h"
#include "engine/weights/weight_store.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pd2 {

// Bytes that belong to parameters; padding to 64-byte boundaries apart.
struct StageBytes {
  std::int64_t weights = 0;
  std::int64_t masters = 0;
  std::int64_t gradients = 0;
  std::int64_t kept_gradients = 0;  // to be added together: the most at once
  std::int64_t optimizer_state = 0;
  std::int64_t padding = 0;
  std::int64_t replica_sums = 0;  // what replicas receive of each other's gradients
  std::int64_t host_copies = 0;   // of weights and gradients, where the optimizer works on the host
  std::int64_t on_host = 0;       // of all these, then
};

// By parameter: its group in the list given to step(); -1: this optimizer does not step it.
struct OptimizerGroups {
  OptimizerKind kind;
  std::vector<int> of_parameter;
};

// How a stage computes with its parameters.
struct StagePrecision {
  // By parameter. If it differs from the parameter's own dtype, float32, then the parameter is the
  // master: kept once, stepped in place, and every version is a rounding of it. Empty: their own.
  std::vector<at::ScalarType> dtypes{};
  // Masters of bfloat16 weights are kept as what rounding took off the newest version.
  bool split = false;
  // Gradients of bfloat16 weights with masters are added up in it. None: in float32.
  std::optional<at::ScalarType> gradients{};
};

// Owns the flat weight buffers of K versions, one flat gradient buffer and the fused optimizers'
// state per dtype. With several versions, and gradients of the weights' dtype, all K + 1 buffers
// take turns (see WeightStore): the step writes W(t + 1) over the gradients of batch t, line by
// line as it reads them, and may go on while the next batch's gradients are added up elsewhere.
//
// `steps_on_host`: the newest weights, what is stepped and the state are in the host's memory, too
// or instead (see HostMirror), and only fused optimizers can step. On the CPU it is a copy there.
//
// What has to do with gradients is given to the calling thread's stream: `compute` of the stage's,
// or `update` between begin_update() and publish().
//
// Used by the stage's executor thread; by other threads only while that executor is drained. The
// calls of an update between begin_update() and publish() may come from another thread, as is said
// there.
class Stage {
 public:
  // Copies the values of `parameters` (trainable, on the device of `streams`; null: the CPU).
  // Gradients are summed once per batch: over the `replicas` that hold the
  // stage, in buckets of so many bytes, or with the stage's copy in this process.
  Stage(const std::vector<at::Tensor>& parameters, std::vector<std::string> names, int num_versions,
        Replicas replicas, std::int64_t bucket_bytes, CopySumEnd copies = {},
        const StagePrecision& precision = {}, std::shared_ptr<const StageStreams> streams = nullptr,
        bool steps_on_host = false);
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  // Where the stage works.
  const StageStreams& streams() const { return *streams_; }
  bool on_host() const { return !streams_->compute; }
  std::size_t num_parameters() const { return places_.size(); }
  int num_versions() const { return num_versions_; }
  // Slots that may hold weights.
  int num_slots() const { return static_cast<int>(slots_.size()); }
  at::Tensor weight(int slot, std::size_t parameter) const;
  // Whole buffers of a slot, one per dtype.
  const std::vector<at::Tensor>& slot_buffers(int slot) const { return slots_.at(slot); }

  // The tensor that a step changes: the master, or without one the weight in that slot, which is
  // the newest one's. A split master is given as a copy, joined from its remainder and that
  // version. Where the optimizer works on the host, masters are there.
  at::Tensor master(int slot, std::size_t parameter) const;
  bool has_split_master(std::size_t parameter) const;
  // Whether it has a master that is no tensor of the stage's device, or not of all replicas.
  bool hides_master(std::size_t parameter) const;
  // Whole buffers of the masters (or remainders), one for each dtype that has them; empty where
  // replicas share them out.
  std::vector<at::Tensor> master_buffers() const;
  // Rounds the weights of `slot` again, after the masters were changed.
  void round_masters(int slot);
  // Sets the newest weight and its master.
  void set_master(std::size_t parameter, const at::Tensor& value);
  // The newest weights are shown to the user, who may write to them until the next update.
  void show() {
    if (host_) {
      host_->show();
    }
  }

  // `slot_parameter` is the leaf tensor over weight(slot, parameter) that the stage's module uses.
  void attach(std::size_t parameter, const at::Tensor& slot_parameter);

  WeightStore& versions() { return versions_; }
  const WeightStore& versions() const { return versions_; }

  // Other stages hold these parameters, too: all their gradients are added up. `copy` is the
  // stage's number among those of `sum`. Before the first batch.
  void tie(std::shared_ptr<TiedSum> sum, std::size_t copy, std::vector<std::size_t> parameters);
  bool is_tied() const { return !ties_.empty(); }

  // Announces the first gradients of the batch.
  void begin_batch(std::int64_t batch);
  // Announces the gradients of any of its microbatches, the first one's too.
  void begin_microbatch(std::int64_t batch, bool is_last);
  // The version whose update, or that which was not made instead, must have ended before gradients
  // of the batch come: it used their buffer.
  std::int64_t version_before_gradients(std::int64_t batch) const;
  // By dtype: see GradAccumulator.
  using GradientState = std::vector<std::pair<const void*, std::vector<bool>>>;
  GradientState gradient_state() const;
  // As if a device had come to this state by itself: whatever else hooks have been given in this
  // microbatch is forgotten. Not where they begin something with it.
  void set_gradient_state(const GradientState& state);
  // Whether the hooks of a batch's last backward begin to add up gradients, or to copy them.
  bool begins_early() const {
    return (replicas_ && replicas_->begins_early()) || (host_ && host_->fetches_early());
  }
  bool has_replicas() const { return replicas_ != nullptr; }
  // Replicas then call it instead of adding up their gradients. While no batch has gradients; there
  // must be replicas, and an optimizer that does not work on the host.
  void set_hook(ReplicaSum::Hook hook);
  bool has_hook() const { return replicas_ && replicas_->has_hook(); }
  // Where a parameter's gradient is in a bucket; elements.
  struct BucketPlace {
    std::size_t parameter;
    std::int64_t offset, numel;
  };
  // By bucket that a hook is given.
  std::vector<std::vector<BucketPlace>> hooked_buckets() const;
  // See GradAccumulator.
  void hold_gradients(std::vector<HeldGradient>* where);

  // Whether an update need not be done before the next forward, which reads another version than
  // the one it makes.
  bool has_slack() const { return num_versions_ > 1; }
  // Whether all buffers take turns.
  bool rotates() const { return versions_.num_slots() > num_versions_; }
  // Whether the next batch's gradients may be added up while an update is under way.
  bool overlaps() const { return rotates() || has_two_gradients_ || host_; }
  bool steps_on_host() const { return host_ != nullptr; }
  // Whether gradients leave their buffer before an update that waits for other stages does.
  bool frees_gradients() const { return host_ && !copies_.sum; }
  // Waits for some time at most until the next batch's gradients may be given to `compute`, if this
  // stage overlaps; returns whether they may.
  bool wait_for_gradients_buffer(std::chrono::milliseconds at_most) {
    return !host_ || rotates() || host_->wait_until_released(at_most, streams_->compute);
  }
  // Chooses how the buffers are used, as far as versions and dtypes leave a choice. The pipeline
  // must be drained. `reads_first`: the step reads a gradient before it writes the weight there.
  // `waits`: updates wait for other stages, so that the next batch's gradients need a buffer more
  // where the buffers cannot take turns. Those of a tied stage always do. Gradients that wait for
  // their step are summed before they are moved; throws ChannelAborted when stopped meanwhile.
  void arrange(
      bool reads_first, bool waits, const std::function<bool()>& is_stopped = [] { return false; });

  // From now on each replica has masters and state of its share of the parameters alone, and steps
  // no others (`shares`), or of all. A parameter that `may_cut` names may be several replicas'; so
  // that one of them can give the norm of its gradient, that one gets all of it (`norms`). Every
  // replica calls it after arrange(), before set_optimizers(). Without replicas it changes nothing.
  // Throws ChannelAborted when stopped.
  void share(bool shares, const std::vector<bool>& may_cut, bool norms,
             const std::function<bool()>& is_stopped);
  bool is_shared() const { return replicas_ && replicas_->is_shared(); }
  // Waits for the sum of a complete batch, if there is one: the replicas' group is free then. Every
  // replica calls it, drained.
  void settle(const std::function<bool()>& is_stopped) {
    if (replicas_) {
      replicas_->settle(is_stopped);
    }
  }
  // What replicas step of a parameter, by their rank in the group: of its elements, in the order of
  // the memory. Of one that nobody shares all is this replica's.
  struct Elements {
    int rank = 0;
    std::int64_t begin = 0, numel = 0;
  };
  std::vector<Elements> owners(std::size_t parameter) const;
  Elements elements(std::size_t parameter) const;  // this replica's
  // Whether this replica steps the parameter, or elements of it.
  bool owns(std::size_t parameter) const { return owned_.empty() || owned_.at(parameter).is_mine; }
  // Whether it is the first that does, which speaks for all that do.
  bool leads(std::size_t parameter) const {
    return owned_.empty() || owned_.at(parameter).by.front().rank == replicas_->rank();
  }
  // The masters of all parameters that hide them, by parameter, others undefined: as copies, where
  // replicas share them out; then every replica calls it, drained.
  std::vector<at::Tensor> whole_masters(const std::function<bool()>& is_stopped);

  // Batches have not been, whose gradients may lie where an older version was: the delay begins
  // anew, at the newest one.
  void take_back() {
    versions_.reset();
    if (host_) {
      host_->forget();
    }
  }

  // Begins the update with the batch's gradients, which are complete.
  void begin_update(std::int64_t batch);
  // Instead of it: the batch is discarded. Replicas that may not know yet get what they wait for.
  void begin_nothing(std::int64_t batch, bool replicas_know);

  // The following belong to the update that has begun; until publish() any thread may call them.

  at::Tensor gradient(std::size_t parameter) const;
  bool has_gradient(std::size_t parameter) const;
  void scale_gradients(double factor);
  void scale_gradients(const at::Tensor& factor);  // one number, on the host or the stage's device
  // The same, if nobody but the step reads them after that: where it can, the step does it.
  void scale_gradients_in_step(const at::Tensor& factor);
  // Makes the gradients the sums over replicas, which have begun, or over copies, which this
  // begins; waits for them, once. Throws ChannelAborted when stopped. `unscaling`: takes a loss
  // scale off what a hook is given, and so off all gradients.
  void reduce(const std::function<bool()>& is_stopped,
              std::optional<double> unscaling = std::nullopt);
  // After that: adds the gradients of the other stages that hold a parameter; waits for them.
  void sum_ties(std::int64_t batch, const std::function<bool()>& is_stopped);
  // Releases the connections to replicas and other stages, which ends their waiting for this one.
  void drop_connections();

  // Begins W(t+1) in the slot that is returned: steps the fused optimizers' parameters and copies
  // the others, which the caller steps.
  int write_next(std::span<const GroupOptions> groups);
  // Instead of write_next(): W(t+1) is W(t), nothing is stepped.
  void repeat_newest();

  // Whether exchange_shares() is for the thread that gives the device its backwards: an exchange
  // keeps a device busy until the other replicas begin theirs, and a thread that waits for its
  // device keeps others from beginning anything. So all of them begin exchanges between the same
  // actions.
  bool exchanges_in_order() const { return is_shared() && !on_host(); }
  // After the step, or let_sums_end(): replicas that share the parameters out give each other what
  // they have stepped, as far as they do not since write_next(), and wait for it.
  void exchange_shares(const std::function<bool()>& is_stopped);

  // Instead of reduce() and all that follows it: waits for the sums that have begun, whose results
  // nobody reads.
  void let_sums_end(const std::function<bool()>& is_stopped);

  // Ends the update: its version can be read.
  void publish() { versions_.publish(); }
  // Ends the update: no version was made.
  void drop() { versions_.drop_next(); }
  // Before either, in the thread that made the update.
  void end_update() {
    if (host_) {
      host_->end_update();
    }
  }

  // The versions `oldest` .. `newest` are about to be written to their slots, and `newest` to the
  // masters, while the pipeline is drained. Throws ValueError if there are not so many slots.
  void load_versions(std::int64_t oldest, std::int64_t newest);

  // A parameter is in at most one of them.
  // `keeps_bfloat16`: what their feedback keeps is rounded to it, if it is not float64.
  void set_optimizers(const std::vector<OptimizerGroups>& optimizers, bool keeps_bfloat16 = false);
  // State of one parameter of a fused optimizer, as a view of the flat state; undefined if there
  // is none. One of several replicas that step it has its elements() alone, as a vector.
  at::Tensor optimizer_state(std::string_view name, std::size_t parameter) const;
  std::int64_t step_count(std::size_t parameter) const;
  // `value`: as optimizer_state() gives it, or of the whole parameter.
  void set_optimizer_state(std::string_view name, std::size_t parameter, const at::Tensor& value);
  void set_step_count(std::size_t parameter, std::int64_t count);
  bool is_fused(std::size_t parameter) const { return stepped_.at(parameter).by != nullptr; }
  // The step of one parameter that feedback keeps, as a view; undefined if there is none.
  at::Tensor kept_step(std::size_t parameter) const;
  // Undefined: there is none.
  void set_kept_step(std::size_t parameter, const at::Tensor& value);

  // After weights were loaded into the newest slot: the delay restarts.
  void restart_delay();

  StageBytes bytes() const;

 private:
  struct Place {
    std::size_t buffer;  // which dtype's (or pair of dtypes', with a master)
    std::size_t index;   // position in that buffer's packing
  };
  // Where an update reads and writes: weight slots, and a gradient buffer.
  struct Update {
    int from = 0, to = 0;
    std::size_t gradients = 0;
    ReplicaSum::UnderWay sum = nullptr;  // null: none, or all has been exchanged
    at::Tensor factor{};                 // by which the step multiplies; undefined: 1
    bool is_reduced = false;
    bool is_stepped = true;  // false: let_sums_end() took the place of that
  };
  std::size_t gradient_buffer(std::int64_t batch) const;
  // Whether the gradients are added up with those of replicas or of the stage's copy.
  bool is_summed() const { return replicas_ || copies_.sum; }
  // A fused optimizer's part of one dtype's parameters.
  struct Fused {
    std::size_t buffer;
    std::vector<std::size_t> members;  // positions in that buffer's packing
    std::unique_ptr<FusedOptimizer> optimizer;
    std::size_t bucket;         // of the host's, or of replicas' gradients
    std::int64_t begin, numel;  // of the flat buffers; not the host's
    at::Tensor master{};        // of these elements; undefined: none
    // Of each member what `all` says of it.
    std::vector<bool> of_members(const std::vector<bool>& all) const;
  };
  // Where a parameter is among the fused optimizers.
  struct Stepped {
    FusedOptimizer* by = nullptr;
    std::size_t index = 0;
  };
  // Throws ValueError if none steps it.
  const Stepped& stepped(std::size_t parameter) const;
  at::Tensor view_of_state(const at::Tensor& flat, std::size_t parameter) const;
  void fill_state(const at::Tensor& state, std::size_t parameter, const at::Tensor& value) const;
  // The parameters of one dtype, of this replica's share or of a bucket of the host's that the
  // optimizer steps.
  void add_fused(const OptimizerGroups& groups, const HostMirror::Bucket& range, std::size_t bucket,
                 bool keeps_bfloat16);
  // Whether the fused optimizers step all of this replica's parameters, so that none is left to
  // the caller.
  bool steps_all() const;
  // This replica's, of a dtype.
  std::vector<Share> shares_of(std::size_t buffer) const;
  // What is kept of elements of masters, which are all here; undefined: there are none.
  at::Tensor range_of_masters(std::size_t buffer, std::int64_t begin, std::int64_t numel) const;
  // The same of a parameter; undefined, too, if another replica has it. As a vector, if others have
  // some of it.
  at::Tensor kept_master(std::size_t parameter) const;
  bool is_whole(std::size_t parameter) const {
    return elements(parameter).numel == view_of(parameter).numel;
  }
  const ParameterView& view_of(std::size_t parameter) const {
    return packings_[places_.at(parameter).buffer]->views()[places_[parameter].index];
  }
  // Of a tensor that lies in memory as the parameter does: this replica's elements.
  at::Tensor mine(std::size_t parameter, const at::Tensor& whole) const;
  at::Tensor whole_buffer(std::size_t buffer) const;  // zeros where another replica has masters
  void step_on_host(std::span<const GroupOptions> groups);

  const std::shared_ptr<const StageStreams> streams_;
  const int num_versions_;
  bool reads_first_ = true;
  bool has_two_gradients_ = false;  // after the slots, or instead of slots of another dtype
  std::vector<std::unique_ptr<FlatPacking>> packings_;  // by dtype
  std::vector<Place> places_;                           // by parameter
  struct Owned {
    bool is_mine = false;
    Elements mine{};
    std::vector<Elements> by{};
  };
  std::vector<Owned> owned_;                    // the same; empty: replicas step all
  std::vector<std::vector<at::Tensor>> slots_;  // [slot][dtype]
  std::vector<at::Tensor> masters_;             // by dtype: float32, int16 remainders, or undefined
  std::vector<std::unique_ptr<GradAccumulator>> gradients_;
  std::unique_ptr<HostMirror> host_;  // null: the optimizer works where the stage does
  std::vector<Fused> optimizers_;
  std::vector<Stepped> stepped_;  // by parameter
  WeightStore versions_;
  Update update_;
  std::unique_ptr<ReplicaSum> replicas_;  // if there are any
  CopySumEnd copies_;
  struct Tie {
    std::shared_ptr<TiedSum> sum;
    std::size_t copy;
    std::vector<std::size_t> parameters;
  };
  std::vector<Tie> ties_;
};

}  // namespace pd2
