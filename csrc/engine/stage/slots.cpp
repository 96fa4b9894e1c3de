#include "engine/stage/slots.h"

#include "core/check.h"
#include "engine/gradients/grad_accumulator.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pd2 {

StageLayout::StageLayout(const std::vector<at::Tensor>& parameters,
                         const std::vector<std::string>& names, const StagePrecision& precision)
    : places_(parameters.size()) {
  PD2_ASSERT(parameters.size() == names.size(), names.size(), " names for ", parameters.size());
  // By the dtype of the weights and that of what is stepped.
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::ScalarType own = parameters[i].scalar_type();
    const at::ScalarType computed = precision.dtypes.empty() ? own : precision.dtypes.at(i);
    PD2_CHECK(computed == own || own == at::kFloat, "parameter ", names[i], ": ", own,
              ", computed with as ", computed, ": its master must be float32");
    by_dtype[{computed, own}].push_back(i);
  }
  for (const auto& [dtypes, members] : by_dtype) {
    const auto [dtype, own] = dtypes;
    std::vector<at::Tensor> tensors;
    std::vector<std::string> of_buffer;
    for (const std::size_t member : members) {
      places_[member] = {buffers_.size(), tensors.size()};
      tensors.push_back(parameters[member].detach().to(dtype));
      of_buffer.push_back(names[member]);
    }
    std::optional<at::ScalarType> master, narrow;
    if (dtype != own) {
      master = precision.split && dtype == at::kBFloat16 ? at::kShort : own;
      narrow = precision.gradients;
    }
    buffers_.push_back({FlatPacking(tensors), std::move(of_buffer),
                        GradAccumulator::dtype(dtype, narrow), master});
  }
}

Slots::Slots(const StageLayout& layout, const std::vector<at::Tensor>& parameters, int num_versions,
             bool has_flags)
    : layout_(layout), num_versions_(num_versions), versions_(num_versions) {
  const bool can_rotate =
      has_slack() && std::ranges::all_of(layout.buffers(), [](const auto& each) {
        return each.gradients == each.packing.dtype();
      });
  flats_.resize(num_versions + (can_rotate ? 1 : 0));
  for (std::vector<at::Tensor>& of_slot : flats_) {
    for (const auto& [packing, names, gradients, master] : layout.buffers()) {
      const bool with_flags = can_rotate && has_flags;
      of_slot.push_back(
          packing.allocate(packing.dtype(), GradAccumulator::num_flags(packing, with_flags)));
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    weight(0, i).copy_(parameters[i].detach());
  }
}

}  // namespace pd2
