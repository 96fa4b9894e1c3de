#include "engine/weights/fused_optimizer.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#ifdef PD2_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "core/check.h"
#include "engine/weights/flat_buffer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace pd2 {
namespace {

constexpr std::int64_t kLineBytes = 64;
// Per thread; below this, starting threads costs more than they save.
constexpr std::int64_t kGrainBytes = std::int64_t{1} << 20;

constexpr std::array<std::string_view, 1> kSgdStates{"momentum_buffer"};
constexpr std::array<std::string_view, 3> kAdamStates{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

std::span<const std::string_view> state_names(OptimizerKind kind) {
  if (kind == OptimizerKind::kSgd) return kSgdStates;
  return kAdamStates;
}

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

struct FusedOptimizer::Buffers {
  const void* w;
  const void* g;
  void* w_out;
  std::int64_t weight_size;  // of `w` and `w_out`
  std::array<void*, 3> state;

  const void* w_at(std::int64_t i) const { return static_cast<const char*>(w) + i * weight_size; }
  void* w_out_at(std::int64_t i) const { return static_cast<char*>(w_out) + i * weight_size; }
  template <typename T>
  const T* g_at(std::int64_t i) const {
    return static_cast<const T*>(g) + i;
  }
  template <typename T>
  T* state_at(std::size_t which, std::int64_t i) const {
    return state[which] == nullptr ? nullptr : static_cast<T*>(state[which]) + i;
  }
};

OptimizerKind parse_optimizer(std::string_view kind) {
  PD2_CHECK(kind == "sgd" || kind == "adam", "fused optimizer: ", kind, ", known: sgd, adam");
  return kind == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdam;
}

bool FusedOptimizer::supports(at::ScalarType dtype, at::Device device) {
#ifdef PD2_WITH_CUDA
  const bool has_kernels = device.is_cpu() || device.is_cuda();
#else
  const bool has_kernels = device.is_cpu();
#endif
  return has_kernels && (dtype == at::kFloat || dtype == at::kDouble);
}

FusedOptimizer::FusedOptimizer(OptimizerKind kind, std::vector<ParameterSlice> slices,
                               const at::Tensor& flat_example)
    : kind_(kind),
      slices_(std::move(slices)),
      numel_(flat_example.numel()),
      options_(flat_example.options().requires_grad(false)),
      step_counts_(slices_.size(), 0),
      has_momentum_(slices_.size(), false) {
  PD2_CHECK(supports(flat_example.scalar_type(), flat_example.device()),
            "flat buffer: ", flat_example.scalar_type(), " on ", flat_example.device(),
            ": the fused optimizer needs float32 or float64 on a device it was built for");
  const std::int64_t line = kLineBytes / flat_example.element_size();
  std::int64_t end = 0;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    const ParameterSlice& slice = slices_[i];
    PD2_CHECK(slice.offset >= end && slice.numel >= 0 && slice.offset + slice.numel <= numel_,
              "slice ", i, ": elements ", slice.offset, " to ", slice.offset + slice.numel,
              ": slices must be in order, without overlap, from ", end, " to ", numel_);
    PD2_CHECK(slice.offset % line == 0, "slice ", i, ": offset ", slice.offset,
              ": must be a multiple of 64 bytes, ", line, " elements");
    PD2_CHECK(slice.group >= 0, "slice ", i, ": group ", slice.group, ": must be at least 0");
    end = slice.offset + slice.numel;
    state_offsets_.push_back(state_numel_);
    state_numel_ += ceil_divide(slice.numel, line) * line;
  }
  for (std::string_view name : state_names(kind_)) states_.push_back({name, at::Tensor()});
}

void FusedOptimizer::step(const at::Tensor& w, const at::Tensor& gradient, const at::Tensor& w_out,
                          std::span<const GroupOptions> groups,
                          const std::vector<bool>& has_gradient, const at::Tensor& master) {
  check_arguments(w, gradient, w_out, groups, has_gradient, master);
  allocate_state(groups, has_gradient);

  // Raw pointers: views of these buffers are saved by backward passes in flight, and writing
  // through ATen would count as a change of theirs. The engine guards versions by itself.
  Buffers buffers{w.const_data_ptr(),
                  gradient.const_data_ptr(),
                  w_out.mutable_data_ptr(),
                  w.element_size(),
                  {}};
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].flat.defined()) buffers.state[i] = states_[i].flat.mutable_data_ptr();
  }
  const std::vector<Segment> segments = merge_into_segments(groups, has_gradient);
  const c10::DeviceGuard guard(w.device());
  const auto run = [&](const auto& weights) {
    if (w.is_cpu()) {
      run_on_cpu(weights, buffers, segments, groups);
    } else {
      run_on_cuda(weights, buffers, segments, groups);
    }
  };
  const auto* halves = static_cast<const std::uint16_t*>(buffers.w);
  auto* halves_out = static_cast<std::uint16_t*>(buffers.w_out);
  using kernels::HalfFormat;
  if (!master.defined()) {
    if (w.scalar_type() == at::kDouble) {
      run(kernels::PlainWeights<double>{static_cast<const double*>(buffers.w),
                                        static_cast<double*>(buffers.w_out)});
    } else {
      run(kernels::PlainWeights<float>{static_cast<const float*>(buffers.w),
                                       static_cast<float*>(buffers.w_out)});
    }
  } else if (master.scalar_type() == at::kShort) {
    run(kernels::SplitWeights{halves, master.mutable_data_ptr<std::int16_t>(), halves_out});
  } else if (w.scalar_type() == at::kBFloat16) {
    run(kernels::MasterWeights<HalfFormat::kBfloat16>{master.mutable_data_ptr<float>(),
                                                      halves_out});
  } else {
    run(kernels::MasterWeights<HalfFormat::kFloat16>{master.mutable_data_ptr<float>(), halves_out});
  }

  for (std::size_t i = 0; i < slices_.size(); ++i) {
    if (!has_gradient[i]) continue;
    ++step_counts_[i];
    if (groups[slices_[i].group].sgd.momentum != 0.0) has_momentum_[i] = true;
  }
}

