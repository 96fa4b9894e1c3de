#include "checked_device/process_group.h"

#include "checked_device/cpu_run.h"
#include "checked_device/streams.h"
#include "checked_device/without_gil.h"

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>
#include <unistd.h>
#include <utility>

namespace pd2 {
namespace {

bool nccl_has(c10::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kBool:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return true;
    default:
      return false;
  }
}

std::atomic<int> connections_made = 0;
std::atomic<std::chrono::milliseconds> timeout_set{};

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

void CheckedProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout_set = timeout;
}
std::chrono::milliseconds CheckedProcessGroup::last_timeout_set() { return timeout_set; }
int CheckedProcessGroup::num_connections() { return connections_made; }

CheckedProcessGroup::CheckedProcessGroup(Below below, std::chrono::milliseconds timeout)
    : c10d::Backend(below.gloo->getRank(), below.gloo->getSize()),
      below_(std::move(below)),
      timeout_(timeout) {}

CheckedProcessGroup::~CheckedProcessGroup() {
  end_all();
  communicators_.clear();
}

int CheckedProcessGroup::check(const Operation& operation) const {
  std::optional<int> device;
  for (const auto* const tensors : {&operation.reads, &operation.writes}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), operation.name, ": tensor on ", tensor.device(),
                  ", must be on a checked device");
      TORCH_CHECK(nccl_has(tensor.scalar_type()), operation.name, ": dtype ", tensor.scalar_type(),
                  ", which NCCL does not have");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), operation.name,
                  ": tensors must be contiguous");
      const int found = index_of(tensor.device());
      TORCH_CHECK(device.value_or(found) == found, operation.name, ": tensors on checked:", found,
                  " and checked:", *device);
      device = found;
    }
  }
  TORCH_CHECK(device.has_value(), operation.name, ": no tensor");
  return *device;
}

CheckedProcessGroup::WorkPtr CheckedProcessGroup::post(Operation operation) {
  const int device = check(operation);
  {
    const std::lock_guard lock(mutex_);
    if (together_) {
      auto& all = together_->operation;
      all.name += (all.name.empty() ? "" : " + ") + operation.name;
      all.reads.insert(all.reads.end(), operation.reads.begin(), operation.reads.end());
      all.writes.insert(all.writes.end(), operation.writes.begin(), operation.writes.end());
      all.parts.insert(all.parts.end(), operation.parts.begin(), operation.parts.end());
      return nullptr;  // endCoalescing() returns the work
    }
  }
  Transfer transfer;
  transfer.name = operation.name;
  for (const auto& tensor : operation.reads) add_uses(transfer.uses, tensor, false);
  for (const auto& tensor : operation.writes) add_uses(transfer.uses, tensor, true);
  transfer.tensors = operation.reads;
  transfer.tensors.insert(transfer.tensors.end(), operation.writes.begin(), operation.writes.end());
  transfer.parts = std::move(operation.parts);
  transfer.work = c10::make_intrusive<CheckedWork>(device, operation.on_host, operation.writes);
  const auto work = transfer.work;
  if (operation.is_in_pairs) connect_pairs(device);
  communicator(device, operation.peer).post(std::move(transfer));
  return work;
}

void CheckedProcessGroup::startCoalescing() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!together_, "startCoalescing: called twice");
  together_.emplace();
}

CheckedProcessGroup::WorkPtr CheckedProcessGroup::endCoalescing() {
  Operation all;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(together_, "endCoalescing: without startCoalescing");
    all = std::move(together_->operation);
    together_.reset();
  }
  return all.parts.empty() ? nullptr : post(std::move(all));
}

Communicator& CheckedProcessGroup::communicator(int device, int peer) {
  const WithoutGil nobody_waits_for_python;
  const std::pair<int, int> key(device, peer);
  std::size_t number = 0;  // of the device, in order of use
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!aborted_, "checked: the process group was aborted");
    const auto known = communicators_.find(key);
    if (known != communicators_.end()) return *known->second;
    for (const auto& [other, _] : communicators_) number += other.second == peer ? 1 : 0;
  }
  std::vector<int> ranks;
  if (peer < 0) {
    for (int rank = 0; rank < size_; ++rank) ranks.push_back(rank);
  } else {
    ranks = {std::min(rank_, peer), std::max(rank_, peer)};
  }
  std::string name = peer < 0 ? "all" : "pair";
  for (const int rank : ranks) name += "." + std::to_string(rank);
  meet(name + "/" + std::to_string(number), ranks, device);
  const int tag = static_cast<int>(2 * number) + (peer < 0 ? 0 : 1);
  auto made =
      std::make_unique<Communicator>(device, std::make_unique<Wire>(below_.gloo, tag, timeout_));
  const std::lock_guard lock(mutex_);
  const auto added = communicators_.emplace(key, std::move(made)).first;
  if (aborted_) added->second->abort();
  return *added->second;
}

void CheckedProcessGroup::connect_pairs(int device) {
  const WithoutGil nobody_waits_for_python;
  {
    const std::lock_guard lock(mutex_);
    if (!with_pairs_.insert(device).second) return;
  }
  std::vector<int> ranks(size_);
  std::iota(ranks.begin(), ranks.end(), 0);
  meet("pairs/" + std::to_string(with_pairs_.size()), ranks, device);
}

void CheckedProcessGroup::meet(const std::string& key, const std::vector<int>& ranks, int device) {
  ++connections_made;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  const auto key_of = [&](int rank) { return key + "/" + std::to_string(rank); };
  const auto own = host_name() + "/checked:" + std::to_string(device);
  below_.store->set(key_of(rank_), own);
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(key_of(rank));
  while (!below_.store->check(keys)) {
    {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK(!aborted_, "checked: the process group was aborted");
    }
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "checked: ", key,
                ": not all ranks came within ", timeout_.count(), " ms");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (const int rank : ranks) {
    if (rank == rank_) continue;
    TORCH_CHECK(below_.store->get_to_str(key_of(rank)) != own, "Duplicate GPU detected : rank ",
                rank, " and rank ", rank_, " both on ", own);
  }
}

void CheckedProcessGroup::end_all() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (const auto& [_, communicator] : communicators_) communicator->abort();
}

void CheckedProcessGroup::abort() {
  const WithoutGil nobody_waits_for_python;
  end_all();
  std::set<int> devices;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, _] : communicators_) devices.insert(key.first);
  }
  for (const int device : devices) Runtime::instance().await_idle(device, timeout_);
}

void CheckedProcessGroup::shutdown() {
  std::vector<Communicator*> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [_, communicator] : communicators_) all.push_back(communicator.get());
  }
  for (auto* const communicator : all) communicator->finish();
}

}  // namespace pd2
