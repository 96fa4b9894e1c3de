// Where a stage's parameters lie in flat buffers, and the versions of its weights there.
#pragma once

#include "engine/weights/flat_buffer.h"
#include "engine/weights/weight_store.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace pd2 {

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

// Parameters of one dtype, of which masters are of one dtype too, lie in one flat buffer. Versions,
// masters, gradients and the host's copies are lists of such buffers, in one order.
class StageLayout {
 public:
  struct Buffer {
    FlatPacking packing;                   // of the weights
    std::vector<std::string> names;        // of its parameters, by their place
    at::ScalarType gradients;              // their dtype
    std::optional<at::ScalarType> master;  // what is kept of masters: int16 remainders if split
  };
  struct Place {
    std::size_t buffer = 0;
    std::size_t index = 0;  // in that buffer's packing
  };

  StageLayout(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
              const StagePrecision& precision);

  const std::vector<Buffer>& buffers() const { return buffers_; }
  const FlatPacking& packing(std::size_t buffer) const { return buffers_[buffer].packing; }
  std::size_t num_parameters() const { return places_.size(); }
  // Parameters of a buffer are in the order of their numbers.
  const Place& place(std::size_t parameter) const { return places_.at(parameter); }
  const ParameterView& view(std::size_t parameter) const {
    return packing(place(parameter).buffer).views()[place(parameter).index];
  }
  // The parameter's part of such a list of buffers.
  at::Tensor view(const std::vector<at::Tensor>& flats, std::size_t parameter) const {
    const Place& place = this->place(parameter);
    return packing(place.buffer).view(flats[place.buffer], place.index);
  }

 private:
  std::vector<Buffer> buffers_;
  std::vector<Place> places_;  // by parameter
};

// Flat buffers for K versions. With several versions, and gradients of the weights' dtype, there is
// one more, which gradients need: then all K + 1 can take turns (see WeightStore).
class Slots {
 public:
  // Copies the values of `parameters` to version 0. `has_flags`: gradients have a flag each.
  Slots(const StageLayout& layout, const std::vector<at::Tensor>& parameters, int num_versions,
        bool has_flags);

  WeightStore& versions() { return versions_; }
  const WeightStore& versions() const { return versions_; }
  int num_versions() const { return num_versions_; }
  // Slots that may hold weights.
  int num_slots() const { return static_cast<int>(flats_.size()); }
  // Whether an update need not be done before the next forward, which reads another version than
  // the one it makes.
  bool has_slack() const { return num_versions_ > 1; }
  // Whether all buffers can take turns, and whether they do.
  bool can_rotate() const { return num_slots() > num_versions_; }
  bool rotates() const { return versions_.num_slots() > num_versions_; }

  at::Tensor weight(int slot, std::size_t parameter) const {
    return layout_.view(flats_.at(slot), parameter);
  }
  // Whole buffers of a slot, those of gradients where these are.
  const std::vector<at::Tensor>& flat(int slot) const { return flats_.at(slot); }
  int newest() const { return versions_.slot(versions_.newest()); }

  // Whether the buffers take turns from now on, if they can. The newest version stays alone; its
  // weights are yet to be moved if that is in another slot now.
  void arrange(bool rotates) {
    versions_ = WeightStore(rotates ? num_slots() : num_versions_, versions_.newest());
  }

 private:
  const StageLayout& layout_;
  const int num_versions_;
  std::vector<std::vector<at::Tensor>> flats_;  // [slot][buffer]
  WeightStore versions_;
};

}  // namespace pd2
