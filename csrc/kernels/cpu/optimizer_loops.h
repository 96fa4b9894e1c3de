// The passes over arrays, written once over a vector type V. Included by one translation
// unit per instruction set, after its pragmas, so that everything here is compiled for that
// instruction set; hence the unnamed namespace, and no templates of the standard library: the
// linker must not take one that was compiled here for the rest of the program.
#pragma once

#include "kernels/cpu/optimizer_passes.h"
#include "kernels/cpu/vector.h"
#include "kernels/optimizer_steps.h"

#include <cstdint>

namespace pd2::kernels {
namespace {

constexpr std::int64_t kLineBytes = 64;
// Ahead far enough to cover the memory's latency, near enough to be still in L1 when used.
constexpr std::int64_t kPrefetchBytes = 1024;

// How a vector of each kind of weights is read and written.

template <typename V, typename T, typename Count>
inline V load_weights(const PlainWeights<T>& a, std::int64_t i, Count count) {
  return V::load(a.w + i, count);
}
template <typename V, HalfFormat kFormat, typename Count>
inline V load_weights(const MasterWeights<kFormat>& a, std::int64_t i, Count count) {
  return V::load(a.master + i, count);
}
template <typename V, typename Count>
inline V load_weights(const SplitWeights& a, std::int64_t i, Count count) {
  return V::join(a.w + i, a.remainder + i, count);
}

// `w`: of a master; `out`: what stages compute with.
template <bool kStream, typename V, typename T, typename Count>
inline void store_weights(const PlainWeights<T>& a, std::int64_t i, V, V out, Count count) {
  out.template store<kStream>(a.w_out + i, count);
}
template <bool kStream, typename V, HalfFormat kFormat, typename Count>
inline void store_weights(const MasterWeights<kFormat>& a, std::int64_t i, V w, V out,
                          Count count) {
  w.template store<false>(a.master + i, count);
  out.template store_half<kFormat, kStream>(a.w_out + i, count);
}
template <bool kStream, typename V, typename Count>
inline void store_weights(const SplitWeights& a, std::int64_t i, V, V out, Count count) {
  out.template split<kStream>(a.w_out + i, a.remainder + i, count);
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

// What a step's feedback makes of a vector. `Fed` is NoFeedback or a FedArray.

template <typename Weights, typename V, typename Count>
inline V fed_back(const NoFeedback&, std::int64_t, V, V after, Count) {
  return after;
}
template <typename Weights, typename V, typename Count>
inline V fed_back(const FedArray<V>& fed, std::int64_t i, V before, V after, Count count) {
  if constexpr (HasMaster<Weights>) {
    return fed.step.ahead(before, after);
  } else {
    V kept = V::load(fed.kept + i, count);
    after = fed.step.correct(before, after, kept);
    kept.template store<false>(fed.kept + i, count);
    return after;
  }
}

template <typename Weights>
inline void prefetch_kept(const NoFeedback&, std::int64_t, std::int64_t) {}
template <typename Weights, typename V>
inline void prefetch_kept(const FedArray<V>& fed, std::int64_t i, std::int64_t count) {
  if constexpr (!HasMaster<Weights>) prefetch(fed.kept + i, count);
}

// Everything is read before anything is written.
template <bool kStream, typename V, typename Weights, int kStates, typename Step, typename Fed,
          typename Count>
inline void step_vector(const Arrays<Weights, kStates>& a, std::int64_t i, const Step& step,
                        const Fed& fed, Count count) {
  V state[kStates + 1];
  for (int s = 0; s < kStates; ++s) state[s] = V::load(a.state[s] + i, count);
  const V w = load_weights<V>(a.weights, i, count);
  const V stepped = step.template step<kStates>(w, V::load(a.g + i, count), state);
  for (int s = 0; s < kStates; ++s) state[s].template store<false>(a.state[s] + i, count);
  const V out = fed_back<Weights>(fed, i, w, stepped, count);
  store_weights<kStream>(a.weights, i, stepped, out, count);
}

// Flat, as a call for each vector would cost more than what is called.
template <bool kStream, typename V, typename Weights, int kStates, typename Step, typename Fed>
[[gnu::flatten]] void step_array(const Arrays<Weights, kStates>& a, std::int64_t n,
                                 const Step& step, const Fed& fed) {
  // A whole line of what is streamed.
  constexpr std::int64_t kLine =
      kLineBytes / static_cast<std::int64_t>(sizeof(typename Weights::Out));
  std::int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    prefetch_weights(a.weights, i, kLine);
    prefetch(a.g + i, kLine);
    for (int s = 0; s < kStates; ++s) prefetch(a.state[s] + i, kLine);
    prefetch_kept<Weights>(fed, i, kLine);
#pragma GCC unroll kUnrolled
    for (std::int64_t j = 0; j < kLine; j += V::kWidth) {
      step_vector<kStream, V>(a, i + j, step, fed, Whole());
    }
  }
  for (; i + V::kWidth <= n; i += V::kWidth) step_vector<false, V>(a, i, step, fed, Whole());
  // The last elements go through the same vector code: whatever the compiler makes of scalar code
  // can then not differ from it.
  if (i < n) step_vector<false, V>(a, i, step, fed, n - i);
  if constexpr (kStream) finish_streaming();
}

template <typename V, typename Weights, int kStates, typename Step, typename Fed>
void step_array(const Arrays<Weights, kStates>& a, std::int64_t n, const Step& step, const Fed& fed,
                bool stream) {
  if (kStreams && stream) {
    step_array<kStreams, V>(a, n, step, fed);
  } else {
    step_array<false, V>(a, n, step, fed);
  }
}

template <int kStates, typename Weights>
Arrays<Weights, kStates> arrays_of(const Weights& weights, const typename Weights::Gradient* g,
                                   const State<typename Weights::Scalar>& state) {
  Arrays<Weights, kStates> arrays{weights, g, {}};
  for (int s = 0; s < kStates; ++s) arrays.state[s] = state.arrays[s];
  return arrays;
}

template <typename V>
NoFeedback fed_array(const NoFeedback&) {
  return {};
}
template <typename V>
FedArray<V> fed_array(const Feedback<typename V::Scalar>& feedback) {
  return {FeedbackStep<V>(feedback.options), feedback.kept};
}

template <typename Step, typename Weights, typename Fed>
void step_pass(const Weights& weights, const typename Weights::Gradient* g,
               const State<typename Weights::Scalar>& state, std::int64_t n,
               const typename Step::Options& options, const Fed& feedback, bool stream) {
  using V = typename Step::Vector;
  constexpr int kFewest = Step::kFewestStates;
  const Step step(options);
  const auto fed = fed_array<V>(feedback);
  if (Step::num_states(options) == kFewest) {
    step_array<V>(arrays_of<kFewest>(weights, g, state), n, step, fed, stream);
  } else {
    step_array<V>(arrays_of<kFewest + 1>(weights, g, state), n, step, fed, stream);
  }
}

template <typename Weights, typename Fed>
constexpr FedPasses<Weights, Fed> fed_passes() {
  using V = Vector<typename Weights::Scalar>;
  return {{&step_pass<SgdStep<V>, Weights, Fed>}, {&step_pass<AdamStep<V>, Weights, Fed>}};
}

struct PassesOfEach {
  template <typename Weights>
  constexpr operator Passes<Weights>() const {
    return {fed_passes<Weights, NoFeedback>(),
            fed_passes<Weights, Feedback<typename Weights::Scalar>>()};
  }
};

constexpr PassesOfEach kEach;
constexpr AllPasses kAllPasses{kEach, kEach, kEach, kEach, kEach, kEach, kEach};

}  // namespace
}  // namespace pd2::kernels
