// Messages that are delayed, for tests and benchmarks.
#pragma once

#include "delays/delayed_calls.h"
#include "engine/channels/channel.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace pd2 {

// Hands every message over to another sender after a delay, in another thread: neither end waits
// meanwhile, as if the message were on its way. Messages stay in order, so one may be held up by
// the one before. What the other sender throws, the next send() throws.
class DelayedSender : public Sender {
 public:
  using Seconds = DelayedCalls::Seconds;

  // The delays are those of DelayedCalls.
  DelayedSender(std::shared_ptr<Sender> sender, Seconds shortest, Seconds longest,
                std::uint64_t seed)
      : sender_(std::move(sender)), calls_(shortest, longest, seed) {}
  ~DelayedSender() override { abort(); }

  void abort() override {
    {
      const std::lock_guard lock(mutex_);
      error_ = std::make_exception_ptr(ChannelAborted());
    }
    sender_->abort();
  }
  std::int64_t buffer_bytes() const override { return sender_->buffer_bytes(); }

 private:
  void transfer(LayoutId layout, Message message) override {
    if (const std::exception_ptr error = this->error()) {
      std::rethrow_exception(error);
    }
    calls_.add([this, layout, message = std::move(message)]() mutable {
      if (error()) {
        return;
      }
      try {
        sender_->send(layout, std::move(message));
      } catch (...) {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
      }
    });
  }
  std::exception_ptr error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  const std::shared_ptr<Sender> sender_;
  std::mutex mutex_;
  std::exception_ptr error_;  // after which nothing is sent
  DelayedCalls calls_;        // ends first
};

}  // namespace pd2
