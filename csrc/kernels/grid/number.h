// One number as optimizer_steps.h asks for it, with every rounding named: nvcc would otherwise fuse
// products and sums. On the host it gives the same bits.
#pragma once

#include "kernels/host_device.h"

#include <cmath>

namespace pd2::kernels {

template <typename T>
struct Number {
  using Scalar = T;
  T v;
  PD2_HOST_DEVICE static Number broadcast(T x) { return {x}; }
};
using Float = Number<float>;
using Double = Number<double>;

#ifdef __CUDA_ARCH__

PD2_HOST_DEVICE inline Float add(Float a, Float b) { return {__fadd_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Float subtract(Float a, Float b) { return {__fsub_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Float multiply(Float a, Float b) { return {__fmul_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Float divide(Float a, Float b) { return {__fdiv_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Float fma(Float a, Float b, Float c) { return {__fmaf_rn(a.v, b.v, c.v)}; }
PD2_HOST_DEVICE inline Float sqrt(Float a) { return {__fsqrt_rn(a.v)}; }

PD2_HOST_DEVICE inline Double add(Double a, Double b) { return {__dadd_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Double subtract(Double a, Double b) { return {__dsub_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Double multiply(Double a, Double b) { return {__dmul_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Double divide(Double a, Double b) { return {__ddiv_rn(a.v, b.v)}; }
PD2_HOST_DEVICE inline Double fma(Double a, Double b, Double c) {
  return {__fma_rn(a.v, b.v, c.v)};
}
PD2_HOST_DEVICE inline Double sqrt(Double a) { return {__dsqrt_rn(a.v)}; }

#else

template <typename T>
PD2_HOST_DEVICE Number<T> add(Number<T> a, Number<T> b) {
  return {a.v + b.v};
}
template <typename T>
PD2_HOST_DEVICE Number<T> subtract(Number<T> a, Number<T> b) {
  return {a.v - b.v};
}
template <typename T>
PD2_HOST_DEVICE Number<T> multiply(Number<T> a, Number<T> b) {
  return {a.v * b.v};
}
template <typename T>
PD2_HOST_DEVICE Number<T> divide(Number<T> a, Number<T> b) {
  return {a.v / b.v};
}
template <typename T>
PD2_HOST_DEVICE Number<T> fma(Number<T> a, Number<T> b, Number<T> c) {
  return {std::fma(a.v, b.v, c.v)};
}
template <typename T>
PD2_HOST_DEVICE Number<T> sqrt(Number<T> a) {
  return {std::sqrt(a.v)};
}

#endif

template <typename T>
PD2_HOST_DEVICE Number<T> negate(Number<T> a) {
  return {-a.v};
}
template <typename T>
PD2_HOST_DEVICE Number<T> max(Number<T> a, Number<T> b) {
  return a.v > b.v || a.v != a.v ? a : b;
}

}  // namespace pd2::kernels
