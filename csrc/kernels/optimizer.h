// Optimizer steps as passes over raw memory: one read of W(t), gradient and state, one write of
// W(t+1) and state. Nothing here knows tensors, parameters or threads.
//
// Common to all functions:
//  - `w`, `g`, `w_out` and the state arrays have n elements and any alignment their type allows;
//    64-byte aligned arrays are fastest.
//  - `w_out` may be `w` (in place) or `g` (the new weights replace the gradient). Apart from that
//    the arrays must not overlap.
//  - Results are bitwise the same for every instruction set, alignment, and division of an array
//    into calls.
//  - Calls on disjoint arrays may run at the same time.
#pragma once

#include <cstdint>

namespace pd2::kernels {

// Hyper-parameters of torch.optim.SGD. `first_step`: the momentum buffer has no content yet and
// becomes the gradient, undampened.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  bool first_step = false;
};

// Hyper-parameters of torch.optim.Adam, and of AdamW with `decoupled_weight_decay`. `step` is the
// number of this step and sets the bias corrections; the first is 1.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  std::int64_t step = 1;
  bool decoupled_weight_decay = false;
  bool amsgrad = false;
  bool maximize = false;
};

// T is float or double. `momentum_buffer` is read and written if momentum != 0, else it may be
// null.
template <typename T>
void sgd_cpu(const T* w, const T* g, T* momentum_buffer, T* w_out, std::int64_t n,
             const SgdOptions& options);

// `max_exp_avg_sq` is read and written if amsgrad, else it may be null.
template <typename T>
void adam_cpu(const T* w, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* w_out,
              std::int64_t n, const AdamOptions& options);

// The same on the current CUDA device, enqueued on `stream` (a cudaStream_t). They throw
// std::runtime_error if the launch fails.
template <typename T>
void sgd_cuda(const T* w, const T* g, T* momentum_buffer, T* w_out, std::int64_t n,
              const SgdOptions& options, void* stream);

template <typename T>
void adam_cuda(const T* w, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* w_out,
               std::int64_t n, const AdamOptions& options, void* stream);

void copy_cuda(const void* from, void* to, std::int64_t bytes, void* stream);

}  // namespace pd2::kernels
