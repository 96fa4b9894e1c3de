// Collectives that are delayed, for tests.
#pragma once

#include "delays/delayed_calls.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

// What is going to be begun; later what has been.
class DelayedWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit DelayedWork(std::function<WorkPtr()> begin) : begin_(std::move(begin)) {}

  void begin() {
    if (is_settled_.exchange(true)) {
      return;
    }
    try {
      const WorkPtr work = begin_();
      promise_.set_value(work);
      tell_when_done(*work);
    } catch (...) {
      promise_.set_exception(std::current_exception());
      future_->setErrorIfNeeded(std::current_exception());
    }
    if (is_aborted_) {
      abort();
    }
  }

  // Before it begins, or a receive after that.
  void abort() override {
    is_aborted_ = true;
    const WorkPtr work = drop() ? nullptr : begun_or_null();
    if (work) {
      work->abort();
    }
  }

  // It will not begin; false if it has.
  bool drop() {
    if (is_settled_.exchange(true)) {
      return false;
    }
    const auto error = std::make_exception_ptr(std::runtime_error("aborted before it began"));
    promise_.set_exception(error);
    future_->setErrorIfNeeded(error);
    return true;
  }

  // Of a collective, not of a message.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  bool isCompleted() override {
    const WorkPtr work = begun_or_null();
    return work ? work->isCompleted() : is_ready(std::chrono::milliseconds(0));
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout) {
      return begun_.get()->wait();
    }
    const auto until = std::chrono::steady_clock::now() + timeout;
    if (!is_ready(timeout)) {
      throw std::runtime_error("not begun in time");
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    return begun_.get()->wait(std::max(left, std::chrono::milliseconds(1)));
  }

 private:
  void tell_when_done(c10d::Work& work) const {
    c10::intrusive_ptr<c10::ivalue::Future> done;
    try {
      done = work.getFuture();
    } catch (const std::exception&) {  // messages have none
      return;
    }
    done->addCallback([future = future_](c10::ivalue::Future& its) {
      if (its.hasError()) {
        future->setErrorIfNeeded(its.exception_ptr());
      } else {
        future->markCompleted(its.constValue());
      }
    });
  }
  bool is_ready(std::chrono::milliseconds timeout) const {
    return begun_.wait_for(timeout) == std::future_status::ready;
  }
  // Null also if it could not begin.
  WorkPtr begun_or_null() const {
    try {
      return is_ready(std::chrono::milliseconds(0)) ? begun_.get() : nullptr;
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  const std::function<WorkPtr()> begin_;
  std::atomic<bool> is_settled_ = false;  // somebody is setting the promise, or has
  std::atomic<bool> is_aborted_ = false;
  std::promise<WorkPtr> promise_;
  const std::shared_future<WorkPtr> begun_ = promise_.get_future().share();
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

// Begins every collective of a process group after a delay drawn evenly between two bounds, in the
// order of the calls. Until then nothing reads the tensors, nothing is written to them and the work
// is not completed. This exposes a tensor that is used too early or freed too soon, and, as every
// call waits for Python's lock, who keeps that lock from a thread that makes one.
class DelayedBackend : public c10d::Backend {
 public:
  using Seconds = DelayedCalls::Seconds;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Sizes = std::vector<std::int64_t>;

  // The delays are those of DelayedCalls.
  DelayedBackend(c10::intrusive_ptr<c10d::Backend> backend, Seconds shortest, Seconds longest,
                 std::uint64_t seed)
      : Backend(backend->getRank(), backend->getSize()),
        backend_(std::move(backend)),
        calls_(shortest, longest, seed) {}

  const std::string getBackendName() const override { return "delayed"; }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return later([=, this]() mutable { return backend_->allreduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return later([=, this]() mutable { return backend_->allgather(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return later([=, this]() mutable { return backend_->_allgather_base(output, input, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_sizes,
                        Sizes& input_sizes, const c10d::AllToAllOptions& options) override {
    return later([=, this]() mutable {
      return backend_->alltoall_base(output, input, output_sizes, input_sizes, options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return later([=, this]() mutable { return backend_->gather(outputs, inputs, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return later([=, this]() mutable { return backend_->broadcast(tensors, options); });
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return later([=, this]() mutable { return backend_->send(tensors, destination, tag); });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return later([=, this]() mutable { return backend_->recv(tensors, source, tag); });
  }

 private:
  WorkPtr later(std::function<WorkPtr()> begin) {
    { const pybind11::gil_scoped_acquire needed; }  // as by a backend in Python
    auto work = c10::make_intrusive<DelayedWork>(std::move(begin));
    // Also where the call is dropped before it is due: somebody may wait for the work.
    const auto drop = [work](DelayedWork*) { work->drop(); };
    calls_.add([held = std::shared_ptr<DelayedWork>(work.get(), drop)] { held->begin(); });
    return work;
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  DelayedCalls calls_;  // ends first
};

}  // namespace pd2
