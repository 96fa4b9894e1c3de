// What a kind of device does for optimizers: passes over flat buffers, found by device type.
#pragma once

#include "engine/by_device_type.h"
#include "kernels/grid/launch.h"
#include "kernels/grid/step_table.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>
#include <vector>

namespace pd2 {

// One step over flat buffers of a device.
struct FlatStep {
  kernels::StepLaunch arrays;  // without the table
  void* gradient;              // arrays.g, which a pass may change
  double gradient_scale = 1;
  at::Tensor factor{};  // a number of the device to multiply by instead; undefined: none
  std::span<const kernels::StepOfRun> runs;
  c10::Device device;
};

struct DevicePasses {
  // Two halves of a step, in the current stream of the current device. upload() writes what differs
  // from step to step into `table`, memory of the device that the caller keeps; step() reads it
  // there, so that a recorded step() can be repeated after another upload().
  void (*upload)(const FlatStep& step, at::Tensor& table);
  void (*step)(const FlatStep& step, const at::Tensor& table);
  // Of dense float32, float64 or bfloat16 tensors, all of one dtype. `norm_type` is 1, 2 or
  // infinity. See tensor_norms.h. Null: torch's own will do.
  at::Tensor (*norms)(const std::vector<at::Tensor>& tensors, double norm_type);
};

// Shared out to threads. They are there by_device_type() from the beginning, CUDA's where they were
// built.
DevicePasses cpu_passes();

}  // namespace pd2
