// Every operator that has no kernel of its own: the CPU's, on the device's memory.
#include "checked_device/cpu_run.h"
#include "checked_device/generator.h"
#include "checked_device/streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace pd2 {
namespace {

using c10::IValue;

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), run_(schema_.name()) {
    const auto arguments = torch::jit::last(stack, schema_.arguments().size());
    originals_.assign(arguments.begin(), arguments.end());
  }

  void make() {
    for (std::size_t at = 0; at < originals_.size(); ++at) aliases_.push_back(on_cpu(at));
    for (std::size_t at = 0; at < originals_.size(); ++at) find_generator(at);
    run_.launch();
    set_generator();
    torch::jit::drop(stack_, originals_.size());
    for (const auto& alias : aliases_) stack_.push_back(alias);
    {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      const at::DisableRecordFunctionGuard no_host_access;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    if (shows_the_host_numbers()) run_.synchronize();
    take_shapes();
    const auto returned = torch::jit::pop(stack_, schema_.returns().size());
    for (std::size_t at = 0; at < returned.size(); ++at) {
      stack_.push_back(on_device(schema_.returns()[at], returned[at]));
    }
    if (run_.is_recorded()) record(torch::jit::last(stack_, returned.size()));
  }

 private:
  enum class UseKind { read, write, none };

  static std::vector<at::Tensor> tensors_of(c10::ArrayRef<IValue> values) {
    std::vector<at::Tensor> tensors;
    for (const IValue& value : values) {
      if (value.isTensor()) tensors.push_back(value.toTensor());
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
      }
    }
    return tensors;
  }

  void record(c10::ArrayRef<IValue> made) {
    run_.record(
        [op = op_, aliases = aliases_, drawing = drawing_, at = generator_at_]() mutable {
          if (drawing) aliases[at] = drawing->generator();
          torch::jit::Stack stack(aliases.begin(), aliases.end());
          op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
          return tensors_of(stack);
        },
        tensors_of(made));
  }

  UseKind use_of(std::size_t at) const {
    static const std::set<std::string> kOnlyShapes = {"aten::is_same_size"};
    const auto* const alias = schema_.arguments()[at].alias_info();
    if (alias != nullptr) return alias->isWrite() ? UseKind::write : UseKind::none;
    return kOnlyShapes.contains(schema_.name()) ? UseKind::none : UseKind::read;
  }

  at::Tensor tensor_on_cpu(const at::Tensor& tensor, UseKind kind, bool may_be_on_host) {
    if (!tensor.defined()) return tensor;
    TORCH_CHECK(tensor.is_privateuseone() || may_be_on_host || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                "checked and ", tensor.device(), "! (", schema_.name(), ")");
    switch (kind) {
      case UseKind::read:
        return run_.read(tensor);
      case UseKind::write:
        return run_.write(tensor);
      case UseKind::none:
        break;
    }
    return run_.alias(tensor);
  }

  IValue on_cpu(std::size_t at) {
    const IValue& value = originals_[at];
    const auto kind = use_of(at);
    if (value.isTensor()) return tensor_on_cpu(value.toTensor(), kind, false);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(tensor_on_cpu(tensor, kind, true));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {  // indices, which may be on the host
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(tensor_on_cpu(*tensor, kind, true)) : tensor);
        if (tensor && tensor->defined()) {
          by_mask_ |= tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
        }
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      run_.set_device(index_of(value.toDevice()));
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  // Of the device, where none is given: not the CPU's default one.
  void find_generator(std::size_t at) {
    const auto type = schema_.arguments()[at].type();
    const bool is_optional = type->kind() == c10::TypeKind::OptionalType &&
                             type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
                                 c10::TypeKind::GeneratorType;
    if (!is_optional && type->kind() != c10::TypeKind::GeneratorType) return;
    generator_at_ = at;
    drawing_.emplace(
        originals_[at].isNone() ? default_generator(run_.device()) : originals_[at].toGenerator(),
        run_);
  }

  void set_generator() {
    if (!drawing_) return;
    drawing_->check(run_);
    aliases_[generator_at_] = drawing_->generator();
  }

  bool shows_the_host_numbers() const {
    TORCH_CHECK(drawing_ || !op_.hasTag(at::Tag::nondeterministic_seeded) ||
                    schema_.name() == "aten::_fused_sdp_choice",
                schema_.name(), ": draws random numbers, but not from a generator");
    if (schema_.name() == "aten::index") return by_mask_;
    return op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
  }

  void take_shapes() {
    for (std::size_t at = 0; at < originals_.size(); ++at) {
      if (use_of(at) != UseKind::write) continue;
      if (originals_[at].isTensor()) {
        run_.take_shape(originals_[at].toTensor(), aliases_[at].toTensor());
      } else if (originals_[at].isTensorList()) {
        const auto tensors = originals_[at].toTensorVector();
        const auto aliases = aliases_[at].toTensorVector();
        for (std::size_t i = 0; i < tensors.size(); ++i) run_.take_shape(tensors[i], aliases[i]);
      }
    }
  }

  IValue on_device(const c10::Argument& returned, const IValue& value) {
    const auto* const alias = returned.alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (std::size_t at = 0; at < originals_.size(); ++at) {
        const auto* const argument = schema_.arguments()[at].alias_info();
        if (argument != nullptr && argument->beforeSets() == alias->beforeSets()) {
          return originals_[at];
        }
      }
    }
    if (value.isTensor()) return run_.on_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(run_.on_device(tensor));
      }
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  CpuRun run_;
  std::vector<IValue> originals_;
  std::vector<IValue> aliases_;
  std::optional<Drawing> drawing_;
  std::size_t generator_at_ = 0;
  bool by_mask_ = false;
};

void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).make();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>());
}

// What torch would compose for a new device, while the CPU and CUDA have kernels.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      continue;
    }
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>());
  }
}

}  // namespace pd2
