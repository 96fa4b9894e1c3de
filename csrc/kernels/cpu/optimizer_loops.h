// The passes over arrays, written once over a vector type V: what optimizer_steps.h asks of it, and
// Scalar, kWidth, load, store, stream, broadcast, finish_streaming; of floats also load_bfloat16,
// store_half, join and split, with the bits of half.h. Included by one translation
// unit per instruction set, after its pragmas, so that everything here is compiled for that
// instruction set; hence the unnamed namespace, and no templates of the standard library: the
// linker must not take one that was compiled here for the rest of the program.
#pragma once

#include "kernels/cpu/optimizer_passes.h"
#include "kernels/optimizer_steps.h"

#include <cstdint>

namespace pd2::kernels {
namespace {

constexpr std::int64_t kLineBytes = 64;
// Ahead far enough to cover the memory's latency, near enough to be still in L1 when used.
constexpr std::int64_t kPrefetchBytes = 1024;

// How a vector of each kind of weights is read and written.

template <typename V, typename T>
inline V load_weights(const PlainWeights<T>& a, std::int64_t i) {
  return V::load(a.w + i);
}
template <typename V, HalfFormat kFormat>
inline V load_weights(const MasterWeights<kFormat>& a, std::int64_t i) {
  return V::load(a.master + i);
}
template <typename V>
inline V load_weights(const SplitWeights& a, std::int64_t i) {
  return V::join(a.w + i, a.remainder + i);
}

template <typename V>
inline V load_gradient(const typename V::Scalar* g) {
  return V::load(g);
}
template <typename V>
inline V load_gradient(const std::uint16_t* g) {
  return V::load_bfloat16(g);
}

template <bool kStream, typename V, typename T>
inline void store_weights(const PlainWeights<T>& a, std::int64_t i, V w) {
  if constexpr (kStream) {
    w.stream(a.w_out + i);
  } else {
    w.store(a.w_out + i);
  }
}
template <bool kStream, typename V, HalfFormat kFormat>
inline void store_weights(const MasterWeights<kFormat>& a, std::int64_t i, V w) {
  w.store(a.master + i);
  w.template store_half<kFormat, kStream>(a.w_out + i);
}
template <bool kStream, typename V>
inline void store_weights(const SplitWeights& a, std::int64_t i, V w) {
  w.template split<kStream>(a.w_out + i, a.remainder + i);
}

template <typename T>
inline void prefetch(const T* array, std::int64_t count) {
  constexpr std::int64_t kAhead = kPrefetchBytes / static_cast<std::int64_t>(sizeof(T));
  constexpr std::int64_t kLine = kLineBytes / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t i = 0; i < count; i += kLine) __builtin_prefetch(array + kAhead + i);
}

template <typename T>
inline void prefetch_weights(const PlainWeights<T>& a, std::int64_t i, std::int64_t count) {
  prefetch(a.w + i, count);
}
template <HalfFormat kFormat>
inline void prefetch_weights(const MasterWeights<kFormat>& a, std::int64_t i, std::int64_t count) {
  prefetch(a.master + i, count);
}
inline void prefetch_weights(const SplitWeights& a, std::int64_t i, std::int64_t count) {
  prefetch(a.w + i, count);
  prefetch(a.remainder + i, count);
}

// Room for a vector of weights, which is taken in from an array's end and given back there.

template <typename Weights, std::int64_t kWidth>
struct Padded;

template <typename T, std::int64_t kWidth>
struct Padded<PlainWeights<T>, kWidth> {
  T w[kWidth] = {}, w_out[kWidth] = {};
  PlainWeights<T> arrays() { return {w, w_out}; }
  void take(const PlainWeights<T>& a, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) w[i] = a.w[i];
  }
  void give(const PlainWeights<T>& a, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) a.w_out[i] = w_out[i];
  }
};

template <HalfFormat kFormat, std::int64_t kWidth>
struct Padded<MasterWeights<kFormat>, kWidth> {
  float master[kWidth] = {};
  std::uint16_t w_out[kWidth] = {};
  MasterWeights<kFormat> arrays() { return {master, w_out}; }
  void take(const MasterWeights<kFormat>& a, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) master[i] = a.master[i];
  }
  void give(const MasterWeights<kFormat>& a, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) a.master[i] = master[i];
    for (std::int64_t i = 0; i < n; ++i) a.w_out[i] = w_out[i];
  }
};

