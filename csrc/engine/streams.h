// Streams of a device, and fences between them. The CPU has neither: its work is done when the call
// returns, and everything here does nothing for it.
#pragma once

#include "engine/by_device_type.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <optional>

namespace pd2 {

using MaybeStream = std::optional<c10::Stream>;  // none: the CPU's

inline bool has_streams(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

// The stream to which the calling thread now gives work for the device.
inline MaybeStream stream_here(c10::Device device) {
  if (!has_streams(device)) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Whose work a device begins first. Another stage, or another process, waits for a message: its
// transfer comes before this stage's own work, and what nobody waits for soon after that.
enum class Urgency { kBackground, kStage, kMessage };

// How streams of a type of device are made that has more priorities than two, which torch knows for
// all. See by_device_type().
using MakeStream = c10::Stream (*)(c10::Device device, Urgency urgency);

// A stream of the library's own.
inline MaybeStream own_stream(c10::Device device, Urgency urgency = Urgency::kBackground) {
  if (!has_streams(device)) {
    return std::nullopt;
  }
  if (const MakeStream* const make = by_device_type<MakeStream>().find(device.type())) {
    return (*make)(device, urgency);
  }
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, urgency == Urgency::kMessage);
}

// One recording of a device's work at a time in a process: what torch's allocator and the device's
// libraries keep for it is shared. Meanwhile that allocator can give no memory back, and says so by
// an error: whoever asks it to has this lock.
inline std::mutex& recording_mutex() {
  static std::mutex one;
  return one;
}

// The work that a stream had been given at some time. Copies are the same fence.
class Fence {
 public:
  Fence() = default;  // no work

  // What the stream has been given until now. `is_timed`: elapsed_since() may be asked.
  static Fence of(const MaybeStream& stream, bool is_timed = false) {
    Fence fence;
    if (stream) {
      fence.event_ = std::make_shared<c10::Event>(
          stream->device_type(),
          is_timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
      fence.event_->record(*stream);
    }
    return fence;
  }
  static Fence here(c10::Device device) { return of(stream_here(device)); }

  // The stream does this work before all that it is given from now on. The caller does not wait.
  void hold_back(const MaybeStream& stream) const {
    if (event_ && stream) {
      event_->block(*stream);
    } else if (event_) {
      event_->synchronize();  // for the CPU
    }
  }
  // The calling thread waits until the work is done.
  void wait() const {
    if (event_) {
      event_->synchronize();
    }
  }
  bool is_done() const { return !event_ || event_->query(); }
  // In seconds; both are timed and done.
  double elapsed_since(const Fence& start) const {
    return start.event_->elapsedTime(*event_) / 1e3;
  }
  bool is_of_device() const { return event_ != nullptr; }
  c10::Device device() const { return event_->device(); }  // of one

 private:
  std::shared_ptr<c10::Event> event_;
};

// The tensor is used by work of this stream, and was allocated for another one: once it is freed,
// its memory serves again when that work is done.
inline void use_on(const at::Tensor& tensor, const MaybeStream& stream) {
  if (stream && tensor.defined() && tensor.has_storage() && tensor.device() == stream->device()) {
    c10::impl::VirtualGuardImpl(stream->device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), *stream);
  }
}

// While it lives, the calling thread gives its work to the stream, and to the stream's device.
using OnStream = c10::OptionalStreamGuard;

// Where the stages of one rank work that are on one device. Nothing waits on `compute` but for what
// it needs: what else a stage does has streams of its own.
struct StageStreams {
  explicit StageStreams(c10::Device device)
      : compute(own_stream(device, Urgency::kStage)),
        device(compute ? compute->device() : device),
        update(own_stream(device)),
        inputs(own_stream(device)),
        copies(own_stream(device)),
        losses(own_stream(device)) {}

  // The calling thread's stream does all that these were given until now first.
  void join_here() const {
    if (compute) {
      const MaybeStream here = stream_here(device);
      for (const MaybeStream& each : {compute, update}) {
        Fence::of(each).hold_back(here);
      }
    }
  }

  // Until the device has done what forwards, backwards and updates are.
  void wait() const {
    for (const MaybeStream& each : {compute, update}) {
      Fence::of(each).wait();
    }
  }

  const MaybeStream compute;  // forwards, backwards, sums of gradients
  const c10::Device device;   // with its index
  const MaybeStream update;   // norms and optimizer steps
  const MaybeStream inputs;   // copies of what the caller gives, to the device
  const MaybeStream copies;   // copies of versions for checkpoints, to the host
  const MaybeStream losses;   // copies of losses, to the host
};

}  // namespace pd2
