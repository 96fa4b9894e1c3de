// Messages between the devices of two processes of one machine, copied by the devices themselves.
#pragma once

#include "engine/channels/channel.h"
#include "engine/channels/device_memory_sharing.h"
#include "engine/channels/message_layouts.h"
#include "engine/streams.h"
#include "transport/shared_memory.h"
#include "transport/shared_ring.h"

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pd2 {

// What both ends of a ring have: slots in memory of the sender's device, a page of the hosts with
// the words `written` and `read`, and a ring of the hosts for notes.
//
//   sender's stream                      receiver's stream
//   waits until `read` > n - slots
//   copies the message into slot n       waits until `written` > n
//   `written` = n + 1                    copies slot n into tensors of its own
//                                        `read` = n + 1
//
// A stream waits only for work that the other end's host has already given its device: each is told
// by a note, or by a note's place being free again. So a device that is to come to rest always can.
class DeviceRing {
 public:
  struct Page;  // what lies in the page

  // The sender's: with its device, null if that cannot share memory. `timeout`, in seconds: of
  // hosts' waiting.
  static std::unique_ptr<DeviceRing> create(c10::Device device, std::uint32_t num_slots,
                                            double timeout);
  // The receiver's, with its own device. Null if the sender's memory cannot be reached.
  static std::unique_ptr<DeviceRing> open(const std::string& address, c10::Device device,
                                          double timeout);
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;
  // Ends hosts' waiting, and waits until the device has left the memory: also for what the other
  // end has sent, unless its process has ended or needs longer than hosts wait.
  ~DeviceRing();

  const std::string& address() const { return page_memory_->address(); }
  SharedRing& notes() { return *notes_; }
  const MaybeStream& stream() const { return stream_; }
  // Of the message that is written or read now.
  std::byte* slot() const;
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::int64_t memory_bytes() const { return memory_bytes_.load(std::memory_order_relaxed); }

  // Other slots from now on, of at least as many bytes: gives their address. The sender's.
  std::string grow(std::size_t bytes);
  // The receiver's. Throws std::runtime_error.
  void grown(const std::string& address, std::size_t slot_bytes);

  void begin_write();  // the stream waits until the slot is free
  void end_write();    // what the stream was given is the message
  void begin_read();   // the stream waits for the message
  void end_read();
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

  // Whether the stream has done what it was given. May be called from any thread.
  bool is_idle() const { return Fence::of(stream_).is_done(); }
  // Ends waiting of this end's hosts, now and later. From any thread, as the next three.
  void abort() { notes_->abort(); }
  bool tell_cut_off();  // true
  // Ends waiting of its stream, which goes on with what is in the slots.
  void cut_off();
  bool is_cut_off() const;

 private:
  DeviceRing(c10::Device device, std::unique_ptr<SharedMemory> page, bool is_sender,
             double timeout);
  bool pin_page();
  void leave_stream();
  // The receiver may still have the memory open: then it is freed later.
  void leave_memory();

  const DeviceMemorySharing& sharing_;
  const bool is_sender_;
  const std::chrono::duration<double> timeout_;
  const MaybeStream stream_;
  const c10::Device device_;  // with its index
  std::shared_ptr<SharedMemory> page_memory_;
  Page* const page_;
  std::shared_ptr<void> pinned_;
  std::unique_ptr<SharedRing> notes_;
  std::vector<std::shared_ptr<std::byte>> memory_;  // the last one is used
  std::atomic<std::int64_t> memory_bytes_ = 0;
  std::size_t slot_bytes_ = 0;
  // Of the message that is written or read now, modulo 2^32.
  std::atomic<std::uint32_t> number_ = 0;
};

class DeviceRingSender : public Sender {
 public:
  // `peer_rank`: among all processes, which errors name.
  DeviceRingSender(std::unique_ptr<DeviceRing> ring, c10::Device device, int peer_rank)
      : ring_(std::move(ring)), device_(device), peer_rank_(peer_rank) {}
  const std::string& address() const { return ring_->address(); }
  bool is_idle() const { return ring_->is_idle(); }
  void abort() override { ring_->abort(); }
  bool tell_cut_off() override { return ring_->tell_cut_off(); }
  void cut_off() override { ring_->cut_off(); }
  bool is_cut_off() const override { return ring_->is_cut_off(); }
  std::int64_t buffer_bytes() const override { return ring_->memory_bytes(); }

 private:
  void lay_out(LayoutId layout, Message& message) override;
  void transfer(LayoutId layout, Message message) override;

  const std::unique_ptr<DeviceRing> ring_;
  const c10::Device device_;
  const int peer_rank_;
  SentLayouts layouts_{device_};
  at::Tensor new_header_;  // of the message that comes next; undefined: the receiver knows it
};

class DeviceRingReceiver : public Receiver {
 public:
  DeviceRingReceiver(std::unique_ptr<DeviceRing> ring, c10::Device device, int peer_rank)
      : ring_(std::move(ring)), device_(device), peer_rank_(peer_rank) {}
  bool is_idle() const { return ring_->is_idle(); }
  void expect(LayoutId layout) override;
  // In tensors of its own: the slot is free as soon as the device has copied it.
  Message receive() override;
  void abort() override { ring_->abort(); }
  bool tell_cut_off() override { return ring_->tell_cut_off(); }
  void cut_off() override { ring_->cut_off(); }
  bool is_cut_off() const override { return ring_->is_cut_off(); }

 private:
  Message copied(const Message& header);

  const std::unique_ptr<DeviceRing> ring_;
  const c10::Device device_;
  const int peer_rank_;
  std::map<LayoutId, Message> known_;  // headers
  std::mutex mutex_;
  std::deque<LayoutId> expected_;
};

}  // namespace pd2