template <std::int64_t kWidth>
struct Padded<SplitWeights, kWidth> {
  std::uint16_t w[kWidth] = {}, w_out[kWidth] = {};
  std::int16_t remainder[kWidth] = {};
  SplitWeights arrays() { return {w, remainder, w_out}; }
  void take(const SplitWeights& a, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) w[i] = a.w[i];
    for (std::int64_t i = 0; i < n; ++i) remainder[i] = a.remainder[i];
  }
  void give(const SplitWeights& a, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) a.remainder[i] = remainder[i];
    for (std::int64_t i = 0; i < n; ++i) a.w_out[i] = w_out[i];
  }
};

template <typename Weights, std::int64_t kWidth>
struct Padded<Bfloat16Gradients<Weights>, kWidth> : Padded<Weights, kWidth> {
  Bfloat16Gradients<Weights> arrays() { return {Padded<Weights, kWidth>::arrays()}; }
};

// What a step's feedback makes of a vector. `Fed` is NoFeedback or a FedArray.

template <typename V>
inline void store_kept(float* p, V kept) {
  kept.store(p);
}
template <typename V>
inline void store_kept(double* p, V kept) {
  kept.store(p);
}
template <typename V>
inline void store_kept(std::uint16_t* p, V kept) {
  kept.template store_half<HalfFormat::kBfloat16, false>(p);
}

template <typename V>
inline V fed_back(const NoFeedback&, std::int64_t, V, V after) {
  return after;
}
template <typename V, typename Kept>
inline V fed_back(const FedArray<V, Kept>& fed, std::int64_t i, V before, V after) {
  V kept = load_gradient<V>(static_cast<const Kept*>(fed.kept + i));
  after = fed.step.correct(before, after, kept);
  store_kept(fed.kept + i, kept);
  return after;
}

inline void prefetch_kept(const NoFeedback&, std::int64_t, std::int64_t) {}
template <typename V, typename Kept>
inline void prefetch_kept(const FedArray<V, Kept>& fed, std::int64_t i, std::int64_t count) {
  prefetch(fed.kept + i, count);
}

// Room for a vector of it.
template <typename V, typename Fed>
struct PaddedFeedback {
  NoFeedback array(const NoFeedback&) { return {}; }
  void take(const NoFeedback&, std::int64_t, std::int64_t) {}
  void give(const NoFeedback&, std::int64_t, std::int64_t) const {}
};
template <typename V, typename Kept>
struct PaddedFeedback<V, FedArray<V, Kept>> {
  Kept kept[V::kWidth] = {};
  FedArray<V, Kept> array(const FedArray<V, Kept>& fed) { return {fed.step, kept}; }
  void take(const FedArray<V, Kept>& fed, std::int64_t begin, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) kept[i] = fed.kept[begin + i];
  }
  void give(const FedArray<V, Kept>& fed, std::int64_t begin, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) fed.kept[begin + i] = kept[i];
  }
};

template <bool kStream, typename V, typename Weights, int kStates, typename Step, typename Fed>
inline void step_vector(const Arrays<Weights, kStates>& a, std::int64_t i, const Step& step,
                        const Fed& fed) {
  V state[kStates + 1];
  for (int s = 0; s < kStates; ++s) state[s] = V::load(a.state[s] + i);
  const V w = load_weights<V>(a.weights, i);
  const V w_out = step.template step<kStates>(w, load_gradient<V>(a.g + i), state);
  for (int s = 0; s < kStates; ++s) state[s].store(a.state[s] + i);
  store_weights<kStream>(a.weights, i, fed_back(fed, i, w, w_out));
}

// The last elements go through the same vector code, in vectors filled up with zeros: whatever the
// compiler makes of scalar code can then not differ from it.
template <typename V, typename Weights, int kStates, typename Step, typename Fed>
inline void step_tail(const Arrays<Weights, kStates>& a, std::int64_t begin, std::int64_t n,
                      const Step& step, const Fed& fed) {
  using T = typename Weights::Scalar;
  Padded<Weights, V::kWidth> weights;
  PaddedFeedback<V, Fed> feedback;
  typename Weights::Gradient g[V::kWidth] = {};
  T state[kStates + 1][V::kWidth] = {};
  Arrays<Weights, kStates> padded{weights.arrays(), g, {}};
  for (int s = 0; s < kStates; ++s) padded.state[s] = state[s];
  weights.take(a.weights.at(begin), n - begin);
  feedback.take(fed, begin, n - begin);
  for (std::int64_t i = begin; i < n; ++i) {
    g[i - begin] = a.g[i];
    for (int s = 0; s < kStates; ++s) state[s][i - begin] = a.state[s][i];
  }
  step_vector<false, V>(padded, 0, step, feedback.array(fed));
  weights.give(a.weights.at(begin), n - begin);
  feedback.give(fed, begin, n - begin);
  for (std::int64_t i = begin; i < n; ++i) {
    for (int s = 0; s < kStates; ++s) a.state[s][i] = state[s][i - begin];
  }
}

