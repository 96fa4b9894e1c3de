#include "engine/channels/process_group_channel.h"

#include "core/check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace pd2 {
namespace {

// A stream of messages shares one group: the running tag matches the n-th send to the n-th receive.
constexpr int kTags = 1 << 15;

// In place of a header's length: no header and no tensors follow.
constexpr std::int64_t kIsVoid = -1;

// How many bytes of a message go through the ring: all or none.
std::size_t bytes_through(const SharedRing* ring, const Message& header) {
  const std::size_t bytes = ring ? static_cast<std::size_t>(header.bytes()) : 0;
  return bytes <= SharedRing::kMaxMessageBytes ? bytes : 0;
}

// The message's form: its tensors without memory, on the meta device. Those that are dense keep
// their strides: they travel in storage order.
Message header_of(const Message& message) {
  Message header = message;
  for (at::Tensor& tensor : header.tensors) {
    if (tensor.defined()) {
      const auto options = tensor.options().device(at::kMeta);
      tensor = tensor.is_non_overlapping_and_dense()
                   ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                   : at::empty(tensor.sizes(), options);
    }
  }
  return header;
}

// A header as int64 numbers.
at::Tensor pack(const Message& header) {
  std::vector<std::int64_t> words{static_cast<std::int64_t>(header.structure.size())};
  words.insert(words.end(), header.structure.begin(), header.structure.end());
  words.push_back(static_cast<std::int64_t>(header.tensors.size()));
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    const at::Tensor& tensor = header.tensors[i];
    words.push_back(tensor.defined());
    if (tensor.defined()) {
      words.push_back(header.requires_grad[i]);
      words.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
      words.push_back(tensor.dim());
      words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
      words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
    }
  }
  return at::tensor(words, at::kLong);
}

Message unpack(const at::Tensor& packed) {
  const std::int64_t* word = packed.const_data_ptr<std::int64_t>();
  const auto list = [&word](std::int64_t count) {
    const at::IntArrayRef values(word, count);
    word += count;
    return values;
  };
  Message header;
  const at::IntArrayRef structure = list(*word++);
  header.structure.assign(structure.begin(), structure.end());
  header.tensors.resize(*word++);
  header.requires_grad.resize(header.tensors.size());
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    if (*word++ != 0) {
      header.requires_grad[i] = *word++ != 0;
      const auto dtype = static_cast<at::ScalarType>(*word++);
      const std::int64_t dim = *word++;
      const at::IntArrayRef sizes = list(dim), strides = list(dim);
      header.tensors[i] =
          at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(at::kMeta));
    }
  }
  return header;
}

std::string shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.sizes()) : "none (no gradient)";
}

}  // namespace

void ProcessGroupSender::post(std::vector<Work>& works, at::Tensor flat) {
  if (flat.numel() == 0) {
    return;
  }
  std::vector<at::Tensor> tensors{std::move(flat)};
  works.push_back(with_peer(timeout_, peer_.rank,
                            [&] { return peer_.group->send(tensors, peer_.number, tag_); }));
  tag_ = (tag_ + 1) % kTags;
}

at::Tensor ProcessGroupSender::laid_out(const Message& message, std::size_t i,
                                        const Message& header) const {
  const at::Tensor& form = header.tensors[i];
  at::Tensor tensor = message.tensors[i];
  if (!tensor.defined() && form.defined()) {
    tensor = at::zeros(form.sizes(), form.options().device(peer_.device));
  }
  PD2_CHECK(tensor.defined() == form.defined() &&
                (!form.defined() ||
                 (tensor.scalar_type() == form.scalar_type() && tensor.sizes() == form.sizes())),
            "values between stages must follow from the shapes of the model's inputs: tensor ", i,
            " has shape ", shape_of(tensor), ", for the same input shapes it had ", shape_of(form));
  if (!form.defined()) {
    return tensor;
  }
  PD2_CHECK(header.requires_grad[i] == message.requires_grad[i],
            "values between stages must follow from the shapes of the model's inputs: tensor ", i,
            message.requires_grad[i] ? " requires" : " does not require",
            " a gradient, for the same input shapes it did", header.requires_grad[i] ? "" : " not");
  tensor = tensor.resolve_conj().resolve_neg();  // bits that only this process would know of
  if (tensor.strides() != form.strides()) {
    tensor = at::empty_strided(form.sizes(), form.strides(), tensor.options()).copy_(tensor);
  }
  return tensor;
}

