// What travels between two stages for one microbatch.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace pd2 {

// All values that cross one edge (producer stage -> consumer stage) for one microbatch, or the
// gradients that come back. Tensors carry no autograd history.
struct Message {
  // Opaque to the engine: how the front end rebuilds its values from the tensors. Empty: each value
  // is one tensor.
  std::string structure;
  std::vector<at::Tensor> tensors;  // in a gradient message, undefined if there is no gradient
  std::vector<bool> requires_grad;  // by tensor

  bool differentiable() const {
    for (bool flag : requires_grad) {
      if (flag) {
        return true;
      }
    }
    return false;
  }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const at::Tensor& tensor : tensors) {
      sum += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
    }
    return sum;
  }
};

}  // namespace pd2
