// Messages between two processes, over a two-rank torch.distributed group.
#pragma once

#include "engine/channels/channel.h"
#include "engine/channels/message_layouts.h"
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

// Where headers travel: as tensors of the host, of which a device's group knows nothing.
struct HeaderPath {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int number = 0;  // of the other end in that group
  int tag = 0;     // no other messages between the two have it there
};

// The other end of a channel.
struct Peer {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int number = 0;                              // in the group
  int rank = 0;                                // among all processes, which errors name
  c10::Device device = at::kCPU;               // of this end's tensors
  std::shared_ptr<SharedRing> ring = nullptr;  // null: everything goes through the group
  std::optional<HeaderPath> headers{};         // none: through the group
  bool pins_memory = false;                    // of the host, for messages that come
};

// One group per edge and direction, so a forward message never waits behind a backward one. The
// first message of a layout is preceded by its header: what a receive buffer is allocated from, so
// that later messages need none and can be received ahead. The tensors follow as bytes in storage
// order, keeping their strides, because the next stage's kernels (and so their bits) may depend on
// them.
//
// Between processes of one machine there may be a ring, which messages go through that fit in.
//
// A device's group only enqueues transfers: its streams wait, no thread does. All of a message is
// one group call there. A send is kept until it is complete and nothing waits for it; a receive
// holds up what the device is given after it, so none is posted before its time.
class ProcessGroupSender : public Sender {
 public:
  // At most `max_unawaited` messages of the host are on their way before send() waits for the
  // oldest.
  ProcessGroupSender(Peer peer, std::size_t max_unawaited);
  // Makes the connection, which the first message would make otherwise. The other end calls it too;
  // both wait for each other.
  void connect();
  void abort() override;
  bool tell_cut_off() override { return !peer_.device.is_cpu(); }
  void cut_off() override;
  // Of messages through the group: what is kept until they have been sent.
  std::int64_t buffer_bytes() const override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Unawaited {
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;  // what they send
    std::int64_t bytes = 0;
  };
  void lay_out(LayoutId layout, Message& message) override;
  void transfer(LayoutId layout, Message message) override;
  void send_header(const std::vector<at::Tensor>& words);
  void send_through_ring(const std::vector<at::Tensor>& tensors, std::size_t bytes);
  void keep(std::deque<Unawaited>& sent, Unawaited newest);
  void drop_completed();

  const Peer peer_;
  const HeaderPath headers_;
  const double timeout_ = timeout_of(headers_.group.get());  // seconds
  const std::size_t max_unawaited_;
  int tag_ = 0;
  SentLayouts layouts_{peer_.device};
  mutable std::mutex mutex_;  // guards what abort() touches
  std::deque<Unawaited> sent_headers_, sent_;
  bool aborted_ = false;
};

class ProcessGroupReceiver : public Receiver {
 public:
  // `posted_ahead`: how many messages may have a buffer waiting for them without being asked for
  // by post().
  ProcessGroupReceiver(Peer peer, std::size_t posted_ahead);
  void connect();  // as the sender's
  void expect(LayoutId layout) override;
  void post() override;
  void prepare() override;
  Message receive() override;
  void abort() override;
  bool tell_cut_off() override { return !peer_.device.is_cpu(); }
  void cut_off() override;
  std::int64_t buffer_bytes() const override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Posted {
    Message message;
    std::size_t ring_bytes = 0;  // what comes through the ring
    std::vector<Work> works;
  };
  bool is_idle() const;                     // nothing has memory
  void begin_next();                        // waits for its header, if the layout is new
  bool make_room();                         // holds mutex_; false if its layout is not known yet
  void begin(Posted& next);                 // holds mutex_
  void post_ahead();                        // holds mutex_
  std::optional<Message> receive_header();  // none: the message is void
  void receive_through_ring(const Posted& next);
  void wait(const Work& work);

  const Peer peer_;
  const HeaderPath headers_;
  const double timeout_ = timeout_of(headers_.group.get());  // seconds
  const std::size_t posted_ahead_;
  int tag_ = 0;
  std::map<LayoutId, Message> known_;  // headers
  mutable std::mutex mutex_;
  std::deque<LayoutId> expected_;  // not posted yet
  std::deque<Posted> posted_;
  std::vector<Work> waiting_;  // what the host waits for outside posted_
  bool aborted_ = false;
};

}  // namespace pd2
