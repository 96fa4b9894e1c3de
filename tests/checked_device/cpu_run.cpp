#include "checked_device/cpu_run.h"

#include "checked_device/streams.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

namespace pd2 {
namespace {

constexpr std::size_t kMostRuns = 4096;  // of a tensor with holes; beyond, all between them counts

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  return made;
}

}  // namespace

void add_uses(std::vector<Use>& uses, const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return;
  struct Dimension {
    std::size_t size;
    std::size_t stride;
  };
  std::vector<Dimension> outer;
  for (std::int64_t at = 0; at < tensor.dim(); ++at) {
    if (tensor.size(at) == 1 || tensor.stride(at) == 0) continue;
    outer.push_back({static_cast<std::size_t>(tensor.size(at)),
                     static_cast<std::size_t>(tensor.stride(at)) * tensor.itemsize()});
  }
  std::sort(outer.begin(), outer.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  std::size_t bytes = tensor.itemsize();
  while (!outer.empty() && outer.front().stride <= bytes) {
    bytes += outer.front().stride * (outer.front().size - 1);
    outer.erase(outer.begin());
  }
  const auto begin = reinterpret_cast<Address>(tensor.const_data_ptr());
  std::size_t num_runs = 1;
  for (const auto& [size, stride] : outer) num_runs *= size;
  if (num_runs > kMostRuns) {
    for (const auto& [size, stride] : outer) bytes += stride * (size - 1);
    uses.push_back({begin, bytes, is_write});
    return;
  }
  for (std::size_t run = 0; run < num_runs; ++run) {
    Address at = begin;
    std::size_t rest = run;
    for (const auto& [size, stride] : outer) {
      at += rest % size * stride;
      rest /= size;
    }
    uses.push_back({at, bytes, is_write});
  }
}

void CpuRun::set_device(int device) {
  TORCH_CHECK(device_ < 0 || device_ == device,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              checked_device(device_), " and ", checked_device(device), "! (", name_, ")");
  device_ = device;
}

at::Tensor CpuRun::alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  set_device(index_of(tensor.device()));
  const auto& storage = tensor.storage();
  auto shared = std::find_if(storages_.begin(), storages_.end(), [&](const Shared& known) {
    return known.on_device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  if (shared == storages_.end()) {
    void* const data = const_cast<void*>(storage.data());
    c10::Storage on_cpu(c10::Storage::use_byte_size_t(), storage.nbytes(),
                        c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)),
                        c10::GetCPUAllocator(), /*resizable=*/true);
    shared = storages_.insert(storages_.end(), {storage, on_cpu, data});
  }
  auto made = tensor_on(shared->on_cpu, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor CpuRun::read(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_privateuseone()) add_uses(uses_, tensor, false);
  return alias(tensor);
}

at::Tensor CpuRun::write(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_privateuseone()) add_uses(uses_, tensor, true);
  return alias(tensor);
}

StreamNumber CpuRun::stream() const { return current_stream_number(device_); }

void CpuRun::launch() {
  if (device_ < 0) device_ = current_device();
  recording_ = GraphRecording::of(stream());
  if (recording_ != nullptr) {
    recording_->keep(uses_);
  } else {
    launched_ = Runtime::instance().launch(stream(), name_, uses_);
  }
}

void CpuRun::record(std::function<std::vector<at::Tensor>()> again,
                    const std::vector<at::Tensor>& made) {
  recording_->add(name_, uses_, std::move(again), made);
}

at::Tensor CpuRun::on_device(const at::Tensor& on_cpu) {
  if (!on_cpu.defined() || on_cpu.is_privateuseone()) return on_cpu;
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  const auto& storage = on_cpu.storage();
  const auto shared = std::find_if(storages_.begin(), storages_.end(), [&](const Shared& known) {
    return known.on_cpu.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  if (shared != storages_.end() && shared->data == storage.data()) {
    return tensor_on(shared->on_device, keys, on_cpu);
  }
  const c10::DeviceGuard guard(checked_device(device_));
  auto* const allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    allocator->allocate(storage.nbytes()), allocator, /*resizable=*/true);
  if (storage.nbytes() > 0) std::memcpy(made.mutable_data(), storage.data(), storage.nbytes());
  auto tensor = tensor_on(made, keys, on_cpu);
  if (launched_) {
    std::vector<Use> written;
    add_uses(written, tensor, true);
    Runtime::instance().add_writes(launched_, written);
  }
  storages_.push_back({made, storage, storage.data()});
  return tensor;
}

void CpuRun::take_shape(const at::Tensor& tensor, const at::Tensor& alias) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return;
  if (tensor.sizes() == alias.sizes() && tensor.strides() == alias.strides()) return;
  TORCH_CHECK(recording_ == nullptr, name_, ": a change of shape cannot be recorded");
  const auto made = on_device(alias);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(made.storage());
  impl->set_sizes_and_strides(made.sizes(), made.strides());
  impl->set_storage_offset(made.storage_offset());
}

void CpuRun::synchronize() const {
  GraphRecording::refuse(stream(), name_ + ", which shows the host numbers,");
  auto& runtime = Runtime::instance();
  runtime.join_host(runtime.clock_of(stream()), "the host waits for " + name_);
}

}  // namespace pd2
