#include "engine/channels/device_ring.h"

#include "core/check.h"
#include "engine/by_device_type.h"
#include "engine/with_peer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlignment = 512;  // of tensors in a slot, as devices' allocators give them
// Of the first slots: too small for most messages, but to have them shows that memory can be
// shared.
constexpr std::size_t kFirstSlotBytes = kAlignment;
// Above what a word can be waited for to have.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <std::size_t N>
void write_text(char (&to)[N], const std::string& text) {
  PD2_ASSERT(text.size() < N, "an address of ", text.size(), " bytes");
  std::memcpy(to, text.c_str(), text.size() + 1);
}

// What a sender frees when the receiver has closed it, or its process has ended.
struct LeftMemory {
  std::shared_ptr<SharedMemory> page;
  std::vector<std::shared_ptr<std::byte>> memory;
};

// What is written first, where a note goes. The text of an address and words of a header follow.
struct Note {
  std::uint32_t is_void;
  std::uint32_t address_bytes;  // 0: the slots are those of the message before
  std::uint64_t slot_bytes;
  std::uint64_t header_words;  // 0: the receiver knows the layout
  std::size_t bytes() const {
    return sizeof(Note) + header_words * sizeof(std::int64_t) + address_bytes;
  }
};

std::size_t bytes_in_slot(const Message& header) {
  std::size_t sum = 0;
  for (const at::Tensor& form : header.tensors) {
    sum += form.defined() ? aligned(form.nbytes()) : 0;
  }
  return sum;
}

// Gives each tensor that has content, and its place in the slot.
template <typename Visit>
void for_each_in_slot(const std::vector<at::Tensor>& tensors, std::byte* slot, Visit visit) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.nbytes() > 0) {
      visit(tensor, slot);
      slot += aligned(tensor.nbytes());
    }
  }
}

}  // namespace

struct DeviceRing::Page {
  alignas(64) SharedWord written;         // messages, by the sender's device
  alignas(64) SharedWord read;            // by the receiver's
  alignas(64) std::atomic<int> receiver;  // its process, 0 before there is one
  std::atomic<int> is_closed;             // by the receiver: it has no memory any more
  std::atomic<int> is_cut_off;            // by either
  std::uint32_t num_slots;
  std::uint64_t slot_bytes;      // of the first slots
  char notes[256], memory[256];  // addresses
};

std::unique_ptr<DeviceRing> DeviceRing::create(c10::Device device, std::uint32_t num_slots,
                                               double timeout) {
  static_assert(sizeof(Page) <= kPage);
  std::unique_ptr<SharedMemory> page = SharedMemory::create(kPage);
  std::unique_ptr<SharedRing> notes = SharedRing::create(num_slots, SharedRing::Timeout(timeout));
  if (by_device_type<DeviceMemorySharing>().find(device.type()) == nullptr || !page || !notes) {
    return nullptr;
  }
  Page* const shared = new (page->data()) Page{};
  shared->num_slots = num_slots;
  write_text(shared->notes, notes->address());
  std::unique_ptr<DeviceRing> ring(
      new DeviceRing(device, std::move(page), /*is_sender=*/true, timeout));
  ring->notes_ = std::move(notes);
  const std::string memory = ring->grow(kFirstSlotBytes);
  if (memory.empty() || !ring->pin_page()) {
    return nullptr;
  }
  shared->slot_bytes = ring->slot_bytes_;
  write_text(shared->memory, memory);
  return ring;
}

std::unique_ptr<DeviceRing> DeviceRing::open(const std::string& address, c10::Device device,
                                             double timeout) {
  std::unique_ptr<SharedMemory> page = SharedMemory::open(address);
  if (by_device_type<DeviceMemorySharing>().find(device.type()) == nullptr || !page) {
    return nullptr;
  }
  std::unique_ptr<DeviceRing> ring(
      new DeviceRing(device, std::move(page), /*is_sender=*/false, timeout));
  Page& shared = *ring->page_;
  shared.receiver = number_of_this_process();
  ring->notes_ = SharedRing::open(shared.notes, SharedRing::Timeout(timeout));
  std::shared_ptr<std::byte> memory = ring->sharing_.open(ring->device_, shared.memory);
  if (!ring->notes_ || !memory || !ring->pin_page()) {
    return nullptr;
  }
  ring->memory_.push_back(std::move(memory));
  ring->slot_bytes_ = shared.slot_bytes;
  return ring;
}