void ProcessGroupSender::send(LayoutId layout, Message message) {
  std::vector<Work> works;
  auto known = headers_.find(layout);
  if (message.is_void && known == headers_.end()) {
    post(works, at::tensor({kIsVoid}, at::kLong));
    await_oldest(std::move(works));
    return;
  }
  if (message.is_void) {  // zeros will do
    message = known->second;
    std::ranges::fill(message.tensors, at::Tensor());
  }
  if (known == headers_.end()) {
    known = headers_.emplace(layout, header_of(message)).first;
    const at::Tensor packed = pack(known->second);
    post(works, at::tensor({packed.numel()}, at::kLong));
    post(works, packed);
  }
  const Message& header = known->second;
  PD2_CHECK(
      header.structure == message.structure && header.tensors.size() == message.tensors.size(),
      "values between stages must follow from the shapes of the model's inputs: a message of ",
      message.tensors.size(), " tensors, where one of ", header.tensors.size(),
      " tensors with other constants was sent for the same input shapes");
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    tensors.push_back(laid_out(message, i, header));
  }
  const std::size_t ring_bytes = bytes_through(peer_.ring.get(), header);
  std::byte* to = nullptr;
  if (ring_bytes > 0) {
    to = with_peer(timeout_, peer_.rank, [&] { return peer_.ring->begin_write(ring_bytes); });
    if (to == nullptr) {
      throw ChannelAborted();
    }
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    if (to != nullptr) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      to += tensor.nbytes();
    } else {
      post(works, storage_order(tensor));
    }
  }
  if (to != nullptr) {
    peer_.ring->end_write();
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
  return peer_.ring ? static_cast<std::int64_t>(peer_.ring->used_bytes()) : 0;
}

void ProcessGroupSender::abort() {
  if (peer_.ring) {
    peer_.ring->abort();
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (auto& works : unawaited_) {
    for (Work& work : works) {
      work->abort();
    }
  }
}

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
    posted.message.requires_grad = known->second.requires_grad;
    posted.ring_bytes = bytes_through(peer_.ring.get(), known->second);
    for (const at::Tensor& form : known->second.tensors) {
      at::Tensor tensor;
      if (form.defined()) {
        tensor =
            at::empty_strided(form.sizes(), form.strides(), form.options().device(peer_.device));
        if (tensor.numel() > 0 && posted.ring_bytes == 0) {
          posted.works.push_back(post(storage_order(tensor)));
        }
      }
      posted.message.tensors.push_back(std::move(tensor));
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

std::optional<Message> ProcessGroupReceiver::receive_header() {
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
  const std::int64_t length = receive_words(1).item<std::int64_t>();
  return length == kIsVoid ? std::nullopt : std::optional(unpack(receive_words(length)));
}

Message ProcessGroupReceiver::receive() {
  std::optional<LayoutId> unknown;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw ChannelAborted();
    }
    PD2_ASSERT(!posted_.empty() || !expected_.empty(), "no message was announced");
    if (posted_.empty()) {
      unknown = expected_.front();
    }
  }
  if (unknown) {
    std::optional<Message> header = receive_header();
    const std::lock_guard lock(mutex_);
    if (!header) {
      expected_.pop_front();
      post_known_layouts();
      Message none;
      none.is_void = true;
      return none;
    }
    headers_.emplace(*unknown, *std::move(header));
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
  return std::move(next.message);
}

void ProcessGroupReceiver::abort() {
  if (peer_.ring) {
    peer_.ring->abort();
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
  std::int64_t sum = peer_.ring ? static_cast<std::int64_t>(peer_.ring->used_bytes()) : 0;
  for (const Posted& posted : posted_) {
    sum += posted.message.bytes();
  }
  return sum;
}

}  // namespace pd2
