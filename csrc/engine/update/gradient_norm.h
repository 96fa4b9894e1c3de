// The norm of a batch's gradients over all stages, as torch.nn.utils.get_total_norm has it.
#pragma once

#include "engine/awaited_numbers.h"
#include "engine/fault.h"
#include "engine/streams.h"
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

// The norms of the gradients of some parameters.
struct ParameterNorms {
  std::vector<std::int64_t> parameters{};  // by number in the model
  at::Tensor norms{};                      // float64
  MaybeStream stream{};                    // which computes them; none: they are on the host
  Fence ready{};
};

struct GradientNormOptions {
  std::int64_t num_parameters = 0;  // of the model
  int num_stages = 1;               // of this process that give norms
  int num_readers = 1;              // stages of this process that wait for the total
  double norm_type = 2;
  at::ScalarType dtype = at::kFloat;  // of the gradients
  // No host reads norms: all stages of the model are in this process, and gradients on devices.
  bool stays_on_devices = false;
  // Learns of each batch whether its norm is finite, and so all of its gradients; null: there is
  // none.
  std::shared_ptr<LossScale> loss_scale{};
};

// Shared by the updates of a process's stages. The last of them to come to a batch exchanges the
// norms with the other processes of the replica, all of which then compute the same bits: the norm
// of the norms in the model's order of parameters, leaving out those without a gradient, which is
// what torch computes from an unsplit model's gradients. A batch is named by its last run.
//
// What stays on devices is there once their streams have come to it. Threads wait for each other
// alone, for streams need events that have been recorded.
class GradientNorm {
 public:
  // Without a `group` all stages are in this process. `shared`: of the group's ranks, rows of 2 *
  // num_parameters, for this object alone; null if they share no memory.
  GradientNorm(GradientNormOptions options, std::shared_ptr<Fault> fault,
               c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<SharedBoard> shared);

  double norm_type() const { return options_.norm_type; }
  bool stays_on_devices() const { return options_.stays_on_devices; }

  // The batch's norm, given when every stage has come to its update. Called by the thread that
  // submits the updates, before it submits the batch's.
  std::shared_ptr<AwaitedNumbers> expect(std::int64_t run);

  // Called by the updates' threads. Both throw ChannelAborted when `is_stopped`.
  void give(std::int64_t run, ParameterNorms norms, const std::function<bool()>& is_stopped);
  // [] of `dtype`, for the stream `here` if it stays on devices.
  at::Tensor wait(std::int64_t run, const MaybeStream& here,
                  const std::function<bool()>& is_stopped);

  // Instead of both, by each stage: the batch is discarded, its norm will never be.
  void drop(std::int64_t run);

  // Releases the connections to the other processes.
  void drop_connections();

 private:
  struct Total {
    at::Tensor number;
    Fence ready;
  };
  struct Batch {
    std::vector<ParameterNorms> given;  // by the stages that have come
    std::vector<Total> totals;  // the same on each device that has stages; once all have come
    int times_read = 0;
    std::shared_ptr<AwaitedNumbers> expected{};  // null: nobody asked
  };
  // The same norm, on the host and on devices.
  Total total_on_host(const std::vector<ParameterNorms>& given,
                      const std::function<bool()>& is_stopped);
  std::vector<Total> totals_on_devices(const std::vector<ParameterNorms>& given) const;
  // Adds up the norms of all processes. [2, parameters]: norms; 1 if there is a gradient, else 0.
  void exchange(at::Tensor& norms, const std::function<bool()>& is_stopped);
  at::Tensor total_of(const at::Tensor& present) const;

  const GradientNormOptions options_;
  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<SharedBoard> shared_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, Batch> batches_;  // by last run; those whose total some have not read
};

}  // namespace pd2
