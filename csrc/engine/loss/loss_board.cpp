#include "engine/loss/loss_board.h"

#include "core/check.h"
#include "engine/process_group.h"
#include "engine/this_thread.h"
#include "engine/with_peer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <set>

namespace pd2 {

namespace {

constexpr int kTag = 7;

// What travels for a run without a loss: a NaN that no arithmetic makes.
constexpr std::uint64_t kNoLoss = 0x7FF8'7064'3262'7764;

bool is_loss(const at::Tensor& numbers) {
  return std::bit_cast<std::uint64_t>(*numbers.const_data_ptr<double>()) != kNoLoss;
}

at::Tensor no_loss(int num_numbers) {
  return at::full({num_numbers}, std::bit_cast<double>(kNoLoss), at::kDouble);
}

at::Tensor numbers_of(RunLoss& loss, int num_numbers, const at::Tensor& before = {}) {
  const bool is_discarded = loss.is_discarded || (before.defined() && !is_loss(before));
  loss.take_to_host();
  return is_discarded ? no_loss(num_numbers) : loss.numbers(before);
}

}  // namespace

LossBoard::LossBoard(const LossBoardOptions& options, std::shared_ptr<Fault> fault,
                     c10::intrusive_ptr<c10d::ProcessGroup> group,
                     std::shared_ptr<SharedBoard> shared)
    : fault_(std::move(fault)),
      group_(std::move(group)),
      shared_(std::move(shared)),
      last_stage_(static_cast<int>(options.ranks.size()) / options.num_parts - 1),
      options_(options),
      published_(options.num_parts) {
  const std::vector<int>& ranks = options.ranks;
  for (int part = 0; part < options.num_parts; ++part) {
    last_stages_.push_back(ranks[(part + 1) * (last_stage_ + 1) - 1]);
  }
  std::set<int> readers(ranks.begin(), ranks.end());
  readers.erase(last_stages_.back());
  readers_.assign(readers.begin(), readers.end());
  thread_ = std::thread([this, sends = is_here(last_stages_.size() - 1)] {
    name_this_thread("pd2 losses");
    // Nobody waits for a loss as urgently as the next stage waits for this one's executor, which
    // may share its core. But a sender must not be kept waiting while it has the lock of a
    // connection: gloo's thread would ask for that over and over.
    if (!sends) {
      lower_priority_of_this_thread();
    }
    bring_losses();
  });
}

LossBoard::~LossBoard() { close(); }

std::shared_ptr<AwaitedNumbers> LossBoard::expect(std::int64_t run) {
  auto loss = std::make_shared<AwaitedNumbers>(fault_);
  {
    const std::lock_guard lock(mutex_);
    expected_.emplace_back(run, loss);
    const std::size_t behind = options_.runs_behind;
    num_due_ = std::max(num_due_, expected_.size() - std::min(expected_.size(), behind));
  }
  changed_.notify_all();
  return loss;
}

void LossBoard::publish(std::int64_t run, RunLoss loss, int pipeline) {
  {
    const std::lock_guard lock(mutex_);
    published_[options_.first_part + pipeline].emplace_back(run, std::move(loss));
  }
  changed_.notify_all();
}

std::optional<LossBoard::Next> LossBoard::wait_for_next() {
  std::unique_lock lock(mutex_);
  const auto is_ready = [this] {
    for (std::size_t part = 0; part < published_.size(); ++part) {
      if (is_here(part) && published_[part].empty()) {
        return false;
      }
    }
    // A transfer has a timeout, and the caller may take any time before the next run.
    return is_due();
  };
  changed_.wait(lock, [&] { return closed_ || is_ready(); });
  if (!is_ready()) {
    return std::nullopt;
  }
  Next next{expected_.front().first, {}};
  for (auto& parts : published_) {
    std::optional<RunLoss>& here = next.parts.emplace_back();
    if (!parts.empty()) {
      PD2_ASSERT(parts.front().first == next.run, "loss of run ", parts.front().first,
                 " out of order");
      here = std::move(parts.front().second);
      parts.pop_front();
    }
  }
  return next;
}

void LossBoard::bring_losses() {
  const int sender = last_stages_.back();
  const bool sends = is_here(last_stages_.size() - 1);
  while (std::optional<Next> next = wait_for_next()) {
    try {
      std::optional<at::Tensor> numbers = add_up(*next);
      if (!sends) {
        numbers = receive(sender);
      }
      if (!numbers) {
        return;
      }
      {
        const std::lock_guard lock(mutex_);
        const double* data = numbers->const_data_ptr<double>();
        expected_.front().second->give(
            is_loss(*numbers) ? std::vector(data, data + numbers->numel()) : std::vector<double>());
      }
      if (sends) {
        send(*numbers, readers_);
      }
    } catch (...) {
      fail(next->run, sends ? "sending it failed"
                            : "receiving it from rank " + std::to_string(sender) + " failed");
      return;
    }
    const std::lock_guard lock(mutex_);
    expected_.pop_front();
    --num_due_;
    changed_.notify_all();
  }
}

std::optional<at::Tensor> LossBoard::add_up(Next& next) {
  at::Tensor sum;
  for (std::size_t part = 0; part < next.parts.size(); ++part) {
    if (!next.parts[part]) {
      continue;
    }
    if (part > 0 && !is_here(part - 1)) {
      const std::optional<at::Tensor> before = receive(last_stages_[part - 1]);
      if (!before) {
        return std::nullopt;
      }
      sum = *before;
    }
    sum = numbers_of(*next.parts[part], options_.num_numbers, sum);
    PD2_ASSERT(sum.numel() == options_.num_numbers, "a loss and ", sum.numel() - 1, " metrics");
    if (part + 1 == next.parts.size()) {
      return sum;
    }
    if (!is_here(part + 1)) {
      send(sum, {last_stages_[part + 1]});
    }
  }
  return std::nullopt;
}

void LossBoard::send(const at::Tensor& numbers, const std::vector<int>& ranks) {
  if (shared_) {
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
      shared_->send(numbers.const_data_ptr<double>()[i], ranks);
    }
    return;
  }
  std::vector<at::Tensor> tensors{numbers};
  transfer(ranks, [&](int rank) { return group_->send(tensors, rank, kTag); });
}