void FusedOptimizer::check_arguments(const at::Tensor& w, const at::Tensor& gradient,
                                     const at::Tensor& w_out, std::span<const GroupOptions> groups,
                                     const std::vector<bool>& has_gradient,
                                     const at::Tensor& master) const {
  const at::ScalarType dtype = options_.dtype().toScalarType();
  const auto check = [&](const char* name, const at::Tensor& tensor, at::ScalarType expected) {
    PD2_CHECK(tensor.defined() && tensor.is_contiguous() && tensor.numel() >= numel_ &&
                  tensor.scalar_type() == expected && tensor.device() == options_.device(),
              name, ": must be contiguous with at least ", numel_, " elements of ", expected,
              " on ", options_.device(), ", is ",
              tensor.defined() ? tensor.toString() : "undefined", " with ",
              tensor.defined() ? tensor.numel() : 0);
  };
  check("gradient", gradient, dtype);
  if (master.defined()) {
    const bool is_split = master.scalar_type() == at::kShort;
    const at::ScalarType half =
        w.defined() && w.scalar_type() == at::kHalf && !is_split ? at::kHalf : at::kBFloat16;
    check("master", master, is_split ? at::kShort : at::kFloat);
    check("w", w, half);
    check("w_out", w_out, half);
    PD2_CHECK(dtype == at::kFloat, "gradient: ", dtype, ": with a master it must be float32");
  } else {
    check("w", w, dtype);
    check("w_out", w_out, dtype);
  }
  PD2_CHECK(has_gradient.size() == slices_.size(), "has_gradient: ", has_gradient.size(),
            " entries, parameters: ", slices_.size(), ": must be equal");
  for (const ParameterSlice& slice : slices_) {
    PD2_CHECK(slice.group < static_cast<std::int64_t>(groups.size()), "group ", slice.group,
              " of a parameter, groups given: ", groups.size(), ": there must be options for it");
  }
}

