// Work of a device that is recorded once and then given to it as a whole.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace pd2 {

// Used by one thread at a time. Addresses are those of the recording: what it read from elsewhere
// must stay where it was.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  virtual ~DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Once. From now on the calling thread's stream records what any thread gives it, and does
  // nothing; what is allocated for it comes from memory of the graph's own, which lasts as long as
  // the graph and the tensors there. `bytes`: about what that will be, which is made free before,
  // as nothing can be meanwhile. Throws if nothing can be recorded.
  virtual void begin(std::int64_t bytes) = 0;
  // Throws if something came that cannot be recorded.
  virtual void end() = 0;
  // Instead of end(): what was recorded is dropped.
  virtual void abandon() noexcept = 0;
  // Between begin() and end(): a generator for what is recorded of one draw. At a replay it draws
  // as a new one would with the seed and the offset that `seed`, two int64 of the device, then
  // holds.
  virtual at::Generator generator(const at::Tensor& seed) = 0;
  // Gives the calling thread's stream what was recorded.
  virtual void replay() = 0;
  // Of the memory of its own.
  virtual std::int64_t bytes() const = 0;
};

// How graphs are made for devices of a type; where there is nothing by_device_type(), the work of
// such devices cannot be recorded. `beside`: a graph whose tensors the new one may use and whose
// memory it shares; null: none.
using MakeDeviceGraph = std::unique_ptr<DeviceGraph> (*)(const DeviceGraph* beside);

}  // namespace pd2
