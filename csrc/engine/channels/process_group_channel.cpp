#include "engine/channels/process_group_channel.h"

#include "core/check.h"
#include "engine/with_peer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <cstring>

namespace pd2 {
namespace {

// A stream of messages shares one group: the running tag matches the n-th send to the n-th receive.
constexpr int kTags = 1 << 15;

// The memory of a dense tensor as a vector, in storage order.
at::Tensor storage_order(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

bool same_form(const MessageHeader::Entry& entry, const at::Tensor& tensor) {
  return tensor.scalar_type() == entry.dtype && tensor.sizes() == at::IntArrayRef(entry.sizes);
}

// How many bytes of a message go through the ring: all or none.
std::size_t bytes_through(const SharedRing* ring, const MessageHeader& header) {
  const std::size_t bytes = ring ? header.bytes() : 0;
  return bytes <= SharedRing::kMaxMessageBytes ? bytes : 0;
}

}  // namespace

std::size_t MessageHeader::bytes() const {
  std::size_t sum = 0;
  for (const Entry& entry : entries) {
    if (entry.defined) {
      sum += c10::elementSize(entry.dtype) * c10::multiply_integers(entry.sizes);
    }
  }
  return sum;
}

MessageHeader MessageHeader::of(const Message& message) {
  MessageHeader header;
  header.structure = message.structure;
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    Entry entry;
    entry.defined = tensor.defined();
    if (entry.defined) {
      const bool dense = tensor.is_non_overlapping_and_dense();
      entry.requires_grad = message.requires_grad[i];
      entry.dtype = tensor.scalar_type();
      entry.sizes = tensor.sizes().vec();
      entry.strides =
          (dense ? tensor : at::empty(tensor.sizes(), tensor.options().device(at::kMeta)))
              .strides()
              .vec();
    }
    header.entries.push_back(std::move(entry));
  }
  return header;
}

at::Tensor MessageHeader::pack() const {
  std::vector<std::int64_t> words{static_cast<std::int64_t>(structure.size())};
  words.insert(words.end(), structure.begin(), structure.end());
  words.push_back(static_cast<std::int64_t>(entries.size()));
  for (const Entry& entry : entries) {
    words.push_back(entry.defined);
    words.push_back(entry.requires_grad);
    words.push_back(static_cast<std::int64_t>(entry.dtype));
    words.push_back(static_cast<std::int64_t>(entry.sizes.size()));
    words.insert(words.end(), entry.sizes.begin(), entry.sizes.end());
    words.insert(words.end(), entry.strides.begin(), entry.strides.end());
  }
  at::Tensor packed = at::empty({static_cast<std::int64_t>(words.size())}, at::kLong);
  std::copy(words.begin(), words.end(), packed.mutable_data_ptr<std::int64_t>());
  return packed;
}

MessageHeader MessageHeader::unpack(const at::Tensor& packed) {
  const std::int64_t* word = packed.const_data_ptr<std::int64_t>();
  const auto list = [&word](std::int64_t count) {
    std::vector<std::int64_t> values(word, word + count);
    word += count;
    return values;
  };
  MessageHeader header;
  for (std::int64_t byte : list(*word++)) {
    header.structure.push_back(static_cast<char>(byte));
  }
  header.entries.resize(static_cast<std::size_t>(*word++));
  for (Entry& entry : header.entries) {
    entry.defined = *word++ != 0;
    entry.requires_grad = *word++ != 0;
    entry.dtype = static_cast<at::ScalarType>(*word++);
    const std::int64_t dimensions = *word++;
    entry.sizes = list(dimensions);
    entry.strides = list(entry.defined ? dimensions : 0);
  }
  return header;
}

ProcessGroupSender::ProcessGroupSender(Peer peer, c10::Device device, std::size_t max_unawaited,
                                       std::shared_ptr<SharedRing> ring)
    : peer_(std::move(peer)),
      timeout_(timeout_of(peer_.group.get())),
      device_(device),
      max_unawaited_(max_unawaited),
      ring_(std::move(ring)) {}

void ProcessGroupSender::post(std::vector<Work>& works, at::Tensor flat) {
  if (flat.numel() == 0) {
    return;
  }
  std::vector<at::Tensor> tensors{std::move(flat)};
  works.push_back(with_peer(timeout_, peer_.rank,
                            [&] { return peer_.group->send(tensors, peer_.number, tag_); }));
  tag_ = (tag_ + 1) % kTags;
}

void ProcessGroupSender::send(LayoutId layout, Message message) {
  std::vector<Work> works;
  auto known = headers_.find(layout);
  if (known == headers_.end()) {
    known = headers_.emplace(layout, MessageHeader::of(message)).first;
    const at::Tensor packed = known->second.pack();
    at::Tensor length = at::empty({1}, at::kLong);
    *length.mutable_data_ptr<std::int64_t>() = packed.numel();
    post(works, length);
    post(works, packed);
  }
  const MessageHeader& header = known->second;
  PD2_CHECK(
      header.structure == message.structure && header.entries.size() == message.tensors.size(),
      "values between stages must follow from the shapes of the model's inputs: a message of ",
      message.tensors.size(), " tensors, where one of ", header.entries.size(),
      " tensors with other constants was sent for the same input shapes");
  const std::size_t ring_bytes = bytes_through(ring_.get(), header);
  std::byte* to = nullptr;
  if (ring_bytes > 0) {
    to = with_peer(timeout_, peer_.rank, [&] { return ring_->begin_write(ring_bytes); });
  }
  if (ring_bytes > 0 && to == nullptr) {
    throw ChannelAborted();
  }
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    const MessageHeader::Entry& entry = header.entries[i];
    at::Tensor tensor = message.tensors[i];
    if (!tensor.defined() && entry.defined) {
      tensor = at::zeros(entry.sizes, at::TensorOptions(entry.dtype).device(device_));
    }
    PD2_CHECK(tensor.defined() == entry.defined && (!entry.defined || same_form(entry, tensor)),
              "values between stages must follow from the shapes of the model's inputs: tensor ", i,
              " has shape ",
              tensor.defined() ? c10::str(tensor.sizes()) : std::string("none (no gradient)"),
              ", for the same input shapes it had ",
              entry.defined ? c10::str(entry.sizes) : std::string("none (no gradient)"));
    if (!entry.defined) {
      continue;
    }
    PD2_CHECK(entry.requires_grad == message.requires_grad[i],
              "values between stages must follow from the shapes of the model's inputs: tensor ", i,
              message.requires_grad[i] ? " requires" : " does not require",
              " a gradient, for the same input shapes it did", entry.requires_grad ? "" : " not");
    tensor = tensor.resolve_conj().resolve_neg();  // bits that only this process would know of
    if (tensor.strides() != at::IntArrayRef(entry.strides)) {
      at::Tensor laid_out = at::empty_strided(entry.sizes, entry.strides, tensor.options());
      tensor = laid_out.copy_(tensor);
    }
    if (to != nullptr) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      to += tensor.nbytes();
    } else {
      post(works, storage_order(tensor));
    }
  }
  if (to != nullptr) {
    ring_->end_write();
  }
  if (!works.empty()) {
    await_oldest(std::move(works));
  }
}

