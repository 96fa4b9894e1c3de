#include "engine/channels/process_group_channel.h"

#include "core/check.h"
#include "engine/channels/coalescing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

namespace pd2 {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// A stream of messages shares one group: the running tag matches the n-th send to the n-th receive.
constexpr int kTags = 1 << 15;
// Headers, where they share it.
constexpr int kHeaderTag = kTags;

// In place of a header's length: no header and no tensors follow.
constexpr std::int64_t kIsVoid = -1;

// How many bytes of a message go through the ring: all or none.
std::size_t bytes_through(const SharedRing* ring, const Message& header) {
  const std::size_t bytes = ring ? static_cast<std::size_t>(header.bytes()) : 0;
  return bytes <= SharedRing::kMaxMessageBytes ? bytes : 0;
}

HeaderPath header_path(const Peer& peer) {
  return peer.headers.value_or(HeaderPath{peer.group, peer.number, kHeaderTag});
}

// The bytes of those tensors that have any, as vectors: transports know few dtypes.
std::vector<at::Tensor> bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.numel() > 0) {
      bytes.push_back(storage_order(tensor).view(at::kByte));
    }
  }
  return bytes;
}

template <typename Transfers>
void abort_all(const Transfers& transfers) {
  for (const auto& transfer : transfers) {
    for (const Work& work : transfer.works) {
      work->abort();
    }
  }
}

// Begins the transfer of a message by `begin`, a tensor at a time.
template <typename Begin>
std::vector<Work> begin_all(const Peer& peer, std::vector<at::Tensor> bytes, Begin begin) {
  std::vector<Work> works;
  std::optional<Coalescing> as_one;
  const c10::DeviceType type = peer.device.type();
  if (!bytes.empty() && Coalescing::is_possible(*peer.group, type)) {
    as_one.emplace(*peer.group, type);
  }
  for (at::Tensor& tensor : bytes) {
    std::vector<at::Tensor> one{tensor};
    const Work work = begin(one);
    if (!as_one) {
      works.push_back(work);
    }
  }
  if (as_one) {
    works.push_back(as_one->end());
  }
  return works;
}

// Waits on the host until a byte has been sent or received by `begin`.
template <typename Begin>
void transfer_byte(const Peer& peer, double timeout, Begin begin,
                   const std::function<bool()>& is_aborted) {
  const at::Tensor byte = at::zeros({1}, at::TensorOptions(at::kByte).device(peer.device));
  with_peer(timeout, peer.rank, [&] {
    for (const Work& work : begin_all(peer, {byte}, begin)) {
      work->wait();
      while (!work->isCompleted() && !is_aborted()) {  // a device's stream waits, no thread does
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  });
  if (is_aborted()) {
    throw ChannelAborted();
  }
}

}  // namespace

ProcessGroupSender::ProcessGroupSender(Peer peer, std::size_t max_unawaited)
    : peer_(std::move(peer)), headers_(header_path(peer_)), max_unawaited_(max_unawaited) {}

void ProcessGroupSender::connect() {
  const auto send = [this](auto& bytes) {
    return peer_.group->send(bytes, peer_.number, kTags + 1);
  };
  transfer_byte(peer_, timeout_, send, [this] {
    const std::lock_guard lock(mutex_);
    return aborted_;
  });
}

void ProcessGroupSender::send_header(const std::vector<at::Tensor>& words) {
  Unawaited sent;
  for (const at::Tensor& tensor : words) {
    std::vector<at::Tensor> one{tensor};
    sent.works.push_back(with_peer(timeout_, peer_.rank, [&] {
      return headers_.group->send(one, headers_.number, headers_.tag);
    }));
    sent.tensors.push_back(tensor);
  }
  keep(sent_headers_, std::move(sent));
}

void ProcessGroupSender::lay_out(LayoutId layout, Message& message) {
  const Message* const header = layouts_.lay_out(layout, message);
  if (message.is_void) {
    send_header({at::tensor({kIsVoid}, at::kLong)});
  } else if (header != nullptr) {
    const at::Tensor packed = pack(*header);
    send_header({at::tensor({packed.numel()}, at::kLong), packed});
  }
}

void ProcessGroupSender::transfer(LayoutId, Message message) {
  if (message.is_void) {
    return;
  }
  const std::size_t ring_bytes = bytes_through(peer_.ring.get(), message);
  if (ring_bytes > 0) {
    send_through_ring(message.tensors, ring_bytes);
    return;
  }
  drop_completed();
  Unawaited sent;
  sent.bytes = message.bytes();
  sent.tensors = bytes_of(message.tensors);
  const auto begin = [this](auto& bytes) {
    const Work work = peer_.group->send(bytes, peer_.number, tag_);
    tag_ = (tag_ + 1) % kTags;
    return work;
  };
  sent.works =
      with_peer(timeout_, peer_.rank, [&] { return begin_all(peer_, sent.tensors, begin); });
  if (!sent.works.empty()) {
    keep(sent_, std::move(sent));
  }
}

void ProcessGroupSender::send_through_ring(const std::vector<at::Tensor>& tensors,
                                           std::size_t bytes) {
  std::byte* to = with_peer(timeout_, peer_.rank, [&] { return peer_.ring->begin_write(bytes); });
  if (to == nullptr) {
    throw ChannelAborted();
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      to += tensor.nbytes();
    }
  }
  peer_.ring->end_write();
}

