#include "engine/channels/local_channel.h"

namespace pd2 {

void LocalChannel::send(LayoutId, Message message) {
  for (at::Tensor& tensor : message.tensors) {
    if (tensor.defined() && tensor.device() != destination_) {
      tensor = tensor.to(destination_);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
  }
  arrived_.notify_one();
}

Message LocalChannel::receive() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [&] { return aborted_ || !messages_.empty(); });
  if (aborted_) {
    throw ChannelAborted();
  }
  Message message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void LocalChannel::abort() {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
  }
  arrived_.notify_all();
}

}  // namespace pd2
