// Graphs of the checked device: what a stream is given is kept, and done again at the same
// addresses.
#pragma once

#include "checked_device/accesses.h"
#include "checked_device/clock.h"
#include "engine/run/device_graph.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace pd2 {

// What is given to a stream whose work is recorded. Operators run at once meanwhile, as shapes of
// later ones may depend on them; at the end all memory is as if they had not.
class GraphRecording {
 public:
  virtual ~GraphRecording() = default;

  // Of the stream; null if its work is not recorded.
  static GraphRecording* of(StreamNumber stream);
  // Throws if the stream's work, or the calling thread's, is recorded: CUDA records no such thing.
  static void refuse(StreamNumber stream, const std::string& what);
  static void refuse_here(const std::string& what);

  // The number of the stream's recording, to which an event that is recorded there now belongs; 0:
  // its work is not recorded. Throws, and keeps the error, in another thread than the recording's:
  // what waits for that event would become part of the recording, and CUDA then refuses to end it.
  static std::uint64_t of_event(StreamNumber stream);
  // Throws if the event belongs to a recording, of that number, and `stream` does not, which is to
  // wait for it; none: the host.
  static void refuse_wait(std::uint64_t number, std::optional<StreamNumber> stream);

  // Before a kernel runs. It may also write to what it says it reads, as batch_norm does.
  virtual void keep(const std::vector<Use>& uses) = 0;
  // After it: `again` runs it on the same memory; `made` are the tensors that got its results.
  virtual void add(std::string name, std::vector<Use> uses,
                   std::function<std::vector<at::Tensor>()> again,
                   const std::vector<at::Tensor>& made) = 0;
};

extern const MakeDeviceGraph kCheckedGraphs;

}  // namespace pd2