void ProcessGroupSender::keep(std::deque<Unawaited>& sent, Unawaited newest) {
  std::vector<Work> oldest;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw ChannelAborted();
    }
    sent.push_back(std::move(newest));
    const bool on_host = &sent == &sent_headers_ || peer_.device.is_cpu();
    if (!on_host || sent.size() <= max_unawaited_) {
      return;
    }
    oldest = sent.front().works;  // stays listed, so that abort() can end the wait
  }
  for (const Work& work : oldest) {
    with_peer(timeout_, peer_.rank, [&] { work->wait(); });
  }
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    throw ChannelAborted();
  }
  sent.pop_front();
}

void ProcessGroupSender::drop_completed() {
  const std::lock_guard lock(mutex_);
  const auto is_complete = [](const Work& work) { return work->isCompleted(); };
  while (!peer_.device.is_cpu() && !sent_.empty() &&
         std::ranges::all_of(sent_.front().works, is_complete)) {
    sent_.pop_front();
  }
}

std::int64_t ProcessGroupSender::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t sum = peer_.ring ? static_cast<std::int64_t>(peer_.ring->used_bytes()) : 0;
  for (const Unawaited& sent : sent_) {
    sum += sent.bytes;
  }
  return sum;
}

void ProcessGroupSender::abort() {
  if (peer_.ring) {
    peer_.ring->abort();
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  abort_all(sent_headers_);
  if (peer_.device.is_cpu()) {
    abort_all(sent_);
  }
}

void ProcessGroupSender::cut_off() {
  const std::lock_guard lock(mutex_);
  abort_all(sent_);
}

ProcessGroupReceiver::ProcessGroupReceiver(Peer peer, std::size_t posted_ahead)
    : peer_(std::move(peer)), headers_(header_path(peer_)), posted_ahead_(posted_ahead) {}

void ProcessGroupReceiver::connect() {
  const auto receive = [this](auto& bytes) {
    return peer_.group->recv(bytes, peer_.number, kTags + 1);
  };
  transfer_byte(peer_, timeout_, receive, [this] {
    const std::lock_guard lock(mutex_);
    return aborted_;
  });
}

void ProcessGroupReceiver::expect(LayoutId layout) {
  const std::lock_guard lock(mutex_);
  expected_.push_back(layout);
  post_ahead();
}

void ProcessGroupReceiver::post() {
  if (posted_ahead_ == 0) {
    begin_next();
  }
}

void ProcessGroupReceiver::prepare() {
  if (posted_ahead_ == 0 && is_idle()) {
    post();
  }
}

bool ProcessGroupReceiver::is_idle() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    throw ChannelAborted();
  }
  return posted_.empty();
}

void ProcessGroupReceiver::begin_next() {
  std::optional<LayoutId> unknown;
  {
    const std::lock_guard lock(mutex_);
    PD2_ASSERT(!expected_.empty(), "no message was announced");
    if (!known_.contains(expected_.front())) {
      unknown = expected_.front();
    }
  }
  if (unknown) {
    std::optional<Message> header = receive_header();
    const std::lock_guard lock(mutex_);
    if (!header) {
      expected_.pop_front();
      Posted none;
      none.message.is_void = true;
      posted_.push_back(std::move(none));
      return;
    }
    known_.emplace(*unknown, *std::move(header));
  }
  const std::lock_guard lock(mutex_);
  if (!make_room()) {
    throw ChannelAborted();
  }
  begin(posted_.back());
}