void FusedOptimizer::allocate_state(std::span<const GroupOptions> groups,
                                    const std::vector<bool>& has_gradient) {
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    if (!has_gradient[i]) continue;
    const GroupOptions& group = groups[slices_[i].group];
    if (kind_ == OptimizerKind::kSgd) {
      if (group.sgd.momentum != 0.0) state_or_zeros(0);
    } else {
      state_or_zeros(0);
      state_or_zeros(1);
      if (group.adam.amsgrad) state_or_zeros(2);
    }
  }
}

std::vector<FusedOptimizer::Segment> FusedOptimizer::merge_into_segments(
    std::span<const GroupOptions> groups, const std::vector<bool>& has_gradient) const {
  const auto line = kLineBytes / static_cast<std::int64_t>(options_.dtype().itemsize());
  const bool sgd = kind_ == OptimizerKind::kSgd;
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    const ParameterSlice& slice = slices_[i];
    if (slice.numel == 0) continue;
    const Segment next{.begin = slice.offset,
                       .end = slice.offset + slice.numel,
                       .state = state_offsets_[i],
                       .group = slice.group,
                       .step = sgd ? 0 : step_counts_[i] + 1,
                       .has_gradient = has_gradient[i],
                       .first_step = sgd && (step_counts_[i] == 0 || !has_momentum_[i])};
    // Adam would make 0 / (0 + eps) of padding.
    const bool padding_stays_zero =
        sgd || !next.has_gradient || groups[slice.group].adam.eps != 0.0;
    if (!segments.empty()) {
      Segment& last = segments.back();
      const std::int64_t gap = next.begin - last.end;
      const bool alike =
          last.has_gradient == next.has_gradient &&
          (!next.has_gradient || (last.group == next.group && last.step == next.step &&
                                  last.first_step == next.first_step));
      if (alike && gap < line && (gap == 0 || padding_stays_zero)) {
        last.end = next.end;
        continue;
      }
    }
    segments.push_back(next);
  }
  return segments;
}

template <typename Weights>
void FusedOptimizer::run_on_cpu(const Weights& weights, const Buffers& buffers,
                                std::span<const Segment> segments,
                                std::span<const GroupOptions> groups) const {
  using T = typename Weights::Scalar;
  const auto run_piece = [&](const Segment& segment, std::int64_t begin, std::int64_t end) {
    const T* g = buffers.g_at<T>(begin);
    const std::int64_t state = segment.state + begin - segment.begin;
    if (!segment.has_gradient) {
      if (buffers.w != buffers.w_out) {
        std::memcpy(buffers.w_out_at(begin), buffers.w_at(begin),
                    (end - begin) * buffers.weight_size);
      }
    } else if (kind_ == OptimizerKind::kSgd) {
      kernels::SgdOptions options = groups[segment.group].sgd;
      options.first_step = segment.first_step;
      kernels::sgd_cpu(weights.at(begin), g, buffers.state_at<T>(0, state), end - begin, options);
    } else {
      kernels::AdamOptions options = groups[segment.group].adam;
      options.step = segment.step;
      kernels::adam_cpu(weights.at(begin), g, buffers.state_at<T>(0, state),
                        buffers.state_at<T>(1, state), buffers.state_at<T>(2, state), end - begin,
                        options);
    }
  };

  // Threads share the segments out by cache lines, so that every piece begins on a 64-byte
  // boundary.
  constexpr std::int64_t kLine =
      kLineBytes / static_cast<std::int64_t>(sizeof(typename Weights::Out));
  std::vector<std::int64_t> first_line;  // of each segment, counting the segments' lines only
  std::int64_t num_lines = 0;
  for (const Segment& segment : segments) {
    first_line.push_back(num_lines);
    num_lines += ceil_divide(segment.end - segment.begin, kLine);
  }
  at::parallel_for(
      0, num_lines, kGrainBytes / kLineBytes, [&](std::int64_t line, std::int64_t end_line) {
        auto r = std::upper_bound(first_line.begin(), first_line.end(), line) - first_line.begin();
        for (--r; line < end_line; ++r) {
          const Segment& segment = segments[r];
          const std::int64_t begin = segment.begin + (line - first_line[r]) * kLine;
          const std::int64_t limit = segment.begin + (end_line - first_line[r]) * kLine;
          run_piece(segment, begin, std::min(segment.end, limit));
          line = first_line[r] + ceil_divide(segment.end - segment.begin, kLine);
        }
      });
}