void ProcessGroupSender::await_oldest(std::vector<Work> newest) {
  std::vector<Work> oldest;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw ChannelAborted();
    }
    unawaited_.push_back(std::move(newest));
    if (unawaited_.size() > max_unawaited_) {
      oldest = unawaited_.front();  // stays listed, so that abort() can end the wait
    }
  }
  for (const Work& work : oldest) {
    with_peer(timeout_, peer_.rank, [&] { work->wait(); });
  }
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    throw ChannelAborted();
  }
  if (unawaited_.size() > max_unawaited_) {
    unawaited_.pop_front();
  }
}

std::int64_t ProcessGroupSender::buffer_bytes() const {
  return ring_ ? static_cast<std::int64_t>(ring_->used_bytes()) : 0;
}

void ProcessGroupSender::abort() {
  if (ring_) {
    ring_->abort();
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (auto& works : unawaited_) {
    for (Work& work : works) {
      work->abort();
    }
  }
}

ProcessGroupReceiver::ProcessGroupReceiver(Peer peer, c10::Device device, std::size_t posted_ahead,
                                           std::shared_ptr<SharedRing> ring)
    : peer_(std::move(peer)),
      timeout_(timeout_of(peer_.group.get())),
      device_(device),
      posted_ahead_(posted_ahead),
      ring_(std::move(ring)) {}

ProcessGroupReceiver::Work ProcessGroupReceiver::post(at::Tensor flat) {
  std::vector<at::Tensor> tensors{std::move(flat)};
  Work work = with_peer(timeout_, peer_.rank,
                        [&] { return peer_.group->recv(tensors, peer_.number, tag_); });
  tag_ = (tag_ + 1) % kTags;
  return work;
}

void ProcessGroupReceiver::expect(LayoutId layout) {
  const std::lock_guard lock(mutex_);
  expected_.push_back(layout);
  post_known_layouts();
}

void ProcessGroupReceiver::post_known_layouts() {
  while (!aborted_ && !expected_.empty() && posted_.size() < posted_ahead_) {
    const auto known = headers_.find(expected_.front());
    if (known == headers_.end()) {
      return;  // its header comes first
    }
    Posted posted;
    posted.message.structure = known->second.structure;
    posted.ring_bytes = bytes_through(ring_.get(), known->second);
    for (const MessageHeader::Entry& entry : known->second.entries) {
      at::Tensor tensor;
      if (entry.defined) {
        tensor = at::empty_strided(entry.sizes, entry.strides,
                                   at::TensorOptions(entry.dtype).device(device_));
        if (tensor.numel() > 0 && posted.ring_bytes == 0) {
          posted.works.push_back(post(storage_order(tensor)));
        }
      }
      posted.message.tensors.push_back(std::move(tensor));
      posted.message.requires_grad.push_back(entry.requires_grad);
    }
    posted_.push_back(std::move(posted));
    expected_.pop_front();
  }
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

MessageHeader ProcessGroupReceiver::receive_header() {
  const auto receive_words = [this](std::int64_t count) {
    at::Tensor words = at::empty({count}, at::kLong);
    Work work;
    {
      const std::lock_guard lock(mutex_);
      work = post(words);
    }
    wait(work);
    return words;
  };
  const at::Tensor length = receive_words(1);
  return MessageHeader::unpack(receive_words(*length.const_data_ptr<std::int64_t>()));
}

Message ProcessGroupReceiver::receive() {
  LayoutId unknown = 0;
  bool needs_header = false;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw ChannelAborted();
    }
    PD2_ASSERT(!posted_.empty() || !expected_.empty(), "no message was announced");
    if (posted_.empty()) {
      needs_header = true;
      unknown = expected_.front();
    }
  }
  if (needs_header) {
    MessageHeader header = receive_header();
    const std::lock_guard lock(mutex_);
    headers_.emplace(unknown, std::move(header));
    post_known_layouts();
  }
  Posted next;
  {
    const std::lock_guard lock(mutex_);
    PD2_ASSERT(!posted_.empty(), "no receive was posted");
    next = std::move(posted_.front());
    posted_.pop_front();
    post_known_layouts();
  }
  for (const Work& work : next.works) {
    wait(work);
  }
  if (next.ring_bytes > 0) {
    const std::byte* from =
        with_peer(timeout_, peer_.rank, [&] { return ring_->begin_read(next.ring_bytes); });
    if (from == nullptr) {
      throw ChannelAborted();
    }
    for (const at::Tensor& tensor : next.message.tensors) {
      if (tensor.defined()) {
        std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
        from += tensor.nbytes();
      }
    }
    ring_->end_read();
  }
  return std::move(next.message);
}

void ProcessGroupReceiver::abort() {
  if (ring_) {
    ring_->abort();
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (Posted& posted : posted_) {
    for (Work& work : posted.works) {
      work->abort();
    }
  }
  for (Work& work : waiting_) {
    work->abort();
  }
}

std::int64_t ProcessGroupReceiver::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t sum = ring_ ? static_cast<std::int64_t>(ring_->used_bytes()) : 0;
  for (const Posted& posted : posted_) {
    sum += posted.message.bytes();
  }
  return sum;
}

}  // namespace pd2
