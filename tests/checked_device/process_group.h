// A process group that behaves as NCCL's, on the checked device.

#pragma once

#include "checked_device/communicator.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace pd2 {

// Device tensors alone, contiguous and of NCCL's types. Two ranks that send or receive, outside of
// startCoalescing(), have a communicator of their own, everything else goes over one of all ranks;
// each is made at its first use, where the host waits for the other ranks, as it does at the first
// all-to-all, which goes in pairs. Messages are matched in
// order, tags do not count.
class CheckedProcessGroup final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  struct Below {
    c10::intrusive_ptr<c10d::Store> store;
    c10::intrusive_ptr<c10d::Backend> gloo;
  };

  CheckedProcessGroup(Below below, std::chrono::milliseconds timeout);
  ~CheckedProcessGroup() override;

  // Sends are over when their bytes are copied, not when they are received; for all groups.
  static void set_eager_sends(bool eager);
  // How often this process has met others to connect with them, for all groups.
  static int num_connections();

  const std::string getBackendName() const override { return "checked"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Of all groups, the one that was set last; 0: none was.
  static std::chrono::milliseconds last_timeout_set();
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  // Then waits until the device is idle, as whoever frees memory of a device does: for the
  // transfers of other groups, too, up to the timeout.
  void abort() override;
  void shutdown() override;

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Operation {
    std::string name;
    Tensors reads;
    Tensors writes;
    std::vector<std::function<void(Wire&)>> parts;
    int peer = -1;  // of a message
    bool on_host = false;
    bool is_in_pairs = false;
  };

  void end_all();
  WorkPtr post(Operation operation);
  int check(const Operation& operation) const;
  Communicator& communicator(int device, int peer);
  // Before the first operation in pairs.
  void connect_pairs(int device);
  void meet(const std::string& key, const std::vector<int>& ranks, int device);

  const Below below_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  bool aborted_ = false;
  std::map<std::pair<int, int>, std::unique_ptr<Communicator>> communicators_;
  std::set<int> with_pairs_;  // devices
  struct Together {
    Operation operation;
    c10::intrusive_ptr<CheckedWork> work;
  };
  std::optional<Together> together_;
};

}  // namespace pd2
