// What replicas call in place of adding up their gradients, and torch's bucket for it.
#include "bindings/bindings.h"
#include "core/check.h"
#include "engine/stage/stage.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// A parameter's number in the stage, and where its gradient is in the bucket: offset and numel.
using BucketPlace = std::tuple<std::size_t, std::int64_t, std::int64_t>;

// By bucket that a hook is given.
std::vector<std::vector<BucketPlace>> hooked_buckets(const Stage& stage) {
  const StageLayout& layout = stage.layout();
  std::vector<std::vector<std::size_t>> parameters(layout.buffers().size());  // [buffer][index]
  for (std::size_t i = 0; i < layout.num_parameters(); ++i) {
    parameters[layout.place(i).buffer].push_back(i);
  }
  std::vector<std::vector<BucketPlace>> buckets;
  for (const GradientBuckets::Bucket& bucket : stage.gradients().replicas()->buckets()) {
    if (bucket.begin >= layout.packing(bucket.dtype).numel()) {  // of flags alone
      continue;
    }
    std::vector<BucketPlace>& places = buckets.emplace_back();
    for (std::size_t index = bucket.first; index < bucket.last; ++index) {
      const ParameterView& view = layout.packing(bucket.dtype).views()[index];
      places.emplace_back(parameters[bucket.dtype][index], view.offset - bucket.begin, view.numel);
    }
  }
  return buckets;
}

// Replicas then call it instead of adding up their gradients. While no batch has gradients.
void set_hook(Stage& stage, py::function hook) {
  ReplicaSum* replicas = stage.gradients().replicas();
  PD2_ASSERT(replicas && !stage.gradients().host(),
             "a hook needs replicas, and gradients where the stage is");
  replicas->set_hook([held = shared_python(std::move(hook))](const std::vector<at::Tensor>& buckets,
                                                             std::optional<double> unscaling) {
    const py::gil_scoped_acquire gil;
    return (*held)(buckets, unscaling).cast<bool>();
  });
}

// Its sizes are the parameters' own, which it holds.
c10d::GradBucket make_bucket(std::size_t index, std::size_t count, const at::Tensor& buffer,
                             const std::vector<BucketPlace>& places,
                             const std::vector<at::Tensor>& parameters) {
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto [parameter, offset, numel] = places[i];
    offsets.push_back(offset);
    lengths.push_back(numel);
    sizes.push_back(parameters.at(i).sizes());
  }
  return c10d::GradBucket(index, count, buffer, std::move(offsets), std::move(lengths),
                          std::move(sizes), parameters, std::nullopt);
}

}  // namespace

void bind_hooks(py::module_& module) {
  module.def("hooked_buckets", &hooked_buckets, py::arg("stage"));
  module.def("set_hook", &set_hook, py::arg("stage"), py::arg("hook"));
  module.def("make_bucket", &make_bucket, py::kw_only(), py::arg("index"), py::arg("count"),
             py::arg("buffer"), py::arg("places"), py::arg("parameters"));
}

}  // namespace pd2
