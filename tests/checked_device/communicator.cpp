#include "checked_device/communicator.h"

#include "checked_device/allocator.h"
#include "checked_device/streams.h"
#include "checked_device/without_gil.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <pthread.h>
#include <stdexcept>
#include <string>
#include <utility>

namespace pd2 {

void CheckedWork::set_launched(StreamNumber stream, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  stream_ = stream;
  clock_ = clock;
}

Clock CheckedWork::clock() {
  const std::lock_guard lock(mutex_);
  return clock_;
}

bool CheckedWork::isCompleted() {
  if (!c10d::Work::isCompleted()) return false;
  Runtime::instance().query(clock());  // the host knows it from now on
  return true;
}

bool CheckedWork::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout) {
    const WithoutGil nobody_waits_for_python;
    std::unique_lock lock(mutex_);
    TORCH_CHECK(cv_.wait_for(lock, timeout, [&] { return completed_; }),
                "checked: a transfer took longer than ", timeout.count(), " ms");
  }
  synchronize();
  return true;
}

void CheckedWork::synchronize() {
  if (const auto error = exception()) std::rethrow_exception(error);
  auto& runtime = Runtime::instance();
  runtime.wait(current_stream_number(device_), clock());
  if (!on_host_) return;
  runtime.join_host(clock(), "the host waits for a communicator");
  if (const auto error = exception()) std::rethrow_exception(error);
}

c10::intrusive_ptr<c10::ivalue::Future> CheckedWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                               std::vector<c10::Device>{checked_device(device_)});
  const c10::StreamGuard guard(stream_of(stream_));
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

Communicator::Communicator(int device, std::unique_ptr<Wire> wire)
    : device_(device),
      stream_(Runtime::instance().add_stream(device, -1)),
      wire_(std::move(wire)),
      thread_([this] { run_tasks(); }) {}

Communicator::~Communicator() {
  abort();
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  const WithoutGil nobody_waits_for_python;
  thread_.join();
}

void Communicator::post(Transfer transfer) {
  auto& runtime = Runtime::instance();
  runtime.join(stream_, runtime.clock_of(current_stream_number(device_)));
  Task task{std::move(transfer), nullptr};
  const WithoutGil nobody_waits_for_python;
  const std::lock_guard one_after_the_other(posting_);
  task.launch = runtime.begin_transfer(stream_, task.transfer.name, task.transfer.uses);
  task.transfer.work->set_launched(stream_, runtime.clock_of(stream_));
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void Communicator::abort() { wire_->abort(); }

void Communicator::finish() {
  const WithoutGil nobody_waits_for_python;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return tasks_.empty(); });
}

void Communicator::run_tasks() {
  pthread_setname_np(pthread_self(), "checked_wire");
  while (true) {
    Task* task = nullptr;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = &tasks_.front();
    }
    run(*task);
    Task done;
    {
      const std::lock_guard lock(mutex_);
      done = std::move(tasks_.front());
      tasks_.pop_front();
    }
    changed_.notify_all();
    for (const auto& tensor : done.transfer.tensors) {
      keep_for_stream(tensor.storage().data_ptr(), stream_);
    }
  }
}

void Communicator::run(Task& task) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto& runtime = Runtime::instance();
  runtime.await_turn(task.launch);
  std::exception_ptr error;
  try {
    for (const auto& part : task.transfer.parts) part(*wire_);
    wire_->finish();
  } catch (const std::exception& failure) {
    error = std::current_exception();
    if (wire_->spin_until_aborted()) {
      error = std::make_exception_ptr(std::runtime_error("checked: the communicator was aborted"));
    } else {
      runtime.report("'" + task.transfer.name + "' failed: " + failure.what());
    }
  }
  // The error is there for whoever learns that the device is through.
  task.transfer.work->end(error);
  runtime.finish(task.launch);
}

}  // namespace pd2