std::optional<at::Tensor> LossBoard::receive(int rank) {
  const at::Tensor numbers = at::empty({options_.num_numbers}, at::kDouble);
  if (shared_) {
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
      const std::optional<double> number = shared_->receive(rank);
      if (!number) {
        return std::nullopt;
      }
      numbers.mutable_data_ptr<double>()[i] = *number;
    }
    return numbers;
  }
  std::vector<at::Tensor> tensors{numbers};
  transfer({rank}, [&](int sender) { return group_->recv(tensors, sender, kTag); });
  const std::lock_guard lock(mutex_);
  return closed_ ? std::nullopt : std::optional(numbers);
}

template <typename Post>
void LossBoard::transfer(const std::vector<int>& ranks, Post post) {
  const double timeout = timeout_of(group_.get());
  std::vector<Work> works;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    for (const int rank : ranks) {
      works.push_back(with_peer(timeout, rank, [&] { return post(rank); }));
    }
    under_way_ = works;
  }
  for (std::size_t i = 0; i < works.size(); ++i) {
    with_peer(timeout, ranks[i], [&] { works[i]->wait(); });
  }
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

void LossBoard::fail(std::int64_t run, const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    under_way_.clear();
    if (closed_) {
      return;
    }
  }
  Failure failure = failure_of(std::current_exception(), fault_->rank());
  failure.stage = last_stage_;
  failure.replica = options_.replica;
  failure.batch = run;
  failure.action = "loss";
  failure.text = detail::concat(stage_name(last_stage_, options_.replica, options_.num_replicas),
                                ", batch ", run, ", loss: ", what, ": ", failure.cause);
  fault_->raise(std::move(failure));
  changed_.notify_all();
}

void LossBoard::drain() {
  {
    const std::lock_guard lock(mutex_);
    num_due_ = expected_.size();
  }
  changed_.notify_all();
}

bool LossBoard::finish_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool there =
      changed_.wait_for(lock, timeout, [&] { return !is_due() || fault_->raised(); });
  if (there && is_due()) {
    fault_->rethrow_if_raised();
  }
  return there;
}

void LossBoard::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (Work& work : under_way_) {
      work->abort();
    }
  }
  if (shared_) {
    shared_->leave();
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  // Without Python's lock, if this is the last owner: the group's threads may need it to end.
  release_group(group_);
}

}  // namespace pd2
