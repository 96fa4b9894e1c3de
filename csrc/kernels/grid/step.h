// The body of the optimizer's kernel: what one thread does in a step over a table of runs.
#pragma once

#include "kernels/grid/grid.h"
#include "kernels/grid/launch.h"
#include "kernels/grid/number.h"
#include "kernels/grid/pack.h"
#include "kernels/grid/step_table.h"
#include "kernels/half.h"
#include "kernels/optimizer_steps.h"

#include <cstdint>
#include <type_traits>

namespace pd2::kernels {
namespace {

// How neighbours of each kind of weights are read and written.

template <int kWidth, typename T>
PD2_HOST_DEVICE Pack<T, kWidth> load_weights(const PlainWeights<T>& a, int i) {
  return read<kWidth>(a.w + i);
}
template <int kWidth, HalfFormat kFormat>
PD2_HOST_DEVICE Pack<float, kWidth> load_weights(const MasterWeights<kFormat>& a, int i) {
  return read<kWidth>(static_cast<const float*>(a.master) + i);
}
template <int kWidth>
PD2_HOST_DEVICE Pack<float, kWidth> load_weights(const SplitWeights& a, int i) {
  const auto high = read<kWidth>(a.w + i);
  const auto remainder = read<kWidth>(static_cast<const std::int16_t*>(a.remainder) + i);
  Pack<float, kWidth> w;
  for (int lane = 0; lane < kWidth; ++lane) {
    w.lane[lane] = join({high.lane[lane], remainder.lane[lane]});
  }
  return w;
}

// `w`: of a master; `out`: what stages compute with.
template <int kWidth, typename T>
PD2_HOST_DEVICE void store_weights(const PlainWeights<T>& a, int i, const Pack<T, kWidth>&,
                                   const Pack<T, kWidth>& out) {
  write(a.w_out + i, out);
}
template <int kWidth, HalfFormat kFormat>
PD2_HOST_DEVICE void store_weights(const MasterWeights<kFormat>& a, int i,
                                   const Pack<float, kWidth>& w, const Pack<float, kWidth>& out) {
  Pack<std::uint16_t, kWidth> half;
  for (int lane = 0; lane < kWidth; ++lane) {
    half.lane[lane] = kFormat == HalfFormat::kBfloat16 ? bfloat16_bits(out.lane[lane])
                                                       : float16_bits(out.lane[lane]);
  }
  write(a.master + i, w);
  write(a.w_out + i, half);
}
template <int kWidth>
PD2_HOST_DEVICE void store_weights(const SplitWeights& a, int i, const Pack<float, kWidth>&,
                                   const Pack<float, kWidth>& out) {
  Pack<std::uint16_t, kWidth> high;
  Pack<std::int16_t, kWidth> remainder;
  for (int lane = 0; lane < kWidth; ++lane) {
    const SplitFloat parts = split(out.lane[lane]);
    high.lane[lane] = parts.high;
    remainder.lane[lane] = parts.remainder;
  }
  write(a.w_out + i, high);
  write(a.remainder + i, remainder);
}

template <typename T>
PD2_HOST_DEVICE bool are_weights_aligned(const PlainWeights<T>& a) {
  return is_aligned(a.w) && is_aligned(a.w_out);
}
template <HalfFormat kFormat>
PD2_HOST_DEVICE bool are_weights_aligned(const MasterWeights<kFormat>& a) {
  return is_aligned(a.master) && is_aligned(a.w_out);
}
PD2_HOST_DEVICE inline bool are_weights_aligned(const SplitWeights& a) {
  return is_aligned(a.w) && is_aligned(a.remainder) && is_aligned(a.w_out);
}

template <typename T>
PD2_HOST_DEVICE Number<T> scaled_gradient(T g, Number<T> scale) {
  return multiply(Number<T>{g}, scale);
}
// Rounded, as if the gradient had been multiplied before.
PD2_HOST_DEVICE inline Float scaled_gradient(std::uint16_t g, Float scale) {
  const Float product = multiply(Float{float_of_bfloat16(g)}, scale);
  return {float_of_bfloat16(bfloat16_bits(product.v))};
}

// What a step's feedback makes of neighbours. `Fed` is NoFeedback or a FedArray.

template <typename Weights, typename T, int kWidth>
PD2_HOST_DEVICE Pack<T, kWidth> fed_back(const NoFeedback&, int, const Pack<T, kWidth>&,
                                         const Pack<T, kWidth>& after) {
  return after;
}
template <typename Weights, typename T, int kWidth>
PD2_HOST_DEVICE Pack<T, kWidth> fed_back(const FedArray<Number<T>>& fed, int i,
                                         const Pack<T, kWidth>& before, Pack<T, kWidth> after) {
  using V = Number<T>;
  if constexpr (HasMaster<Weights>) {
    for (int lane = 0; lane < kWidth; ++lane) {
      after.lane[lane] = fed.step.ahead(V{before.lane[lane]}, V{after.lane[lane]}).v;
    }
  } else {
    Pack<T, kWidth> pack = read<kWidth>(static_cast<const T*>(fed.kept) + i);
    for (int lane = 0; lane < kWidth; ++lane) {
      V kept{pack.lane[lane]};
      after.lane[lane] = fed.step.correct(V{before.lane[lane]}, V{after.lane[lane]}, kept).v;
      pack.lane[lane] = kept.v;
    }
    write(fed.kept + i, pack);
  }
  return after;
}

PD2_HOST_DEVICE inline bool is_fed_aligned(const NoFeedback&) { return true; }
template <typename V>
PD2_HOST_DEVICE bool is_fed_aligned(const FedArray<V>& fed) {
  return is_aligned(fed.kept);  // null is
}

// Steps kWidth neighbours with whole accesses to each array. Everything is read before anything is
// written: w_out may be w or g.
template <int kWidth, typename Step, typename Weights, int kStates, typename Fed>
PD2_HOST_DEVICE void step_pack(const Arrays<Weights, kStates>& a, int i, const Step& step,
                               const Fed& fed, Number<typename Weights::Scalar> gradient_scale) {
  using T = typename Weights::Scalar;
  using V = Number<T>;
  const Pack<T, kWidth> w = load_weights<kWidth>(a.weights, i);
  const Pack<typename Weights::Gradient, kWidth> g = read<kWidth>(a.g + i);
  Pack<T, kWidth> state[kStates + 1];
  for (int s = 0; s < kStates; ++s) {
    state[s] = read<kWidth>(static_cast<const T*>(a.state[s]) + i);
  }
  Pack<T, kWidth> stepped;
  for (int lane = 0; lane < kWidth; ++lane) {
    V numbers[kStates + 1];
    for (int s = 0; s < kStates; ++s) numbers[s] = {state[s].lane[lane]};
    const V gradient = scaled_gradient(g.lane[lane], gradient_scale);
    stepped.lane[lane] = step.template step<kStates>(V{w.lane[lane]}, gradient, numbers).v;
    for (int s = 0; s < kStates; ++s) state[s].lane[lane] = numbers[s].v;
  }
  for (int s = 0; s < kStates; ++s) write(a.state[s] + i, state[s]);
  store_weights(a.weights, i, stepped, fed_back<Weights>(fed, i, w, stepped));
}

// A thread's part of n <= kStepChunk elements.
template <typename Step, typename Weights, int kStates, typename Fed>
PD2_HOST_DEVICE void step_chunk(const Arrays<Weights, kStates>& a, int n, int thread,
                                const Step& step, const Fed& fed,
                                Number<typename Weights::Scalar> gradient_scale) {
  // 16 bytes of the arrays with the largest elements: neighbouring threads then access neighbouring
  // bytes of every array. With more, an instruction would leave gaps that the next one fills.
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(typename Weights::Scalar));
  bool aligned = are_weights_aligned(a.weights) && is_aligned(a.g) && is_fed_aligned(fed);
  for (int s = 0; s < kStates; ++s) aligned = aligned && is_aligned(a.state[s]);
  const int in_packs = aligned ? n / kWidth * kWidth : 0;
  for (int i = thread * kWidth; i < in_packs; i += kThreads * kWidth) {
    step_pack<kWidth>(a, i, step, fed, gradient_scale);
  }
  for (int i = in_packs + thread; i < n; i += kThreads) {
    step_pack<1>(a, i, step, fed, gradient_scale);
  }
}

template <typename T>
PD2_HOST_DEVICE void copy_chunk(const T* from, T* to, int n, int thread) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));
  const int in_packs = is_aligned(from) && is_aligned(to) ? n / kWidth * kWidth : 0;
  for (int i = thread * kWidth; i < in_packs; i += kThreads * kWidth) {
    write(to + i, read<kWidth>(from + i));
  }
  for (int i = in_packs + thread; i < n; i += kThreads) to[i] = from[i];
}

