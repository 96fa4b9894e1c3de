#include "engine/channels/staged_channel.h"

#include "engine/this_thread.h"

#include <ATen/ops/empty_like.h>

#include <utility>

namespace pd2 {
namespace {

// Memory for copies of the tensors, which are dense, strides included.
std::vector<at::Tensor> empty_like(const std::vector<at::Tensor>& tensors, c10::Device device,
                                   bool pinned) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& tensor : tensors) {
    const auto options = at::TensorOptions().device(device).pinned_memory(pinned);
    made.push_back(tensor.defined() ? at::empty_like(tensor, options) : at::Tensor());
  }
  return made;
}

// Copies each of `from` into that of `to` on a stream. Until the fence is done all are to be kept.
Fence copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to,
           const MaybeStream& stream) {
  const OnStream on(stream);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i].defined()) {
      to[i].copy_(from[i], /*non_blocking=*/true);
    }
  }
  return Fence::of(stream);
}

}  // namespace

StagedSender::StagedSender(std::shared_ptr<Sender> hosts, c10::Device device,
                           std::shared_ptr<Fault> fault)
    : hosts_(std::move(hosts)),
      device_(device),
      fault_(std::move(fault)),
      thread_([this] { hand_over(); }) {}

StagedSender::~StagedSender() {
  abort();
  thread_.join();
}

void StagedSender::lay_out(LayoutId layout, Message& message) {
  if (!message.is_void) {  // which has no content
    layouts_.lay_out(layout, message);
  }
}

void StagedSender::transfer(LayoutId layout, Message message) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) {
      std::rethrow_exception(error_);
    }
  }
  Staged staged{layout};
  if (!message.is_void) {
    staged.sources = std::move(message.tensors);
    message.tensors = empty_like(staged.sources, at::kCPU, !device_.is_cpu());
    Fence::here(device_).hold_back(copies_);
    staged.copied = copy(staged.sources, message.tensors, copies_);
  }
  staged.message = std::move(message);
  {
    const std::lock_guard lock(mutex_);
    staged_.push_back(std::move(staged));
  }
  changed_.notify_all();
}

void StagedSender::hand_over() {
  name_this_thread("pd2 hands over");
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return error_ || !staged_.empty(); });
    if (error_) {
      return;
    }
    Staged& next = staged_.front();  // stays where it is: only this thread removes it
    lock.unlock();
    try {
      next.copied.wait();
      lock.lock();
      next.sources.clear();
      lock.unlock();
      hosts_->send(next.layout, next.message);
      lock.lock();
      staged_.pop_front();
    } catch (...) {
      fail(std::current_exception());
      return;
    }
  }
}

void StagedSender::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) {  // a consequence of the end
      return;
    }
    error_ = error;
  }
  // There may be no further send() that could throw it.
  Failure failure = failure_of(error, fault_->rank());
  failure.text = "sending a message to another process failed: " + failure.cause;
  fault_->raise(std::move(failure));
}

void StagedSender::abort() {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) {
      error_ = std::make_exception_ptr(ChannelAborted());
    }
  }
  changed_.notify_all();
  hosts_->abort();
}

std::int64_t StagedSender::buffer_bytes() const {
  std::int64_t sum = hosts_->buffer_bytes();
  const std::lock_guard lock(mutex_);
  for (const Staged& staged : staged_) {
    sum += staged.message.bytes();
    for (const at::Tensor& source : staged.sources) {
      sum += source.defined() ? static_cast<std::int64_t>(source.nbytes()) : 0;
    }
  }
  return sum;
}

Message StagedReceiver::receive() {
  Message message = hosts_->receive();
  if (message.is_void) {
    return message;
  }
  Source source{{}, std::move(message.tensors)};
  {
    // In memory of this stream, so that what others do meanwhile need not be waited for.
    const OnStream on(copies_);
    message.tensors = empty_like(source.tensors, device_, /*pinned=*/false);
  }
  source.bytes = message.bytes();
  source.copied = copy(source.tensors, message.tensors, copies_);
  const MaybeStream here = stream_here(device_);
  source.copied.hold_back(here);
  for (const at::Tensor& tensor : message.tensors) {
    use_on(tensor, here);
  }
  const std::lock_guard lock(mutex_);
  sources_.push_back(std::move(source));
  while (!sources_.empty() && sources_.front().copied.is_done()) {
    sources_.pop_front();
  }
  return message;
}

std::int64_t StagedReceiver::buffer_bytes() const {
  std::int64_t sum = hosts_->buffer_bytes();
  const std::lock_guard lock(mutex_);
  for (const Source& source : sources_) {
    sum += source.bytes;
  }
  return sum;
}

}  // namespace pd2