template <bool kStream, typename V, typename Weights, int kStates, typename Step, typename Fed>
void step_array(const Arrays<Weights, kStates>& a, std::int64_t n, const Step& step,
                const Fed& fed) {
  // A whole line of what is streamed.
  constexpr std::int64_t kLine =
      kLineBytes / static_cast<std::int64_t>(sizeof(typename Weights::Out));
  std::int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    prefetch_weights(a.weights, i, kLine);
    prefetch(a.g + i, kLine);
    for (int s = 0; s < kStates; ++s) prefetch(a.state[s] + i, kLine);
    prefetch_kept(fed, i, kLine);
#pragma GCC unroll 16
    for (std::int64_t j = 0; j < kLine; j += V::kWidth) {
      step_vector<kStream, V>(a, i + j, step, fed);
    }
  }
  for (; i + V::kWidth <= n; i += V::kWidth) step_vector<false, V>(a, i, step, fed);
  if (i < n) step_tail<V>(a, i, n, step, fed);
  if constexpr (kStream) V::finish_streaming();
}

template <typename V, typename Weights, int kStates, typename Step, typename Fed>
void step_array(const Arrays<Weights, kStates>& a, std::int64_t n, const Step& step, const Fed& fed,
                bool stream) {
  if (stream) {
    step_array<true, V>(a, n, step, fed);
  } else {
    step_array<false, V>(a, n, step, fed);
  }
}

template <typename V>
NoFeedback fed_array(const NoFeedback&) {
  return {};
}
template <typename V, typename Kept>
FedArray<V, Kept> fed_array(const Feedback<Kept>& feedback) {
  return {FeedbackStep<V>(feedback.options), feedback.kept};
}

template <typename V, typename Weights, typename Fed, typename T = typename Weights::Scalar>
void sgd_pass(const Weights& weights, const typename Weights::Gradient* g, T* momentum_buffer,
              std::int64_t n, const SgdOptions& options, const Fed& feedback, bool stream) {
  const SgdStep<V> step(options);
  const auto fed = fed_array<V>(feedback);
  if (options.momentum != 0.0) {
    step_array<V>(Arrays<Weights, 1>{weights, g, {momentum_buffer}}, n, step, fed, stream);
  } else {
    step_array<V>(Arrays<Weights, 0>{weights, g, {}}, n, step, fed, stream);
  }
}

template <typename V, typename Weights, typename Fed, typename T = typename Weights::Scalar>
void adam_pass(const Weights& weights, const typename Weights::Gradient* g, T* exp_avg,
               T* exp_avg_sq, T* max_exp_avg_sq, std::int64_t n, const AdamOptions& options,
               const Fed& feedback, bool stream) {
  const AdamStep<V> step(options);
  const auto fed = fed_array<V>(feedback);
  if (options.amsgrad) {
    step_array<V>(Arrays<Weights, 3>{weights, g, {exp_avg, exp_avg_sq, max_exp_avg_sq}}, n, step,
                  fed, stream);
  } else {
    step_array<V>(Arrays<Weights, 2>{weights, g, {exp_avg, exp_avg_sq}}, n, step, fed, stream);
  }
}

template <typename V, typename Weights, typename Fed>
FedPasses<Weights, Fed> fed_passes() {
  return {&sgd_pass<V, Weights, Fed>, &adam_pass<V, Weights, Fed>};
}

template <typename V, typename Weights>
Passes<Weights> passes() {
  Passes<Weights> all{fed_passes<V, Weights, NoFeedback>(),
                      fed_passes<V, Weights, Feedback<typename Weights::Scalar>>(),
                      {}};
  if constexpr (sizeof(typename Weights::Scalar) == sizeof(float)) {
    all.fed_bfloat16 = fed_passes<V, Weights, Feedback<std::uint16_t>>();
  }
  return all;
}

}  // namespace
}  // namespace pd2::kernels
