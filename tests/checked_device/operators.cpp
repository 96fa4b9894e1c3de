// Operators that the device must have of its own: memory, views, copies, and what torch cuts in
// other ways for a device than for the CPU.
#include "checked_device/allocator.h"
#include "checked_device/cpu_run.h"
#include "checked_device/generator.h"
#include "checked_device/streams.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace pd2 {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// As the kernels of a device run: nothing that they call is seen from outside.
struct InKernel {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::DisableRecordFunctionGuard no_host_access;
};

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "checked: strided alone");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(checked_device(index_of(c10::device_or_default(device))));
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                     std::optional<c10::Device> device, std::optional<bool> pinned) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(checked_device(index_of(c10::device_or_default(device))));
  return at::detail::empty_strided_generic(size, stride,
                                           c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& self, SymIntArrayRef size,
                     std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

Tensor& set_storage_at(Tensor& self, at::Storage source, SymInt offset, SymIntArrayRef size,
                       SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_empty(Tensor& self) {
  at::Storage none(at::Storage::use_byte_size_t(), 0,
                   c10::GetAllocator(c10::DeviceType::PrivateUse1), true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {});
}

// Runs a kernel, and once more whenever it is recorded and replayed.
template <typename Kernel>
std::vector<Tensor> run_kernel(CpuRun& run, Kernel kernel) {
  std::vector<Tensor> results = [&] {
    const InKernel in_kernel;
    return kernel();
  }();
  for (Tensor& result : results) result = run.on_device(result);
  if (run.is_recorded()) run.record(kernel, results);
  return results;
}

// A stream of the source's device copies; it and the other device's stream wait for each other.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto& runtime = Runtime::instance();
  const auto source = current_stream_number(index_of(from.device()));
  const auto destination = current_stream_number(index_of(to.device()));
  GraphRecording::refuse(source, "a copy between devices");
  GraphRecording::refuse(destination, "a copy between devices");
  runtime.join(source, runtime.clock_of(destination));
  CpuRun reading("aten::_copy_from");
  CpuRun writing("aten::_copy_from");
  std::vector<Use> uses;
  add_uses(uses, from, false);
  add_uses(uses, to, true);
  runtime.launch(source, "copy between devices", uses);
  {
    const InKernel in_kernel;
    writing.alias(to).copy_(reading.alias(from));
  }
  runtime.join(destination, runtime.clock_of(source));
}

// Pinned memory is read or written when the stream comes to it. Other host memory goes through a
// buffer: it is read at once, and the host waits for what is written.
void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor& on_device = from.is_privateuseone() ? from : to;
  const Tensor& on_host = from.is_privateuseone() ? to : from;
  TORCH_CHECK(on_host.is_cpu(), "copy: from ", from.device(), " to ", to.device());
  const bool pinned = is_pinned(on_host.storage().data());
  const bool to_host = from.is_privateuseone();
  std::vector<Use> uses;
  add_uses(uses, on_device, !to_host);
  if (pinned) add_uses(uses, on_host, to_host);
  auto& runtime = Runtime::instance();
  const auto stream = current_stream_number(index_of(on_device.device()));
  GraphRecording::refuse(stream, "a copy between host and device");
  runtime.launch(stream, to_host ? "copy to the host" : "copy from the host", uses);
  const bool is_late = pinned && on_host.is_non_overlapping_and_dense() && on_host.nbytes() > 0;
  const std::span memory(static_cast<std::byte*>(on_host.data_ptr()),
                         is_late ? on_host.nbytes() : 0);
  if (is_late) runtime.hand_over(memory);
  {
    const InKernel in_kernel;
    CpuRun run("aten::_copy_from");
    const Tensor alias = run.alias(on_device);
    if (to_host) {
      Tensor(on_host).copy_(alias);
    } else {
      alias.copy_(on_host);
    }
  }
  if (is_late && to_host) runtime.hold_back(stream, memory);
  if (is_late && !to_host) runtime.watch(stream, memory);
  if (!non_blocking || (to_host && !pinned)) {
    runtime.join_host(runtime.clock_of(stream), "the host waits for a copy");
  }
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self.is_privateuseone() && to.is_privateuseone()) {
    if (self.device() != to.device()) {
      copy_between_devices(self, to);
    } else {
      CpuRun run("aten::copy_");
      const auto from = run.read(self);
      const auto target = run.write(to);
      run.launch();
      run_kernel(run, [=] {
        target.copy_(from);
        return std::vector<Tensor>();
      });
    }
  } else {
    copy_with_host(self, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes());
  return copy_from(self, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  CpuRun run("aten::_local_scalar_dense");
  const auto alias = run.read(self);
  run.launch();
  run.synchronize();
  const InKernel in_kernel;
  return alias.item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
      .recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   bool transposed, SymIntArrayRef output_padding, SymInt groups) {
  CpuRun run("aten::convolution");
  const auto x = run.read(input);
  const auto w = run.read(weight);
  const Tensor b = bias ? run.read(*bias) : Tensor();
  run.launch();
  return run_kernel(run,
                    [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                     output_padding = output_padding.vec()] {
                      return std::vector<Tensor>{at::convolution_symint(
                          x, w, b, stride, padding, dilation, transposed, output_padding, groups)};
                    })
      .front();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, SymIntArrayRef stride,
                                                        SymIntArrayRef padding,
                                                        SymIntArrayRef dilation, bool transposed,
                                                        SymIntArrayRef output_padding,
                                                        SymInt groups, std::array<bool, 3> mask) {
  CpuRun run("aten::convolution_backward");
  const auto g = run.read(gradient);
  const auto x = run.read(input);
  const auto w = run.read(weight);
  run.launch();
  const auto num_outputs = transposed ? w.size(1) * groups : SymInt(w.size(0));
  const std::array<SymInt, 1> bias_sizes = {num_outputs};
  const auto made =
      run_kernel(run, [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                       output_padding = output_padding.vec()] {
        const auto [gx, gw, gb] = at::convolution_backward_symint(
            g, x, w, mask[2] ? at::OptionalSymIntArrayRef(bias_sizes) : std::nullopt, stride,
            padding, dilation, transposed, output_padding, groups, mask);
        return std::vector<Tensor>{gx, gw, gb};
      });
  return {made[0], made[1], made[2]};
}

// The CPU's dropout multiplies by a scaled mask; to draw and round alike, so does this one, and the
// second result is that mask.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  CpuRun run("aten::native_dropout");
  const auto x = run.read(input);
  const Drawing drawing(default_generator(run.device()), run);
  run.launch();
  drawing.check(run);
  const auto made = run_kernel(run, [=] {
    Tensor drawn = at::empty_like(x);
    if (train.value_or(true) && p < 1) {
      drawn.bernoulli_(1 - p, drawing.generator()).div_(1 - p);
    } else {
      drawn.fill_(train.value_or(true) ? 0 : 1);
    }
    return std::vector<Tensor>{x * drawn, drawn};
  });
  return {made[0], made[1]};
}

Tensor native_dropout_backward(const Tensor& gradient, const Tensor& noise, double) {
  return gradient * noise;
}

std::int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&,
                              const std::optional<Tensor>&, double, bool, std::optional<double>,
                              bool) {
  return 0;  // sdp::SDPBackend::math
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_", set_empty);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
}

}  // namespace pd2
