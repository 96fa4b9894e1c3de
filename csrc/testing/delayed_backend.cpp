#include "testing/delayed_backend.h"

#include "core/check.h"
#include "engine/this_thread.h"

#include <pybind11/pybind11.h>

#include <utility>

namespace pd2 {

// What is going to be begun; later what has been.
class DelayedBackend::Delayed : public c10d::Work {
 public:
  using Clock = std::chrono::steady_clock;

  Delayed(std::function<WorkPtr()> begin, Clock::time_point due)
      : begin_(std::move(begin)), due_(due) {}

  Clock::time_point due() const { return due_; }

  // Without the lock: collectives may have to wait for Python's, whose holder may ask for this one.
  void begin() {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;
    }
    WorkPtr begun;
    std::exception_ptr error;
    try {
      begun = begin_();
    } catch (...) {
      error = std::current_exception();
    }
    bool is_aborted = false;
    {
      const std::lock_guard lock(mutex_);
      is_aborted = error_ != nullptr;
      begun_ = begun;
      if (!is_aborted) error_ = error;
    }
    changed_.notify_all();
    if (is_aborted && begun) begun->abort();
  }

  // Before it begins, or a receive after that.
  void abort() override {
    std::unique_lock lock(mutex_);
    if (begun_) {
      const WorkPtr work = begun_;
      lock.unlock();
      work->abort();
    } else if (!error_) {
      error_ = std::make_exception_ptr(std::runtime_error("aborted before it began"));
      changed_.notify_all();
    }
  }

  bool isCompleted() override {
    const std::lock_guard lock(mutex_);
    return error_ || (begun_ && begun_->isCompleted());
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    std::unique_lock lock(mutex_);
    const auto is_settled = [this] { return error_ || begun_; };
    if (timeout == kNoTimeout) {
      changed_.wait(lock, is_settled);
    } else if (!changed_.wait_until(lock, until, is_settled)) {
      throw std::runtime_error("not begun in time");
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
    const WorkPtr work = begun_;
    lock.unlock();
    if (timeout == kNoTimeout) {
      return work->wait();
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    return work->wait(std::max(left, std::chrono::milliseconds(1)));
  }

 private:
  const std::function<WorkPtr()> begin_;
  const Clock::time_point due_;
  std::mutex mutex_;
  std::condition_variable changed_;
  WorkPtr begun_;
  std::exception_ptr error_;
};

DelayedBackend::DelayedBackend(c10::intrusive_ptr<c10d::Backend> backend, Seconds shortest,
                               Seconds longest, std::uint64_t seed)
    : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)), random_(seed) {
  PD2_CHECK(shortest.count() >= 0 && longest >= shortest, "delay: from ", shortest.count(), " to ",
            longest.count(), " seconds: it must be 0 <= shortest <= longest");
  seconds_ = std::uniform_real_distribution(shortest.count(), longest.count());
  thread_ = std::thread([this] { loop(); });
}

DelayedBackend::~DelayedBackend() {
  {
    const std::lock_guard lock(mutex_);
    is_ended_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

DelayedBackend::WorkPtr DelayedBackend::allreduce(Tensors& tensors,
                                                  const c10d::AllreduceOptions& options) {
  return later([=, this]() mutable { return backend_->allreduce(tensors, options); });
}

DelayedBackend::WorkPtr DelayedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  return later([=, this]() mutable { return backend_->allgather(outputs, inputs, options); });
}

DelayedBackend::WorkPtr DelayedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& options) {
  return later([=, this]() mutable { return backend_->gather(outputs, inputs, options); });
}

DelayedBackend::WorkPtr DelayedBackend::broadcast(Tensors& tensors,
                                                  const c10d::BroadcastOptions& options) {
  return later([=, this]() mutable { return backend_->broadcast(tensors, options); });
}

DelayedBackend::WorkPtr DelayedBackend::send(Tensors& tensors, int destination, int tag) {
  return later([=, this]() mutable { return backend_->send(tensors, destination, tag); });
}

DelayedBackend::WorkPtr DelayedBackend::recv(Tensors& tensors, int source, int tag) {
  return later([=, this]() mutable { return backend_->recv(tensors, source, tag); });
}

DelayedBackend::WorkPtr DelayedBackend::later(std::function<WorkPtr()> begin) {
  { const pybind11::gil_scoped_acquire needed; }  // as by a backend in Python
  c10::intrusive_ptr<Delayed> work;
  std::vector<c10::intrusive_ptr<Delayed>> begun;  // goes without the lock
  {
    const std::lock_guard lock(mutex_);
    begun.swap(begun_);
    const auto delay =
        std::chrono::duration_cast<Delayed::Clock::duration>(Seconds(seconds_(random_)));
    work = c10::make_intrusive<Delayed>(std::move(begin), Delayed::Clock::now() + delay);
    to_begin_.push_back(work);
  }
  changed_.notify_one();
  return work;
}

void DelayedBackend::loop() {
  name_this_thread("pd2 delay");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ended_ || !to_begin_.empty(); });
    if (!is_ended_) {
      changed_.wait_until(lock, to_begin_.front()->due(), [this] { return is_ended_; });
    }
    if (is_ended_) {
      for (const auto& work : to_begin_) work->abort();
      return;
    }
    Delayed& next = *to_begin_.front();
    lock.unlock();
    next.begin();
    lock.lock();
    // Kept until another thread drops it: freeing tensors may need Python's lock, whose holder may
    // be waiting for this thread.
    begun_.push_back(std::move(to_begin_.front()));
    to_begin_.pop_front();
  }
}

}  // namespace pd2
