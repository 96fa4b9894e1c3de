#include "checked_device/wire.h"

#include <ATen/ATen.h>

#include <exception>
#include <stdexcept>
#include <utility>

namespace pd2 {
namespace {

std::vector<at::Tensor> bytes_of(const void* data, std::size_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte)};
}

}  // namespace

void Wire::begin(const WorkPtr& work) {
  const std::lock_guard lock(mutex_);
  begun_.push_back(work);
  last_begun_ = std::chrono::steady_clock::now();
  if (aborted_) work->abort();
}

void Wire::begin_send(const void* data, std::size_t bytes, int peer) {
  if (bytes == 0) return;
  auto tensors = bytes_of(data, bytes);
  begin(gloo_->send(tensors, peer, tag_));
}

void Wire::begin_receive(void* data, std::size_t bytes, int peer) {
  if (bytes == 0) return;
  auto tensors = bytes_of(data, bytes);
  begin(gloo_->recv(tensors, peer, tag_));
}

void Wire::send_eagerly(const void* data, std::size_t bytes, int peer) {
  if (bytes == 0) return;
  std::vector<at::Tensor> copy = {bytes_of(data, bytes)[0].clone()};
  const auto work = gloo_->send(copy, peer, tag_);  // holds the copy
  const std::lock_guard lock(mutex_);
  eager_.push_back(work);
  if (aborted_) work->abort();
}

void Wire::finish() {
  std::vector<WorkPtr> begun;
  {
    const std::lock_guard lock(mutex_);
    begun = begun_;
  }
  std::exception_ptr error;
  for (const auto& work : begun) {
    try {
      work->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  const std::lock_guard lock(mutex_);
  begun_.clear();
  if (aborted_) throw std::runtime_error("aborted");
  if (error) std::rethrow_exception(error);
}

void Wire::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
  for (const auto& work : begun_) work->abort();
  for (const auto& work : eager_) work->abort();
}

bool Wire::spin_until_aborted() {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, last_begun_ + timeout_, [&] { return aborted_; });
}

}  // namespace pd2
