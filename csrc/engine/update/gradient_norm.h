// The norm of a batch's gradients over all stages, as torch.nn.utils.get_total_norm has it.
#pragma once

#include "engine/fault.h"
#include "engine/update/loss_scale.h"
#include "transport/shared_board.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace pd2 {

// One batch's norm: there when every stage has come to its update.
struct NormSlot {
  std::optional<double> value;
};

// The norm of each parameter's gradient.
struct ParameterNorms {
  std::vector<std::int64_t> parameters;  // numbers in the model
  at::Tensor norms;                      // [parameters], float64 on the CPU
};

// Shared by the updates of a process's stages. Whoever comes last of them for a batch exchanges the
// norms with the other processes of the replica, all of which then compute the same bits: the norm
// of the norms in the model's order of parameters, those without a gradient left out, which is what
// torch computes from an unsplit model's gradients.
class GradientNorm {
 public:
  // `num_stages`: of this process that give norms; `num_readers`: that wait for the total.
  // `dtype`: of the gradients. Without a group all stages are in this process. `shared`: of the
  // group's ranks, rows of 2 * num_parameters, for this object alone; null if they share no memory.
  // `loss_scale`: is told of each batch whether its norm is finite, and so all of its gradients;
  // may be null.
  GradientNorm(std::shared_ptr<Fault> fault, std::int64_t num_parameters, int num_stages,
               int num_readers, double norm_type, at::ScalarType dtype,
               c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<SharedBoard> shared,
               std::shared_ptr<LossScale> loss_scale);

  double norm_type() const { return norm_type_; }

  // By the thread that submits the updates, before the batch's.
  std::shared_ptr<NormSlot> expect(std::int64_t batch);
  bool done(const NormSlot& slot) const;
  // True when the norm is there within `timeout`; throws PipelineError if the pipeline has failed.
  bool wait_for(const NormSlot& slot, std::chrono::milliseconds timeout) const;

  // By the updates' threads. Both throw ChannelAborted when `is_stopped`.
  void give(std::int64_t batch, const ParameterNorms& norms,
            const std::function<bool()>& is_stopped);
  at::Tensor wait(std::int64_t batch, const std::function<bool()>& is_stopped);  // [] of `dtype`

  // Lets go of the connections to the other processes.
  void drop_connections();

 private:
  struct Batch {
    at::Tensor norms;  // [2, parameters]: the norms, and 1 where there is a gradient
    int stages_given = 0;
    at::Tensor total;
    int times_read = 0;
    std::shared_ptr<NormSlot> slot;
  };
  Batch& batch(std::int64_t number);
  // Adds up what the processes have.
  void exchange(at::Tensor& norms, const std::function<bool()>& is_stopped);
  at::Tensor total_of(const at::Tensor& norms) const;

  const std::shared_ptr<Fault> fault_;
  const std::int64_t num_parameters_;
  const int num_stages_;
  const int num_readers_;
  const double norm_type_;
  const at::ScalarType dtype_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<SharedBoard> shared_;
  const std::shared_ptr<LossScale> loss_scale_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<std::int64_t, Batch> batches_;  // whose total has not been read by all
};

}  // namespace pd2
