// What a stage's steps change of its parameters, and which of several replicas has it.
#pragma once

#include "engine/gradients/shares.h"
#include "engine/stage/gradient_path.h"
#include "engine/stage/slots.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace pd2 {

// Masters, or without them the newest weights. They are one of
//
//   whole     on the stage's device
//   shared    on the devices of the stage's replicas, each of which has some elements
//   mirrored  in the host's memory, and all weights too (see HostMirror)
//
// Used as the stage is.
class Masters {
 public:
  // Room for masters, without values.
  Masters(const StageLayout& layout, const Slots& slots, GradientPath& gradients);

  // By buffer: float32, int16 remainders, or undefined. Of a replica's shares alone.
  const std::vector<at::Tensor>& flats() const { return flats_; }
  // The tensor that a step changes: the master, or without one the weight in that slot, which is
  // the newest one's. A split master is given as a copy, joined from its remainder and that
  // version. Of elements that another replica has, their roundings.
  at::Tensor of(int slot, std::size_t parameter) const;
  // Sets the newest weight and its master.
  void set(std::size_t parameter, const at::Tensor& value);
  // Sets the newest weight alone: it is none of a master's rounding.
  void set_weight(std::size_t parameter, const at::Tensor& value);
  // Whether a parameter has a master that is no tensor of the stage's device, or not of all
  // replicas.
  bool hides(std::size_t parameter) const;
  // The masters of all parameters that hide them, by parameter, others undefined: as copies, where
  // replicas share them out; then every replica calls it, drained.
  std::vector<at::Tensor> hidden(const std::function<bool()>& is_stopped);

  // See StepPlace::share(). There are replicas, and they share or shall.
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
  // Whether it steps all elements.
  bool is_whole(std::size_t parameter) const {
    return elements(parameter).numel == layout_.view(parameter).numel;
  }
  // Of a tensor that lies in memory as the parameter does: this replica's elements.
  at::Tensor mine(std::size_t parameter, const at::Tensor& whole) const;
  // This replica's shares of a buffer.
  std::vector<Share> shares_of(std::size_t buffer) const;
  // What is kept of elements of masters, which are all here; undefined: there are none.
  at::Tensor range(std::size_t buffer, std::int64_t begin, std::int64_t numel) const;

 private:
  bool is_split(std::size_t parameter) const;
  // As range(); undefined, too, if another replica has it. As a vector, if others have some of it.
  at::Tensor kept(std::size_t parameter) const;
  // The weight that is rounded from the master.
  at::Tensor newest(int slot, std::size_t parameter) const;
  at::Tensor whole_buffer(std::size_t buffer) const;  // zeros where another replica has masters

  const StageLayout& layout_;
  const Slots& slots_;
  GradientPath& gradients_;
  HostMirror* const host_;  // null: they are not mirrored
  std::vector<at::Tensor> flats_;
  struct Owned {
    bool is_mine = false;
    Elements mine{};
    std::vector<Elements> by{};
  };
  std::vector<Owned> owned_;  // by parameter; empty: replicas step all
};

}  // namespace pd2