// `kIsFed`: runs may have feedback.
template <typename Weights, bool kIsFed>
struct StepArrays {
  using T = typename Weights::Scalar;
  static constexpr bool kHasFewNumbers =
      std::is_same_v<typename Weights::Gradient, float> && !kIsFed;
  Weights weights;
  const typename Weights::Out* w;  // what a parameter without a step keeps
  const typename Weights::Gradient* g;
  T* state[3];
  T* kept;  // null where there is a master
  const void* table;
};

template <int kStates, typename Weights, bool kIsFed>
PD2_HOST_DEVICE Arrays<Weights, kStates> arrays_at(const StepArrays<Weights, kIsFed>& a,
                                                   std::int64_t i, std::int64_t state) {
  Arrays<Weights, kStates> result{a.weights.at(i), a.g + i, {}};
  for (int s = 0; s < kStates; ++s) result.state[s] = a.state[s] + state;
  return result;
}

// The chunk of a run that begins with this element.
template <int kStates, typename Step, typename Weights, bool kIsFed>
PD2_HOST_DEVICE void step_run(const StepArrays<Weights, kIsFed>& a, const StepRun<Step>& run,
                              std::int64_t begin, int n, int thread,
                              Number<typename Weights::Scalar> gradient_scale) {
  const std::int64_t state = run.state + begin - run.begin;
  const auto arrays = arrays_at<kStates>(a, begin, state);
  if constexpr (kIsFed) {
    if (run.is_fed) {
      const FedArray<typename Step::Vector> fed{run.feedback,
                                                HasMaster<Weights> ? nullptr : a.kept + state};
      return step_chunk(arrays, n, thread, run.step, fed, gradient_scale);
    }
  }
  step_chunk(arrays, n, thread, run.step, NoFeedback(), gradient_scale);
}

