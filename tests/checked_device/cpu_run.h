// A CPU kernel on the device's memory.

#pragma once

#include "checked_device/graph.h"
#include "checked_device/runtime.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

// One launch: first name what it reads and writes, then launch(), then run the kernel on the
// aliases, and give what it returns to on_device(). The runtime's lock is not held meanwhile: a
// kernel may need Python's.
class CpuRun {
 public:
  explicit CpuRun(std::string name) : name_(std::move(name)) {}

  // CPU tensors on the same memory; what is not on the device is returned as it is.
  at::Tensor alias(const at::Tensor& tensor);
  at::Tensor read(const at::Tensor& tensor);
  at::Tensor write(const at::Tensor& tensor);

  // Of a launch without tensors.
  void set_device(int device);
  int device() const { return device_; }
  StreamNumber stream() const;

  void launch();
  // The tensor's own device tensor if it is a view of an alias, otherwise a new one.
  at::Tensor on_device(const at::Tensor& on_cpu);
  // After a kernel has changed an alias's shape.
  void take_shape(const at::Tensor& tensor, const at::Tensor& alias);
  // The host knows what the kernel has found.
  void synchronize() const;

  // Of a launch whose stream's work is recorded: what the kernel did, run again on the aliases, and
  // what on_device() gave for its results.
  bool is_recorded() const { return recording_ != nullptr; }
  void record(std::function<std::vector<at::Tensor>()> again, const std::vector<at::Tensor>& made);

 private:
  struct Shared {
    c10::Storage on_device;
    c10::Storage on_cpu;
    const void* data;
  };

  std::string name_;
  int device_ = -1;
  std::vector<Shared> storages_;
  std::vector<Use> uses_;
  LaunchPtr launched_;  // null: it is recorded
  GraphRecording* recording_ = nullptr;
};

// The bytes that a tensor's elements lie on.
void add_uses(std::vector<Use>& uses, const at::Tensor& tensor, bool is_write);

}  // namespace pd2