void ProcessGroupReceiver::post_ahead() {
  while (posted_.size() < posted_ahead_ && make_room()) {
    begin(posted_.back());
  }
}

bool ProcessGroupReceiver::make_room() {
  if (aborted_ || expected_.empty()) {
    return false;
  }
  const auto known = known_.find(expected_.front());
  if (known == known_.end()) {
    return false;  // its header comes first
  }
  const Message& header = known->second;
  Posted posted;
  posted.message.structure = header.structure;
  posted.message.requires_grad = header.requires_grad;
  posted.ring_bytes = bytes_through(peer_.ring.get(), header);
  for (const at::Tensor& form : header.tensors) {
    at::Tensor tensor;
    if (form.defined()) {
      const auto options = form.options().device(peer_.device).pinned_memory(peer_.pins_memory);
      tensor = at::empty_strided(form.sizes(), form.strides(), options);
    }
    posted.message.tensors.push_back(std::move(tensor));
  }
  posted_.push_back(std::move(posted));
  expected_.pop_front();
  return true;
}

void ProcessGroupReceiver::begin(Posted& next) {
  if (next.ring_bytes > 0 || next.message.is_void) {
    return;
  }
  const auto receive = [this](auto& bytes) {
    const Work work = peer_.group->recv(bytes, peer_.number, tag_);
    tag_ = (tag_ + 1) % kTags;
    return work;
  };
  next.works = with_peer(timeout_, peer_.rank,
                         [&] { return begin_all(peer_, bytes_of(next.message.tensors), receive); });
}

void ProcessGroupReceiver::wait(const Work& work) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw ChannelAborted();
    }
    waiting_.push_back(work);
  }
  const bool completed = with_peer(timeout_, peer_.rank, [&] { return work->wait(); });
  const std::lock_guard lock(mutex_);
  waiting_.clear();
  if (aborted_ || !completed) {
    throw ChannelAborted();
  }
}

std::optional<Message> ProcessGroupReceiver::receive_header() {
  const auto receive_words = [this](std::int64_t count) {
    at::Tensor words = at::empty({count}, at::kLong);
    std::vector<at::Tensor> one{words};
    wait(with_peer(timeout_, peer_.rank,
                   [&] { return headers_.group->recv(one, headers_.number, headers_.tag); }));
    return words;
  };
  const std::int64_t length = receive_words(1).item<std::int64_t>();
  return length == kIsVoid ? std::nullopt : std::optional(unpack(receive_words(length)));
}

Message ProcessGroupReceiver::receive() {
  if (is_idle()) {
    begin_next();
  }
  Posted next;
  {
    const std::lock_guard lock(mutex_);
    next = std::move(posted_.front());
    posted_.pop_front();
    post_ahead();
  }
  for (const Work& work : next.works) {
    if (peer_.device.is_cpu()) {
      wait(work);
    } else {  // the stream waits
      with_peer(timeout_, peer_.rank, [&] { work->wait(); });
    }
  }
  receive_through_ring(next);
  return std::move(next.message);
}

void ProcessGroupReceiver::receive_through_ring(const Posted& next) {
  if (next.ring_bytes == 0) {
    return;
  }
  const std::byte* from =
      with_peer(timeout_, peer_.rank, [&] { return peer_.ring->begin_read(next.ring_bytes); });
  if (from == nullptr) {
    throw ChannelAborted();
  }
  for (const at::Tensor& tensor : next.message.tensors) {
    if (tensor.defined()) {
      std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
      from += tensor.nbytes();
    }
  }
  peer_.ring->end_read();
}

void ProcessGroupReceiver::abort() {
  if (peer_.ring) {
    peer_.ring->abort();
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  if (peer_.device.is_cpu()) {
    abort_all(posted_);
  }
  for (const Work& work : waiting_) {
    work->abort();
  }
}

void ProcessGroupReceiver::cut_off() {
  const std::lock_guard lock(mutex_);
  abort_all(posted_);
}

std::int64_t ProcessGroupReceiver::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t sum = peer_.ring ? static_cast<std::int64_t>(peer_.ring->used_bytes()) : 0;
  for (const Posted& posted : posted_) {
    sum += posted.message.bytes();
  }
  return sum;
}

}  // namespace pd2
