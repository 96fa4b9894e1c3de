// The norm of a batch's gradients over all stages, as torch.nn.utils.get_total_norm has it.
#pragma once

#include "engine/awaited_numbers.h"
#include "engine/fault.h"
#include "engine/update/loss_scale.h"
#include "transport/shared_board.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pd2 {

// The norms of the gradients of some parameters, by number in the model.
using ParameterNorms = std::vector<std::pair<std::int64_t, double>>;

struct GradientNormOptions {
  std::int64_t num_parameters = 0;  // of the model
  int num_stages = 1;               // of this process that give norms
  int num_readers = 1;              // stages of this process that wait for the total
  double norm_type = 2;
  at::ScalarType dtype = at::kFloat;  // of the gradients
};

// Shared by the updates of a process's stages. The last of them to come to a batch exchanges the
// norms with the other processes of the replica, all of which then compute the same bits: the norm
// of the norms in the model's order of parameters, leaving out those without a gradient, which is
// what torch computes from an unsplit model's gradients. A batch is named by its last run.
class GradientNorm {
 public:
  // Without a `group` all stages are in this process. `shared`: of the group's ranks, rows of 2 *
  // num_parameters, for this object alone; null if they share no memory. `loss_scale`: may be null;
  // else it learns of each batch whether its norm is finite, and so all of its gradients.
  GradientNorm(const GradientNormOptions& options, std::shared_ptr<Fault> fault,
               c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<SharedBoard> shared,
               std::shared_ptr<LossScale> loss_scale);

  double norm_type() const { return options_.norm_type; }

  // The batch's norm, given when every stage has come to its update. Called by the thread that
  // submits the updates, before it submits the batch's.
  std::shared_ptr<AwaitedNumbers> expect(std::int64_t run);

  // Called by the updates' threads. Both throw ChannelAborted when `is_stopped`.
  void give(std::int64_t run, const ParameterNorms& norms, const std::function<bool()>& is_stopped);
  at::Tensor wait(std::int64_t run, const std::function<bool()>& is_stopped);  // [] of `dtype`

  // Instead of both, by each stage: the batch is discarded, its norm will never be.
  void drop(std::int64_t run);

  // Releases the connections to the other processes.
  void drop_connections();

 private:
  struct Batch {
    at::Tensor norms;  // [2, parameters]: the norms; 1 if there is a gradient, else 0
    int stages_given = 0;
    at::Tensor total;
    int times_read = 0;
    std::shared_ptr<AwaitedNumbers> expected;  // null: nobody asked
  };
  Batch& batch(std::int64_t run);
  // Adds up the norms of all processes.
  void exchange(at::Tensor& norms, const std::function<bool()>& is_stopped);
  at::Tensor total_of(const at::Tensor& norms) const;

  const GradientNormOptions options_;
  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<SharedBoard> shared_;
  const std::shared_ptr<LossScale> loss_scale_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, Batch> batches_;  // by last run; those whose total some have not read
};

}  // namespace pd2
