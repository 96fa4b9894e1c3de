// Messages that are delayed, for tests and benchmarks.
#pragma once

#include "engine/channels/channel.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace pd2 {

// Hands every message over to another sender after a delay drawn evenly between two bounds, in
// another thread: neither end waits meanwhile, as if the message were on its way. Messages stay
// in order, so one may be held up by the one before. What the other sender throws, the next send()
// throws.
class DelayedSender : public Sender {
 public:
  using Seconds = std::chrono::duration<double>;

  // Throws ValueError unless 0 <= shortest <= longest.
  DelayedSender(std::shared_ptr<Sender> sender, Seconds shortest, Seconds longest,
                std::uint64_t seed);
  ~DelayedSender() override;
  DelayedSender(const DelayedSender&) = delete;
  DelayedSender& operator=(const DelayedSender&) = delete;

  void send(LayoutId layout, Message message) override;
  void abort() override;
  std::int64_t buffer_bytes() const override { return sender_->buffer_bytes(); }

 private:
  struct Delayed {
    std::chrono::steady_clock::time_point due;
    LayoutId layout;
    Message message;
  };

  void loop();

  const std::shared_ptr<Sender> sender_;
  std::mt19937_64 random_;  // of the sending thread
  std::uniform_real_distribution<double> seconds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Delayed> under_way_;
  std::exception_ptr error_;
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace pd2
