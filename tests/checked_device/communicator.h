// The ranks that a group's transfers go between, with a stream and a thread of their own.

#pragma once

#include "checked_device/runtime.h"
#include "checked_device/wire.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pd2 {

// Like NCCL's: wait() makes the current stream wait and returns at once, unless a timeout is given
// or the host has to wait (a barrier). Any thread may call it.
class CheckedWork final : public c10d::Work {
 public:
  CheckedWork(int device, bool on_host, std::vector<at::Tensor> outputs)
      : device_(device), on_host_(on_host), outputs_(std::move(outputs)) {}

  // Once it is on its stream.
  void set_launched(StreamNumber stream, const Clock& clock);
  void end(std::exception_ptr error) { finish(error); }

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  Clock clock();

  const int device_;
  const bool on_host_;
  const std::vector<at::Tensor> outputs_;
  StreamNumber stream_ = 0;
  Clock clock_;
};

// One or several operations that run as one.
struct Transfer {
  std::string name;
  std::vector<Use> uses;
  std::vector<at::Tensor> tensors;  // held until it is over
  std::vector<std::function<void(Wire&)>> parts;
  c10::intrusive_ptr<CheckedWork> work;
};

class Communicator {
 public:
  // The wire is shared with nobody.
  Communicator(int device, std::unique_ptr<Wire> wire);
  // Aborts, and waits for the thread.
  ~Communicator();

  // The transfer follows what the current stream has so far.
  void post(Transfer transfer);
  // All that is posted fails at once, but for what its stream still waits for.
  void abort();
  // Until all posted is over, or failed.
  void finish();

 private:
  struct Task {
    Transfer transfer;
    LaunchPtr launch;
  };

  void run_tasks();
  void run(Task& task);

  const int device_;
  const StreamNumber stream_;
  const std::unique_ptr<Wire> wire_;
  std::mutex posting_;  // tasks are queued in the order of the stream
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace pd2
