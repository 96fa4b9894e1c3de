// What a stage's optimizers step: where it is, which replica has it, and the fused steps.
#pragma once

#include "engine/gradients/shares.h"
#include "engine/stage/gradient_path.h"
#include "engine/stage/slots.h"
#include "engine/weights/fused_optimizer.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace pd2 {

// By parameter: its group in the list given to step(); -1: this optimizer does not step it.
struct OptimizerGroups {
  OptimizerKind kind;
  std::vector<int> of_parameter;
};

// A step reads and writes masters, or without them the newest weights, and its state. These are one
// of
//
//   whole     on the stage's device
//   shared    on the devices of the stage's replicas, each of which has some elements
//   mirrored  in the host's memory, and all weights too (see HostMirror)
//
// Used as the stage is.
class StepPlace {
 public:
  // Room for masters, without values.
  StepPlace(const StageLayout& layout, const Slots& slots, GradientPath& gradients);

  // Flat masters by buffer: float32, int16 remainders, or undefined. Of a replica's shares alone.
  const std::vector<at::Tensor>& masters() const { return masters_; }
  // The tensor that a step changes: the master, or without one the weight in that slot, which is
  // the newest one's. A split master is given as a copy, joined from its remainder and that
  // version. Of elements that another replica has, their roundings.
  at::Tensor master(int slot, std::size_t parameter) const;
  // Sets the newest weight and its master.
  void set_master(std::size_t parameter, const at::Tensor& value);
  // Whether it has a master that is no tensor of the stage's device, or not of all replicas.
  bool hides_master(std::size_t parameter) const;
  // The masters of all parameters that hide them, by parameter, others undefined: as copies, where
  // replicas share them out; then every replica calls it, drained.
  std::vector<at::Tensor> hidden_masters(const std::function<bool()>& is_stopped);
  // Rounds the weights of `slot` again, after the masters were changed.
  void round_masters(int slot);

  // From now on each replica has masters and state of its share of the parameters alone, and steps
  // no others (`shares`), or of all. A parameter that `may_cut` names may be several replicas'; so
  // that one of them can give the norm of its gradient, that one gets all of it (`norms`). Every
  // replica calls it after Stage::arrange(), before set_optimizers(). Without replicas it changes
  // nothing. Throws ChannelAborted when stopped.
  void share(bool shares, const std::vector<bool>& may_cut, bool norms,
             const std::function<bool()>& is_stopped);
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
    return owned_.empty() || owned_.at(parameter).by.front().rank == gradients_.replicas()->rank();
  }

  // A parameter is in at most one of them.
  // `keeps_bfloat16`: what their feedback keeps is rounded to it, if it is not float64.
  void set_optimizers(const std::vector<OptimizerGroups>& optimizers, bool keeps_bfloat16 = false);
  bool has_optimizers() const { return stepped_.size() == layout_.num_parameters(); }
  bool is_fused(std::size_t parameter) const { return stepped_.at(parameter).by != nullptr; }
  // Steps the fused optimizers' parameters from one slot to another; their gradients are multiplied
  // by `factor` first, if that is defined. Of the others the weights are copied, for the caller to
  // step.
  void step(int from, int to, std::span<const GroupOptions> groups, const at::Tensor& factor);
  // Instead of it: one slot gets another one's weights.
  void repeat(int from, int to);

  // State of one parameter of a fused optimizer, as a view of the flat state; undefined if there
  // is none. One of several replicas that step it has its elements() alone, as a vector. Throws
  // ValueError if none steps it, as all that follow do.
  at::Tensor state(std::string_view name, std::size_t parameter) const;
  std::int64_t step_count(std::size_t parameter) const;
  // `value`: as state() gives it, or of the whole parameter.
  void set_state(std::string_view name, std::size_t parameter, const at::Tensor& value);
  void set_step_count(std::size_t parameter, std::int64_t count);
  // The step of one parameter that feedback keeps, as a view; undefined if there is none.
  at::Tensor kept_step(std::size_t parameter) const;
  // Undefined: there is none.
  void set_kept_step(std::size_t parameter, const at::Tensor& value);
  std::int64_t state_bytes() const;
  std::int64_t state_padding_bytes() const;

 private:
  // A fused optimizer's part of a run of neighbours that it steps at once.
  struct Fused {
    Share run;
    std::vector<std::size_t> members;  // positions in its buffer's packing
    std::unique_ptr<FusedOptimizer> optimizer;
    at::Tensor master;  // of the run; undefined: none
  };
  // Where a parameter is among the fused optimizers.
  struct Stepped {
    FusedOptimizer* by = nullptr;
    std::size_t index = 0;
  };
  const Stepped& stepped(std::size_t parameter) const;
  // All that this replica steps.
  std::vector<Share> runs() const;
  void add_fused(const OptimizerGroups& groups, const Share& run, bool keeps_bfloat16);
  void step_fused(const Fused& fused, const at::Tensor& from, const at::Tensor& to,
                  std::span<const GroupOptions> groups, const at::Tensor& factor);
  // Whether the fused optimizers step all of this replica's parameters.
  bool steps_all() const;
  at::Tensor view_of_state(const at::Tensor& flat, std::size_t parameter) const;
  void fill_state(const at::Tensor& state, std::size_t parameter, const at::Tensor& value) const;

  bool is_split(std::size_t parameter) const;
  bool is_whole(std::size_t parameter) const {
    return elements(parameter).numel == layout_.view(parameter).numel;
  }
  // This replica's, of a dtype.
  std::vector<Share> shares_of(std::size_t buffer) const;
  // What is kept of elements of masters, which are all here; undefined: there are none.
  at::Tensor range_of_masters(std::size_t buffer, std::int64_t begin, std::int64_t numel) const;
  // The same of a parameter; undefined, too, if another replica has it. As a vector, if others have
  // some of it.
  at::Tensor kept_master(std::size_t parameter) const;
  // The weight that is rounded from the master.
  at::Tensor newest(int slot, std::size_t parameter) const;
  // Of a tensor that lies in memory as the parameter does: this replica's elements.
  at::Tensor mine(std::size_t parameter, const at::Tensor& whole) const;
  at::Tensor whole_buffer(std::size_t buffer) const;  // zeros where another replica has masters

  const StageLayout& layout_;
  const Slots& slots_;
  GradientPath& gradients_;
  HostMirror* const host_;  // null: they are not mirrored
  std::vector<at::Tensor> masters_;
  struct Owned {
    bool is_mine = false;
    Elements mine{};
    std::vector<Elements> by{};
  };
  std::vector<Owned> owned_;      // by parameter; empty: replicas step all
  std::vector<Fused> fused_;      // in the order of the runs' buckets
  std::vector<Stepped> stepped_;  // by parameter
};

}  // namespace pd2
