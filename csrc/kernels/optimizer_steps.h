// The arithmetic of one step, written once for every instruction set and for CUDA: over a type V of
// one or more numbers with the functions add, subtract, multiply, divide, negate, sqrt,
// fma(a, b, c) = a * b + c rounded once, and max, which gives NaN if either argument is NaN.
//
// The order of operations and the places of the fused multiply-adds are those of ATen's vectorised
// CPU kernels (add with alpha, lerp, addcmul, addcdiv) in the order in which torch.optim's
// single-tensor SGD and Adam call them, so that results are bitwise equal. (One exception: a torch
// built with MKL takes square roots from it, which are sometimes one unit in the last place off.)
// For the same reason the compiler must not fuse any other product and sum: includers see to that.
#pragma once

#include "kernels/host_device.h"
#include "kernels/optimizer_coefficients.h"

namespace pd2::kernels {

template <typename V>
class SgdStep {
 public:
  template <typename T>
  PD2_HOST_DEVICE explicit SgdStep(const SgdCoefficients<T>& c)
      : negative_lr_(V::broadcast(c.negative_lr)),
        momentum_(V::broadcast(c.momentum)),
        one_minus_dampening_(V::broadcast(c.one_minus_dampening)),
        weight_decay_(V::broadcast(c.weight_decay)),
        has_weight_decay_(c.has_weight_decay),
        nesterov_(c.nesterov),
        maximize_(c.maximize),
        first_step_(c.first_step) {}

  // Returns the new weights. kStates is 1 with momentum: state[0] is its buffer.
  template <int kStates>
  PD2_HOST_DEVICE V step(V w, V g, [[maybe_unused]] V* state) const {
    if (maximize_) g = negate(g);
    if (has_weight_decay_) g = fma(w, weight_decay_, g);
    if constexpr (kStates == 1) {
      V& buffer = state[0];
      buffer = first_step_ ? g : fma(g, one_minus_dampening_, multiply(buffer, momentum_));
      g = nesterov_ ? fma(buffer, momentum_, g) : buffer;
    }
    return fma(g, negative_lr_, w);
  }

 private:
  V negative_lr_, momentum_, one_minus_dampening_, weight_decay_;
  bool has_weight_decay_, nesterov_, maximize_, first_step_;
};

template <typename V>
class AdamStep {
 public:
  template <typename T>
  PD2_HOST_DEVICE explicit AdamStep(const AdamCoefficients<T>& c)
      : weight_factor_(V::broadcast(c.weight_factor)),
        weight_decay_(V::broadcast(c.weight_decay)),
        lerp_weight_(V::broadcast(c.lerp_weight)),
        beta2_(V::broadcast(c.beta2)),
        one_minus_beta2_(V::broadcast(c.one_minus_beta2)),
        bias_correction2_sqrt_(V::broadcast(c.bias_correction2_sqrt)),
        eps_(V::broadcast(c.eps)),
        negative_step_size_(V::broadcast(c.negative_step_size)),
        decoupled_decay_(c.decoupled_decay),
        coupled_decay_(c.coupled_decay),
        lerp_from_end_(c.lerp_from_end),
        maximize_(c.maximize) {}

  // Returns the new weights. state is exp_avg, exp_avg_sq and, where kStates is 3, max_exp_avg_sq.
  template <int kStates>
  PD2_HOST_DEVICE V step(V w, V g, V* state) const {
    if (maximize_) g = negate(g);
    if (decoupled_decay_) w = multiply(w, weight_factor_);
    if (coupled_decay_) g = fma(w, weight_decay_, g);
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    exp_avg = fma(lerp_weight_, subtract(g, exp_avg), lerp_from_end_ ? g : exp_avg);
    exp_avg_sq = fma(multiply(one_minus_beta2_, g), g, multiply(exp_avg_sq, beta2_));
    V second_moment = exp_avg_sq;
    if constexpr (kStates == 3) second_moment = state[2] = max(state[2], exp_avg_sq);
    const V denominator = add(divide(sqrt(second_moment), bias_correction2_sqrt_), eps_);
    return add(w, divide(multiply(negative_step_size_, exp_avg), denominator));
  }

 private:
  V weight_factor_, weight_decay_, lerp_weight_, beta2_, one_minus_beta2_;
  V bias_correction2_sqrt_, eps_, negative_step_size_;
  bool decoupled_decay_, coupled_decay_, lerp_from_end_, maximize_;
};

}  // namespace pd2::kernels
