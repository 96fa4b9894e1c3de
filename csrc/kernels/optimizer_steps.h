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
#include "kernels/optimizer.h"

#include <cmath>

namespace pd2::kernels {

// The coefficients are computed in double, then rounded to V::Scalar once, as torch rounds Python
// floats.
template <typename V>
V rounded(double coefficient) {
  return V::broadcast(static_cast<typename V::Scalar>(coefficient));
}

template <typename V>
class SgdStep {
 public:
  using Vector = V;
  using Options = SgdOptions;
  static constexpr int kFewestStates = 0;
  static int num_states(const SgdOptions& options) { return options.momentum != 0.0 ? 1 : 0; }

  explicit SgdStep(const SgdOptions& options)
      : negative_lr_(rounded<V>(-options.lr)),
        momentum_(rounded<V>(options.momentum)),
        one_minus_dampening_(rounded<V>(1.0 - options.dampening)),
        weight_decay_(rounded<V>(options.weight_decay)),
        has_weight_decay_(options.weight_decay != 0.0),
        nesterov_(options.nesterov),
        maximize_(options.maximize),
        first_step_(options.first_step) {}

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
  using Vector = V;
  using Options = AdamOptions;
  static constexpr int kFewestStates = 2;
  static int num_states(const AdamOptions& options) { return options.amsgrad ? 3 : 2; }

  explicit AdamStep(const AdamOptions& options)
      : weight_factor_(rounded<V>(1.0 - options.lr * options.weight_decay)),
        weight_decay_(rounded<V>(options.weight_decay)),
        beta2_(rounded<V>(options.beta2)),
        one_minus_beta2_(rounded<V>(1.0 - options.beta2)),
        eps_(rounded<V>(options.eps)),
        decoupled_decay_(options.weight_decay != 0.0 && options.decoupled_weight_decay),
        coupled_decay_(options.weight_decay != 0.0 && !options.decoupled_weight_decay),
        maximize_(options.maximize) {
    using T = typename V::Scalar;
    const auto step = static_cast<double>(options.step);
    const double bias_correction1 = 1.0 - std::pow(options.beta1, step);
    const double bias_correction2 = 1.0 - std::pow(options.beta2, step);
    bias_correction2_sqrt_ = rounded<V>(std::pow(bias_correction2, 0.5));
    negative_step_size_ = rounded<V>(-(options.lr / bias_correction1));
    // torch's lerp starts from the nearer end.
    const T beta1_complement = static_cast<T>(1.0 - options.beta1);
    lerp_from_end_ = !(T(-0.5) < beta1_complement && beta1_complement < T(0.5));
    lerp_weight_ = V::broadcast(lerp_from_end_ ? beta1_complement - T(1) : beta1_complement);
  }

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
  V weight_factor_;  // decoupled decay: 1 - lr * weight_decay
  V weight_decay_;   // coupled decay
  V lerp_weight_;    // first moment: base + lerp_weight * (g - exp_avg)
  V beta2_, one_minus_beta2_, bias_correction2_sqrt_, eps_, negative_step_size_;
  bool decoupled_decay_, coupled_decay_;
  bool lerp_from_end_;  // the base above is g, not exp_avg
  bool maximize_;
};

// What FeedbackOptions define, in the definition's order.
template <typename V>
class FeedbackStep {
 public:
  explicit FeedbackStep(const FeedbackOptions& options)
      : coefficient_(rounded<V>(options.coefficient)), first_step_(options.first_step) {}

  // W(t+1) of a master, given it before the step and after it.
  PD2_HOST_DEVICE V ahead(V before, V after) const {
    return add(after, multiply(subtract(after, before), coefficient_));
  }
  // Of other weights.
  PD2_HOST_DEVICE V correct(V before, V after, V& kept) const {
    const V step = subtract(after, before);
    if (!first_step_) after = add(after, multiply(subtract(step, kept), coefficient_));
    kept = step;
    return after;
  }

 private:
  V coefficient_;
  bool first_step_;
};

template <typename Weights, int kStates>
struct Arrays {
  using T = typename Weights::Scalar;
  Weights weights;
  const typename Weights::Gradient* g;
  T* state[kStates + 1];  // the last is unused: no array is empty
};

// Where a fed step finds the one before, if it is kept.
template <typename V>
struct FedArray {
  FeedbackStep<V> step;
  typename V::Scalar* kept;
};

}  // namespace pd2::kernels