template <typename Weights>
void FusedOptimizer::run_on_cuda([[maybe_unused]] const Weights& weights,
                                 [[maybe_unused]] const Buffers& buffers,
                                 [[maybe_unused]] std::span<const Segment> segments,
                                 [[maybe_unused]] std::span<const GroupOptions> groups) const {
#ifdef PD2_WITH_CUDA
  using T = typename Weights::Scalar;
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  for (const Segment& segment : segments) {
    const std::int64_t n = segment.end - segment.begin;
    const T* g = buffers.g_at<T>(segment.begin);
    if (!segment.has_gradient) {
      if (buffers.w != buffers.w_out) {
        kernels::copy_cuda(buffers.w_at(segment.begin), buffers.w_out_at(segment.begin),
                           n * buffers.weight_size, stream);
      }
    } else if (kind_ == OptimizerKind::kSgd) {
      kernels::SgdOptions options = groups[segment.group].sgd;
      options.first_step = segment.first_step;
      kernels::sgd_cuda(weights.at(segment.begin), g, buffers.state_at<T>(0, segment.state), n,
                        options, stream);
    } else {
      kernels::AdamOptions options = groups[segment.group].adam;
      options.step = segment.step;
      kernels::adam_cuda(weights.at(segment.begin), g, buffers.state_at<T>(0, segment.state),
                         buffers.state_at<T>(1, segment.state),
                         buffers.state_at<T>(2, segment.state), n, options, stream);
    }
  }
#else
  PD2_ASSERT(false, "supports() admits no CUDA tensors in a build without CUDA");
#endif
}

const FusedOptimizer::State& FusedOptimizer::find_state(std::string_view name) const {
  const auto found = std::find_if(states_.begin(), states_.end(),
                                  [&](const State& state) { return state.name == name; });
  PD2_CHECK(found != states_.end(), "optimizer state \"", name, "\": ",
            kind_ == OptimizerKind::kSgd ? "SGD has momentum_buffer"
                                         : "Adam has exp_avg, exp_avg_sq, max_exp_avg_sq");
  return *found;
}

at::Tensor FusedOptimizer::state(std::string_view name) const { return find_state(name).flat; }

at::Tensor FusedOptimizer::state_or_zeros(std::string_view name) {
  return state_or_zeros(&find_state(name) - states_.data());
}

at::Tensor FusedOptimizer::state_or_zeros(std::size_t which) {
  at::Tensor& flat = states_[which].flat;
  if (!flat.defined()) {
    flat = zeros_on_huge_pages(state_numel_, options_);
  }
  return flat;
}

std::int64_t FusedOptimizer::step_count(std::size_t i) const { return step_counts_.at(i); }

void FusedOptimizer::set_step_count(std::size_t i, std::int64_t count) {
  PD2_CHECK(count >= 0, "step count: ", count, ": must be at least 0");
  step_counts_.at(i) = count;
}

std::int64_t FusedOptimizer::num_states() const {
  return std::count_if(states_.begin(), states_.end(),
                       [](const State& state) { return state.flat.defined(); });
}

std::int64_t FusedOptimizer::state_bytes() const {
  std::int64_t numel = 0;
  for (const ParameterSlice& slice : slices_) numel += slice.numel;
  return numel * num_states() * static_cast<std::int64_t>(options_.dtype().itemsize());
}

std::int64_t FusedOptimizer::state_padding_bytes() const {
  return state_numel_ * num_states() * static_cast<std::int64_t>(options_.dtype().itemsize()) -
         state_bytes();
}

}  // namespace pd2