template <typename Step, typename Weights, bool kIsFed>
PD2_HOST_DEVICE void step_thread(const StepArrays<Weights, kIsFed>& a, const GridThread& place) {
  using V = Number<typename Weights::Scalar>;
  constexpr int kFewest = Step::kFewestStates;
  const StepControl control = *static_cast<const StepControl*>(a.table);
  const auto* runs =
      reinterpret_cast<const StepRun<Step>*>(static_cast<const StepControl*>(a.table) + 1);
  const V gradient_scale{static_cast<typename V::Scalar>(control.gradient_scale)};
  int at = 0;
  for (std::int64_t chunk = place.block; chunk < control.num_chunks; chunk += place.num_blocks) {
    at = item_of_chunk(runs, at, control.num_runs, chunk);
    const StepRun<Step> run = runs[at];  // what is written cannot change it
    const std::int64_t begin = run.begin + (chunk - run.first_chunk) * kStepChunk;
    const std::int64_t left = run.end - begin;
    const int n = static_cast<int>(left < kStepChunk ? left : kStepChunk);
    if (run.num_states == kCopied) {
      if (a.w != a.weights.w_out) copy_chunk(a.w + begin, a.weights.w_out + begin, n, place.thread);
    } else if (run.num_states == kFewest) {
      step_run<kFewest>(a, run, begin, n, place.thread, gradient_scale);
    } else {
      step_run<kFewest + 1>(a, run, begin, n, place.thread, gradient_scale);
    }
  }
}

// Calls visit(StepArrays, std::type_identity<Step>) with the launch's types.
template <bool kIsFed, typename Weights, typename Visit>
void visit_rule(const StepLaunch& launch, const Weights& weights, const Visit& visit) {
  using T = typename Weights::Scalar;
  const StepArrays<Weights, kIsFed> arrays{
      weights,
      static_cast<const typename Weights::Out*>(launch.w),
      static_cast<const typename Weights::Gradient*>(launch.g),
      {static_cast<T*>(launch.state[0]), static_cast<T*>(launch.state[1]),
       static_cast<T*>(launch.state[2])},
      static_cast<T*>(launch.kept),
      launch.table};
  if (launch.rule == StepRule::kSgd) {
    visit(arrays, std::type_identity<SgdStep<Number<T>>>());
  } else {
    visit(arrays, std::type_identity<AdamStep<Number<T>>>());
  }
}
template <typename Visit>
void visit_step(const StepLaunch& launch, const Visit& visit) {
  visit_weights(launch, [&]<typename Weights>(const Weights& weights) {
    if (launch.is_fed) return visit_rule<true>(launch, weights, visit);
    visit_rule<false>(launch, weights, visit);
  });
}

}  // namespace
}  // namespace pd2::kernels
