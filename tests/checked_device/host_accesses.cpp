#include "checked_device/host_accesses.h"

#include "checked_device/allocator.h"
#include "checked_device/cpu_run.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace pd2 {
namespace {

using c10::IValue;

// They look at shapes alone, or call operators that do more.
const std::set<std::string> kOnlyShapes = {
    "aten::_to_copy",   "aten::is_pinned",         "aten::is_same_size", "aten::requires_grad_",
    "aten::empty_like", "aten::new_empty",         "aten::zeros_like",   "aten::new_zeros",
    "aten::ones_like",  "aten::new_empty_strided", "aten::full_like",    "aten::new_full",
    "aten::rand_like",  "aten::new_ones",          "aten::randn_like",   "aten::set_data",
};

template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  }
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema || kOnlyShapes.contains(schema->name())) return nullptr;
  const auto inputs = function.inputs();
  bool on_device = false;
  bool on_host = false;
  for (const IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      on_device |= tensor.is_privateuseone();
      on_host |= tensor.is_cpu() && tensor.has_storage() && is_pinned(tensor.storage().data());
    });
  }
  if (on_device || !on_host) return nullptr;
  for (std::size_t at = 0; at < inputs.size() && at < schema->arguments().size(); ++at) {
    const auto* const alias = schema->arguments()[at].alias_info();
    if (alias != nullptr && !alias->isWrite()) continue;
    for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
      if (!tensor.is_cpu() || !tensor.has_storage()) return;
      std::vector<Use> uses;
      add_uses(uses, tensor, alias != nullptr);
      for (const Use& use : uses) Runtime::instance().check_host_access(use, schema->name());
    });
  }
  return nullptr;
}

}  // namespace

void check_host_accesses() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace pd2
