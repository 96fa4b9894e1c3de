// The random numbers of a forward that is recorded as a graph.
#pragma once

#include "engine/run/device_graph.h"
#include "engine/run/keyed_random.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pd2 {

// A graph draws the same calls' numbers in the same order at each replay; only the microbatch's key
// differs. So the places of its draws are kept, and each replay finds its seeds in the device's
// memory.
class RecordedDraws {
 public:
  // Before `graph`, which outlives the recording, begins. `count`: of the draws, as in the forwards
  // that were executed as usual; `key`: of the microbatch that is recorded.
  RecordedDraws(DeviceGraph& graph, c10::Device device, std::int64_t count, std::uint64_t key);

  // While it lives, this thread's draws by key are these. One that a replay could not repeat by
  // another key raises ValueError.
  class Scope {
   public:
    explicit Scope(RecordedDraws& draws) { set_recorded_draws(&draws); }
    ~Scope() { set_recorded_draws(nullptr); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // The generator of the next draw, which is at this place.
  at::Generator next(const RandomPlace& place);
  // The recorded code has read its place, as torch.utils.checkpoint does: to set it later.
  void give_place_away() { has_given_place_ = true; }
  // After the forward. Throws ValueError if replays would draw other numbers than the code.
  void check() const;

  // Gives the calling thread's stream the seeds of a microbatch, for the replay that comes next.
  void seed(std::uint64_t key) const;

 private:
  DeviceGraph& graph_;
  const std::uint64_t key_;
  const at::Tensor seeds_;  // [draws, 2], on the device: see DeviceGraph::generator()
  std::vector<RandomPlace> places_;
  bool has_given_place_ = false;
};

}  // namespace pd2
