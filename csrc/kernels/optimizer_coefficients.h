// The numbers of one optimizer step as the passes need them: computed in double, then rounded to T
// once, as torch rounds Python floats.
#pragma once

#include "kernels/optimizer.h"

#include <cmath>

namespace pd2::kernels {

template <typename T>
struct SgdCoefficients {
  T negative_lr, momentum, one_minus_dampening, weight_decay;
  bool has_weight_decay, has_momentum, nesterov, maximize, first_step;
};

template <typename T>
struct AdamCoefficients {
  T weight_factor;  // decoupled decay: 1 - lr * weight_decay
  T weight_decay;   // coupled decay
  T lerp_weight;    // first moment: base + lerp_weight * (g - exp_avg)
  T beta2, one_minus_beta2;
  T bias_correction2_sqrt, eps, negative_step_size;
  bool decoupled_decay, coupled_decay;
  bool lerp_from_end;  // the base above is g, not exp_avg
  bool amsgrad, maximize;
};

template <typename T>
SgdCoefficients<T> round_coefficients(const SgdOptions& options) {
  return {
      .negative_lr = static_cast<T>(-options.lr),
      .momentum = static_cast<T>(options.momentum),
      .one_minus_dampening = static_cast<T>(1.0 - options.dampening),
      .weight_decay = static_cast<T>(options.weight_decay),
      .has_weight_decay = options.weight_decay != 0.0,
      .has_momentum = options.momentum != 0.0,
      .nesterov = options.nesterov,
      .maximize = options.maximize,
      .first_step = options.first_step,
  };
}

template <typename T>
AdamCoefficients<T> round_coefficients(const AdamOptions& options) {
  const auto step = static_cast<double>(options.step);
  const double bias_correction1 = 1.0 - std::pow(options.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(options.beta2, step);
  // torch's lerp starts from the nearer end.
  const T beta1_complement = static_cast<T>(1.0 - options.beta1);
  const bool lerp_from_end = !(std::abs(beta1_complement) < T(0.5));
  const bool decays = options.weight_decay != 0.0;
  return {
      .weight_factor = static_cast<T>(1.0 - options.lr * options.weight_decay),
      .weight_decay = static_cast<T>(options.weight_decay),
      .lerp_weight = lerp_from_end ? beta1_complement - T(1) : beta1_complement,
      .beta2 = static_cast<T>(options.beta2),
      .one_minus_beta2 = static_cast<T>(1.0 - options.beta2),
      .bias_correction2_sqrt = static_cast<T>(std::pow(bias_correction2, 0.5)),
      .eps = static_cast<T>(options.eps),
      .negative_step_size = static_cast<T>(-(options.lr / bias_correction1)),
      .decoupled_decay = decays && options.decoupled_weight_decay,
      .coupled_decay = decays && !options.decoupled_weight_decay,
      .lerp_from_end = lerp_from_end,
      .amsgrad = options.amsgrad,
      .maximize = options.maximize,
  };
}

}  // namespace pd2::kernels
