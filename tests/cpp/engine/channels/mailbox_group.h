// A process group of two ranks that are in this process.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pd2 {

// What two ranks of a group have sent to each other; messages match by tag.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::deque<at::Tensor>> letters;  // in the order of their sending
  std::map<int, int> taken;
};

class MailboxWork : public c10d::Work {
 public:
  explicit MailboxWork(std::shared_ptr<Mailbox> mailbox, std::function<bool()> try_to_complete)
      : mailbox_(std::move(mailbox)), try_to_complete_(std::move(try_to_complete)) {}
  bool wait(std::chrono::milliseconds) override {
    std::unique_lock lock(mailbox_->mutex);
    mailbox_->changed.wait(lock, [&] { return aborted_ || try_to_complete_(); });
    mailbox_->changed.notify_all();
    return !aborted_;
  }
  void abort() override {
    const std::lock_guard lock(mailbox_->mutex);
    aborted_ = true;
    mailbox_->changed.notify_all();
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::function<bool()> try_to_complete_;
  bool aborted_ = false;
};

// A process group of two ranks in this process. A send completes when it has been received.
class MailboxGroup : public c10d::ProcessGroup {
 public:
  MailboxGroup(int rank, std::shared_ptr<Mailbox> mailbox)
      : c10d::ProcessGroup(rank, 2), mailbox_(std::move(mailbox)) {}

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int, int tag) override {
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->letters[tag].push_back(tensors[0].clone());
    mailbox_->changed.notify_all();
    const int number = ++sent_[tag];
    return c10::make_intrusive<MailboxWork>(
        mailbox_, [box = mailbox_.get(), tag, number] { return box->taken[tag] >= number; });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int, int tag) override {
    return c10::make_intrusive<MailboxWork>(
        mailbox_, [box = mailbox_.get(), tag, tensor = tensors[0]]() mutable {
          if (box->letters[tag].empty()) {
            return false;
          }
          const at::Tensor letter = box->letters[tag].front();
          // As a transport does, this moves bytes: the shapes must agree before.
          EXPECT_EQ(letter.numel(), tensor.numel());
          EXPECT_EQ(letter.scalar_type(), tensor.scalar_type());
          EXPECT_TRUE(tensor.is_contiguous());
          tensor.copy_(letter);
          box->letters[tag].pop_front();
          ++box->taken[tag];
          return true;
        });
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::map<int, int> sent_;
};

}  // namespace pd2
