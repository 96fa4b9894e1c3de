// The passes over arrays, written once over a vector type V: what optimizer_steps.h asks of it, and
// Scalar, kWidth, load, store, stream, broadcast, finish_streaming. Included by one translation
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

template <typename T, int kStates>
struct Arrays {
  const T* w;
  const T* g;
  T* w_out;
  T* state[kStates + 1];  // the last is unused: no array is empty
};

template <bool kStream, typename V, typename T, int kStates, typename Step>
inline void step_vector(const Arrays<T, kStates>& a, std::int64_t i, const Step& step) {
  V state[kStates + 1];
  for (int s = 0; s < kStates; ++s) state[s] = V::load(a.state[s] + i);
  const V w_out = step.template step<kStates>(V::load(a.w + i), V::load(a.g + i), state);
  for (int s = 0; s < kStates; ++s) state[s].store(a.state[s] + i);
  if constexpr (kStream) {
    w_out.stream(a.w_out + i);
  } else {
    w_out.store(a.w_out + i);
  }
}

// The last elements go through the same vector code, in vectors filled up with zeros: whatever the
// compiler makes of scalar code can then not differ from it.
template <typename V, typename T, int kStates, typename Step>
inline void step_tail(const Arrays<T, kStates>& a, std::int64_t begin, std::int64_t n,
                      const Step& step) {
  T w[V::kWidth] = {}, g[V::kWidth] = {}, w_out[V::kWidth] = {};
  T state[kStates + 1][V::kWidth] = {};
  Arrays<T, kStates> padded{w, g, w_out, {}};
  for (int s = 0; s < kStates; ++s) padded.state[s] = state[s];
  for (std::int64_t i = begin; i < n; ++i) {
    w[i - begin] = a.w[i];
    g[i - begin] = a.g[i];
    for (int s = 0; s < kStates; ++s) state[s][i - begin] = a.state[s][i];
  }
  step_vector<false, V>(padded, 0, step);
  for (std::int64_t i = begin; i < n; ++i) {
    a.w_out[i] = w_out[i - begin];
    for (int s = 0; s < kStates; ++s) a.state[s][i] = state[s][i - begin];
  }
}

template <bool kStream, typename V, typename T, int kStates, typename Step>
void step_array(const Arrays<T, kStates>& a, std::int64_t n, const Step& step) {
  constexpr std::int64_t kLine = kLineBytes / static_cast<std::int64_t>(sizeof(T));
  constexpr std::int64_t kAhead = kPrefetchBytes / static_cast<std::int64_t>(sizeof(T));
  std::int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    __builtin_prefetch(a.w + i + kAhead);
    __builtin_prefetch(a.g + i + kAhead);
    for (int s = 0; s < kStates; ++s) __builtin_prefetch(a.state[s] + i + kAhead);
#pragma GCC unroll 16
    for (std::int64_t j = 0; j < kLine; j += V::kWidth) step_vector<kStream, V>(a, i + j, step);
  }
  for (; i + V::kWidth <= n; i += V::kWidth) step_vector<false, V>(a, i, step);
  if (i < n) step_tail<V>(a, i, n, step);
  if constexpr (kStream) V::finish_streaming();
}

template <typename V, typename T, int kStates, typename Step>
void step_array(const Arrays<T, kStates>& a, std::int64_t n, const Step& step, bool stream) {
  if (stream) {
    step_array<true, V>(a, n, step);
  } else {
    step_array<false, V>(a, n, step);
  }
}

template <typename V, typename T = typename V::Scalar>
void sgd_pass(const T* w, const T* g, T* momentum_buffer, T* w_out, std::int64_t n,
              const SgdCoefficients<T>& c, bool stream) {
  const SgdStep<V> step(c);
  if (c.has_momentum) {
    step_array<V>(Arrays<T, 1>{w, g, w_out, {momentum_buffer}}, n, step, stream);
  } else {
    step_array<V>(Arrays<T, 0>{w, g, w_out, {}}, n, step, stream);
  }
}

template <typename V, typename T = typename V::Scalar>
void adam_pass(const T* w, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* w_out,
               std::int64_t n, const AdamCoefficients<T>& c, bool stream) {
  const AdamStep<V> step(c);
  if (c.amsgrad) {
    step_array<V>(Arrays<T, 3>{w, g, w_out, {exp_avg, exp_avg_sq, max_exp_avg_sq}}, n, step,
                  stream);
  } else {
    step_array<V>(Arrays<T, 2>{w, g, w_out, {exp_avg, exp_avg_sq}}, n, step, stream);
  }
}

template <typename V, typename T = typename V::Scalar>
Passes<T> passes() {
  return {&sgd_pass<V>, &adam_pass<V>};
}

}  // namespace
}  // namespace pd2::kernels
