// Messages between two processes, over a two-rank torch.distributed group.
#pragma once

#include "engine/channels/channel.h"
#include "engine/with_peer.h"
#include "transport/shared_ring.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

// The other end of a channel.
struct Peer {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int number = 0;                              // in the group
  int rank = 0;                                // among all processes, which errors name
  c10::Device device = at::kCPU;               // of this end's tensors
  std::shared_ptr<SharedRing> ring = nullptr;  // null: everything goes through the group
};

// One group per edge and direction, so a forward message never waits behind a backward one. The
// first message of a layout is preceded by its header: what a receive buffer is allocated from, so
// that later messages need none and can be received ahead. The tensors follow in storage order,
// keeping their strides, because the next stage's kernels (and so their bits) may depend on them.
//
// Between processes of one machine there may be a ring, which messages go through that fit in.
class ProcessGroupSender : public Sender {
 public:
  // At most `max_unawaited` messages are on their way before send() waits for the oldest.
  ProcessGroupSender(Peer peer, std::size_t max_unawaited)
      : peer_(std::move(peer)), max_unawaited_(max_unawaited) {}
  void send(LayoutId layout, Message message) override;
  void abort() override;
  std::int64_t buffer_bytes() const override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  void post(std::vector<Work>& works, at::Tensor flat);
  // Tensor i of the message as its header says that it is; throws ValueError if it is another one.
  at::Tensor laid_out(const Message& message, std::size_t i, const Message& header) const;
  void await_oldest(std::vector<Work> newest);

  const Peer peer_;
  const double timeout_ = timeout_of(peer_.group.get());  // seconds
  const std::size_t max_unawaited_;
  int tag_ = 0;
  std::map<LayoutId, Message> headers_;      // of tensors without memory
  std::mutex mutex_;                         // guards what abort() touches
  std::deque<std::vector<Work>> unawaited_;  // a Work keeps its tensor alive
  bool aborted_ = false;
};

class ProcessGroupReceiver : public Receiver {
 public:
  // `posted_ahead`: how many messages may have a buffer waiting for them.
  ProcessGroupReceiver(Peer peer, std::size_t posted_ahead)
      : peer_(std::move(peer)), posted_ahead_(posted_ahead) {}
  void expect(LayoutId layout) override;
  Message receive() override;
  void abort() override;
  std::int64_t buffer_bytes() const override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Posted {
    Message message;
    std::size_t ring_bytes = 0;  // what comes through the ring
    std::vector<Work> works;
  };
  Work post(at::Tensor flat);
  void post_known_layouts();                // holds mutex_
  std::optional<Message> receive_header();  // none: the message is void
  void wait(const Work& work);

  const Peer peer_;
  const double timeout_ = timeout_of(peer_.group.get());  // seconds
  const std::size_t posted_ahead_;
  int tag_ = 0;
  std::map<LayoutId, Message> headers_;  // of tensors without memory
  mutable std::mutex mutex_;
  std::deque<LayoutId> expected_;  // not posted yet
  std::deque<Posted> posted_;
  std::vector<Work> waiting_;  // what receive() waits for outside posted_
  bool aborted_ = false;
};

}  // namespace pd2