DeviceRing::DeviceRing(c10::Device device, std::unique_ptr<SharedMemory> page, bool is_sender,
                       double timeout)
    : sharing_(*by_device_type<DeviceMemorySharing>().find(device.type())),
      is_sender_(is_sender),
      timeout_(timeout),
      stream_(sharing_.take_stream(device)),
      device_(stream_ ? stream_->device() : device),
      page_memory_(std::move(page)),
      page_(reinterpret_cast<Page*>(page_memory_->data())) {}

bool DeviceRing::pin_page() {
  pinned_ = sharing_.pin(device_, page_memory_->data(), kPage);
  return pinned_ != nullptr;
}

DeviceRing::~DeviceRing() {
  try {
    if (notes_) {
      notes_->abort();
      leave_stream();
    }
    sharing_.give_back(stream_);
  } catch (const std::exception&) {  // the device has failed
  }
  if (is_sender_) {
    leave_memory();
  } else {
    memory_.clear();
    page_->is_closed = 1;
  }
}

void DeviceRing::leave_stream() {
  const auto end = std::chrono::steady_clock::now() + timeout_;
  const Fence all = Fence::of(stream_);
  while (!all.is_done()) {
    if (is_cut_off()) {
      cut_off();  // again, as the other end's device may have written over it
    } else if (notes_->peer_has_ended() || std::chrono::steady_clock::now() > end) {
      tell_cut_off();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void DeviceRing::leave_memory() {
  static std::mutex mutex;
  static auto* const left = new std::vector<LeftMemory>;  // at the end nobody frees it
  const std::lock_guard lock(mutex);
  left->push_back({page_memory_, std::move(memory_)});
  std::erase_if(*left, [](const LeftMemory& each) {
    const Page& page = *reinterpret_cast<Page*>(each.page->data());
    const int receiver = page.receiver;
    return receiver == 0 || page.is_closed != 0 || WatchedProcess(receiver).has_ended();
  });
}

std::byte* DeviceRing::slot() const {
  return memory_.back().get() + number_ % page_->num_slots * slot_bytes_;
}

std::string DeviceRing::grow(std::size_t bytes) {
  // Slots that messages are in stay until the end: doubled, all of them are no more than the last.
  const std::size_t slot_bytes =
      aligned(std::max(bytes, slot_bytes_ > kFirstSlotBytes ? 2 * slot_bytes_ : 0));
  const std::size_t all = page_->num_slots * slot_bytes;
  std::string address;
  std::shared_ptr<std::byte> memory = sharing_.allocate(device_, all, address);
  if (!memory) {
    return "";
  }
  memory_.push_back(std::move(memory));
  memory_bytes_ += static_cast<std::int64_t>(all);
  slot_bytes_ = slot_bytes;
  return address;
}

void DeviceRing::grown(const std::string& address, std::size_t slot_bytes) {
  std::shared_ptr<std::byte> memory = sharing_.open(device_, address);
  if (!memory) {
    throw std::runtime_error("a message's memory on the other process's device cannot be opened");
  }
  memory_.push_back(std::move(memory));
  slot_bytes_ = slot_bytes;
}

void DeviceRing::begin_write() {
  sharing_.await(page_->read, number_ + 1 - page_->num_slots, stream_);
}

void DeviceRing::end_write() { sharing_.set(page_->written, ++number_, stream_); }

void DeviceRing::begin_read() { sharing_.await(page_->written, number_ + 1, stream_); }

void DeviceRing::end_read() { sharing_.set(page_->read, ++number_, stream_); }

void DeviceRing::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  sharing_.copy(to, from, bytes, stream_);
}

void DeviceRing::cut_off() {
  SharedWord& awaited = is_sender_ ? page_->read : page_->written;
  awaited = number_ + kFarAhead;
}

bool DeviceRing::tell_cut_off() {
  page_->is_cut_off = 1;
  return true;
}

bool DeviceRing::is_cut_off() const { return page_->is_cut_off != 0; }

void DeviceRingSender::lay_out(LayoutId layout, Message& message) {
  const Message* const header = layouts_.lay_out(layout, message);
  new_header_ = header != nullptr ? pack(*header) : at::Tensor();
}

void DeviceRingSender::transfer(LayoutId, Message message) {
  Note note{};
  note.is_void = message.is_void ? 1 : 0;
  const at::Tensor packed = std::exchange(new_header_, {});
  note.header_words = packed.defined() ? static_cast<std::uint64_t>(packed.numel()) : 0;
  const std::size_t bytes = bytes_in_slot(message);
  std::string address;
  if (bytes > ring_->slot_bytes()) {
    address = ring_->grow(bytes);
    PD2_CHECK(!address.empty(), "messages of ", bytes, " bytes between two processes: device ",
              device_.str(), " has no memory for them");
  }
  note.address_bytes = static_cast<std::uint32_t>(address.size());
  note.slot_bytes = ring_->slot_bytes();
  PD2_CHECK(note.bytes() <= SharedRing::kMaxMessageBytes, "a message's header: ", note.bytes(),
            " bytes, at most ", SharedRing::kMaxMessageBytes);
  std::byte* to = with_peer(std::numeric_limits<double>::infinity(), peer_rank_,
                            [&] { return ring_->notes().begin_write(note.bytes()); });
  if (to == nullptr) {
    throw ChannelAborted();
  }
  std::memcpy(to, &note, sizeof note);
  if (packed.defined()) {
    std::memcpy(to + sizeof note, packed.const_data_ptr(), packed.nbytes());
  }
  std::memcpy(to + note.bytes() - address.size(), address.data(), address.size());
  if (!message.is_void) {
    Fence::here(device_).hold_back(ring_->stream());
    ring_->begin_write();
    for_each_in_slot(message.tensors, ring_->slot(), [&](const at::Tensor& from, std::byte* place) {
      use_on(from, ring_->stream());
      ring_->copy(place, static_cast<const std::byte*>(from.const_data_ptr()), from.nbytes());
    });
    ring_->end_write();
  }
  ring_->notes().end_write();
}

void DeviceRingReceiver::expect(LayoutId layout) {
  const std::lock_guard lock(mutex_);
  expected_.push_back(layout);
}

Message DeviceRingReceiver::receive() {
  LayoutId layout;
  {
    const std::lock_guard lock(mutex_);
    PD2_ASSERT(!expected_.empty(), "no message was announced");
    layout = expected_.front();
    expected_.pop_front();
  }
  const auto begin_read = [this](std::size_t bytes) {
    const std::byte* from = with_peer(std::numeric_limits<double>::infinity(), peer_rank_,
                                      [&] { return ring_->notes().begin_read(bytes); });
    if (from == nullptr) {
      throw ChannelAborted();
    }
    return from;
  };
  Note note;
  std::memcpy(&note, begin_read(sizeof note), sizeof note);
  const std::byte* const from = begin_read(note.bytes());
  if (note.is_void != 0) {
    ring_->notes().end_read();
    Message none;
    none.is_void = true;
    return none;
  }
  if (note.header_words > 0) {
    const at::Tensor packed = at::empty({static_cast<std::int64_t>(note.header_words)}, at::kLong);
    std::memcpy(packed.mutable_data_ptr(), from + sizeof note, packed.nbytes());
    known_.insert_or_assign(layout, unpack(packed));
  }
  if (note.address_bytes > 0) {
    const char* const text = reinterpret_cast<const char*>(from) + note.bytes();
    ring_->grown(std::string(text - note.address_bytes, text), note.slot_bytes);
  }
  Message message = copied(known_.at(layout));
  ring_->notes().end_read();
  const MaybeStream here = stream_here(device_);
  Fence::of(ring_->stream()).hold_back(here);
  for (const at::Tensor& tensor : message.tensors) {
    use_on(tensor, here);
  }
  return message;
}

// In memory of the ring's stream, so that what other streams do meanwhile need not be waited for.
Message DeviceRingReceiver::copied(const Message& header) {
  Message message = header;
  {
    const OnStream on(ring_->stream());
    for (at::Tensor& tensor : message.tensors) {
      if (tensor.defined()) {
        tensor =
            at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
      }
    }
  }
  ring_->begin_read();
  for_each_in_slot(message.tensors, ring_->slot(), [&](const at::Tensor& to, std::byte* place) {
    ring_->copy(static_cast<std::byte*>(to.mutable_data_ptr()), place, to.nbytes());
  });
  ring_->end_read();
  return message;
}

}  // namespace pd2
