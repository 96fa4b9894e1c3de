// Collectives that are delayed, for tests.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace pd2 {

// Begins every collective of a process group after a delay drawn evenly between two bounds, in the
// order of the calls. Until then nothing reads the tensors, nothing is written to them and the work
// is not completed. This exposes a tensor that is used too early or freed too soon, and, as every
// call waits for Python's lock, who keeps that lock from a thread that makes one.
class DelayedBackend : public c10d::Backend {
 public:
  using Seconds = std::chrono::duration<double>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // Throws ValueError unless 0 <= shortest <= longest.
  DelayedBackend(c10::intrusive_ptr<c10d::Backend> backend, Seconds shortest, Seconds longest,
                 std::uint64_t seed);
  ~DelayedBackend() override;
  DelayedBackend(const DelayedBackend&) = delete;
  DelayedBackend& operator=(const DelayedBackend&) = delete;

  const std::string getBackendName() const override { return "delayed"; }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

 private:
  class Delayed;

  WorkPtr later(std::function<WorkPtr()> begin);
  void loop();

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> seconds_;
  std::deque<c10::intrusive_ptr<Delayed>> to_begin_;
  std::vector<c10::intrusive_ptr<Delayed>> begun_;
  bool is_ended_ = false;
  std::thread thread_;
};

}  // namespace pd2
