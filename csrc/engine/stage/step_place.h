// The fused steps of a stage's optimizers, and their state.
#pragma once

#include "engine/gradients/shares.h"
#include "engine/stage/gradient_path.h"
#include "engine/stage/masters.h"
#include "engine/stage/slots.h"
#include "engine/weights/fused_optimizer.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
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

// A step reads and writes masters, or without them the newest weights, and its state, which is
// where these are. Used as the stage is.
class StepPlace {
 public:
  StepPlace(const StageLayout& layout, const Slots& slots, GradientPath& gradients,
            Masters& masters)
      : layout_(layout),
        slots_(slots),
        gradients_(gradients),
        host_(gradients.host()),
        masters_(masters) {}

  // From now on each replica has masters and state of its share of the parameters alone, and steps
  // no others (`shares`), or of all. A parameter that `may_cut` names may be several replicas'; so
  // that one of them can give the norm of its gradient, that one gets all of it (`norms`). Every
  // replica calls it after Stage::arrange(), before set_optimizers(). Without replicas it changes
  // nothing. Throws ChannelAborted when stopped.
  void share(bool shares, const std::vector<bool>& may_cut, bool norms,
             const std::function<bool()>& is_stopped);

  // A parameter is in at most one of them.
  void set_optimizers(const std::vector<OptimizerGroups>& optimizers);
  bool has_optimizers() const { return stepped_.size() == layout_.num_parameters(); }
  bool is_fused(std::size_t parameter) const { return stepped_.at(parameter).by != nullptr; }
  // Steps the fused optimizers' parameters from one slot to another; their gradients are multiplied
  // by `factor` first, if that is defined. Of the others the weights are copied, for the caller to
  // step.
  void step(int from, int to, std::span<const GroupOptions> groups, const at::Tensor& factor);
  // Instead of it: one slot gets another one's weights.
  void repeat(int from, int to);

  // State of one parameter of a fused optimizer, as a view of the flat state; undefined if there
  // is none. One of several replicas that step it has its elements alone, as a vector. Throws
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
  PaddedBytes state_bytes() const;

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
  void add_fused(const OptimizerGroups& groups, const Share& run);
  void step_fused(const Fused& fused, const at::Tensor& from, const at::Tensor& to,
                  std::span<const GroupOptions> groups, const at::Tensor& factor);
  // Whether the fused optimizers step all of this replica's parameters.
  bool steps_all() const;
  at::Tensor view_of_state(const at::Tensor& flat, std::size_t parameter) const;
  void fill_state(const at::Tensor& state, std::size_t parameter, const at::Tensor& value) const;

  const StageLayout& layout_;
  const Slots& slots_;
  GradientPath& gradients_;
  HostMirror* const host_;  // null: they are not mirrored
  Masters& masters_;
  std::vector<Fused> fused_;      // in the order of the runs' buckets
  std::vector<Stepped> stepped_;  // by parameter
};

}  // namespace pd2
