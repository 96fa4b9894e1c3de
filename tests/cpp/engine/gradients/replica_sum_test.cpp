#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

class Done : public c10d::Work {
 public:
  Done() { finish(); }
};

// A sum to which the other replica never comes.
class Never : public c10d::Work {};

// Another replica that has the same gradients. Works are over when they begin.
class Alike : public c10d::ProcessGroup {
 public:
  Alike() : c10d::ProcessGroup(0, 2) {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    summed.push_back(tensors.front().numel());
    if (is_lost) {
      return c10::make_intrusive<Never>();
    }
    tensors.front().mul_(2);
    return c10::make_intrusive<Done>();
  }
  bool is_lost = false;
  std::vector<std::int64_t> summed;  // elements of each sum
};

// Ranks of one process, each with a thread, whose exchanges are over when all have come to them.
class Exchanges {
 public:
  class Work : public c10d::Work {
   public:
    void end() { finish(); }
  };
  struct Call {
    at::Tensor to, from;
    std::vector<std::int64_t> to_sizes, from_sizes;  // none: a broadcast
    int root = 0;
    c10::intrusive_ptr<Work> work = c10::make_intrusive<Work>();
  };
  explicit Exchanges(int size) : bytes_sent(size), calls(size) {}

  c10::intrusive_ptr<c10d::Work> come(int rank, Call call) {
    const std::lock_guard lock(mutex_);
    const auto others = static_cast<std::int64_t>(calls.size()) - 1;
    if (call.from_sizes.empty()) {
      bytes_sent[rank] += rank == call.root ? others * call.from.numel() : 0;
    } else {
      EXPECT_EQ(call.from_sizes[rank], 0) << "what a rank has need not be sent";
      bytes_sent[rank] += call.from.numel();
    }
    calls[rank].push_back(call);
    const std::size_t number = calls[rank].size() - 1;
    if (std::ranges::all_of(calls, [&](const auto& each) { return each.size() > number; })) {
      carry_out(number);
    }
    return call.work;
  }

  std::vector<std::int64_t> bytes_sent;  // by rank, to others
  std::vector<std::vector<Call>> calls;  // [rank][in order]

 private:
  void carry_out(std::size_t number) {
    const Call& first = calls[0][number];
    for (std::size_t to = 0; to < calls.size(); ++to) {
      const Call& taker = calls[to][number];
      if (first.from_sizes.empty()) {
        taker.to.copy_(calls[first.root][number].from);
        continue;
      }
      const auto places = taker.to.split_with_sizes(taker.to_sizes);
      for (std::size_t from = 0; from < calls.size(); ++from) {
        const Call& giver = calls[from][number];
        places[from].copy_(giver.from.split_with_sizes(giver.from_sizes)[to]);
      }
    }
    for (const auto& of_rank : calls) {
      of_rank[number].work->end();
    }
  }

  std::mutex mutex_;
};

class Exchanging : public c10d::ProcessGroup {
 public:
  Exchanging(int rank, int size, Exchanges& exchanges)
      : c10d::ProcessGroup(rank, size), exchanges_(exchanges) {}
  // As newer and older releases of torch call it.
  virtual c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& to, at::Tensor& from,
                                                           std::vector<std::int64_t>& to_sizes,
                                                           std::vector<std::int64_t>& from_sizes,
                                                           const c10d::AllToAllOptions&) {
    return exchanges_.come(
        getRank(), {.to = to, .from = from, .to_sizes = to_sizes, .from_sizes = from_sizes});
  }
  virtual c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& to, at::Tensor& from,
                                                       std::vector<std::int64_t>& to_sizes,
                                                       std::vector<std::int64_t>& from_sizes,
                                                       const c10d::AllToAllOptions&) {
    return exchanges_.come(
        getRank(), {.to = to, .from = from, .to_sizes = to_sizes, .from_sizes = from_sizes});
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor& all = tensors.front();
    return exchanges_.come(getRank(), {.to = all,
                                       .from = all,
                                       .to_sizes = {},
                                       .from_sizes = {},
                                       .root = static_cast<int>(options.rootRank)});
  }

 private:
  Exchanges& exchanges_;
};

const auto kGoesOn = [] { return false; };

// Three parameters of 16 elements, a cache line each, and their flags; two buffers.
class ReplicaSumTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 16;

  ReplicaSumTest() : packing_({at::ones({kNumel}), at::ones({kNumel}), at::ones({kNumel})}) {
    std::vector<at::Tensor> buffers;
    for (int i = 0; i < 2; ++i) {
      buffers.push_back(packing_.allocate(at::kFloat, GradAccumulator::num_flags(packing_, true)));
    }
    gradients_.push_back(std::make_unique<GradAccumulator>(
        packing_, std::vector<std::string>{"a", "b", "c"}, buffers));
  }

  ReplicaSum sum(std::int64_t bucket_bytes) {
    return {{.group = group_, .order = {}}, bucket_bytes, gradients_, std::nullopt};
  }

  void begin_batch() { gradients_[0]->begin_batch(1); }
  void microbatch(ReplicaSum& sum, bool is_last, const std::vector<std::size_t>& parameters) {
    sum.begin_microbatch(1, is_last);
    for (const std::size_t parameter : parameters) {
      gradients_[0]->add(parameter, at::full({kNumel}, 1.0));
    }
  }
  float value(std::size_t parameter) const {
    return gradients_[0]->view(1, parameter).max().item<float>();
  }

  FlatPacking packing_;
  std::vector<std::unique_ptr<GradAccumulator>> gradients_;
  c10::intrusive_ptr<Alike> group_ = c10::make_intrusive<Alike>();
};

TEST_F(ReplicaSumTest, OneBucketIsSummedWithItsFlagsAtTheEnd) {
  ReplicaSum sum = this->sum(1 << 20);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {2, 1, 0});
  EXPECT_TRUE(group_->summed.empty());
  sum.end_batch(1);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{3 * kNumel + 3}));
  EXPECT_EQ(value(0), 4);
}

TEST_F(ReplicaSumTest, BucketsBeginInTheLastMicrobatchFromTheLastParameterOn) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  EXPECT_TRUE(group_->summed.empty());
  microbatch(sum, true, {1});
  EXPECT_TRUE(group_->summed.empty()) << "parameter 2 comes first on every replica";
  gradients_[0]->add(2, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 2u);
  gradients_[0]->add(0, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 3u);
  EXPECT_EQ(sum.end_batch(1)->works.size(), 4u);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{kNumel, kNumel, kNumel, 3}));
  for (std::size_t parameter = 0; parameter < 3; ++parameter) {
    EXPECT_EQ(value(parameter), 4);
  }
}

TEST_F(ReplicaSumTest, AGradientThatDoesNotComeChangesNoOrder) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {1, 0});
  EXPECT_TRUE(group_->summed.empty());
  sum.end_batch(1);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{kNumel, kNumel, kNumel, 3}));
  EXPECT_EQ(value(2), 2);
}

TEST_F(ReplicaSumTest, AGradientThatComesInPartsIsWaitedFor) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 2, 1, 0});
  microbatch(sum, true, {2});
  EXPECT_TRUE(group_->summed.empty());
  gradients_[0]->add(2, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 1u);
  EXPECT_EQ(value(2), 8);
}

TEST_F(ReplicaSumTest, AGradientThatComesTooLateIsRefused) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {2});
  EXPECT_THROW(gradients_[0]->add(2, at::full({kNumel}, 1.0)), ValueError);
}

TEST_F(ReplicaSumTest, WhatIsSettledIsSummedOnce) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1});
  sum.settle(kGoesOn);  // incomplete: nothing to wait for
  EXPECT_TRUE(group_->summed.empty());
  microbatch(sum, true, {2, 1});
  sum.settle(kGoesOn);
  EXPECT_TRUE(sum.end_batch(1)->is_settled);
  EXPECT_EQ(group_->summed.size(), 4u);
  EXPECT_EQ(value(2), 4);
  EXPECT_FALSE(gradients_[0]->has_gradient(1)[0]);
}

TEST_F(ReplicaSumTest, AFailureElsewhereEndsSettling) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  group_->is_lost = true;
  microbatch(sum, true, {2, 1, 0});
  int times_asked = 0;
  EXPECT_THROW(sum.settle([&] { return ++times_asked == 2; }), ChannelAborted);
  EXPECT_EQ(times_asked, 2);
}

TEST_F(ReplicaSumTest, AHookGetsTheGradientsInTheUpdateAndTheFlagsAreSummed) {
  for (const std::int64_t bucket_bytes : {std::int64_t{1} << 20, std::int64_t{1}}) {
    ReplicaSum sum = this->sum(bucket_bytes);
    std::vector<std::int64_t> given;
    std::optional<double> factor;
    bool goes_on = true;
    sum.set_hook([&](const std::vector<at::Tensor>& buckets, std::optional<double> unscaling) {
      for (const at::Tensor& bucket : buckets) {
        given.push_back(bucket.numel());
        bucket.mul_(10);
      }
      factor = unscaling;
      return goes_on;
    });
    group_->summed.clear();
    begin_batch();
    microbatch(sum, false, {2, 1});
    microbatch(sum, true, {2, 1});
    sum.settle(kGoesOn);  // gradients that the hook has not had may be moved
    const ReplicaSum::UnderWay batch = sum.end_batch(1);
    EXPECT_TRUE(group_->summed.empty());
    sum.call_hook(*batch, 0.5, kGoesOn);
    EXPECT_EQ(given, bucket_bytes == 1 ? (std::vector<std::int64_t>{kNumel, kNumel, kNumel})
                                       : (std::vector<std::int64_t>{3 * kNumel}));
    EXPECT_EQ(factor, 0.5);
    EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{3}));
    EXPECT_EQ(value(2), 20);
    EXPECT_EQ(value(0), 0);
    sum.let_end(*sum.end_batch(1), kGoesOn);  // a discarded batch's, which no hook gets
    EXPECT_EQ(group_->summed.size(), 1u);
    goes_on = false;
    EXPECT_THROW(sum.call_hook(*sum.end_batch(1), std::nullopt, kGoesOn), ChannelAborted);
  }
}

TEST_F(ReplicaSumTest, WithOneBucketNobodyListensForGradients) {
  int heard = 0;
  gradients_[0]->on_added([&](std::size_t) { ++heard; });
  ReplicaSum one = this->sum(1 << 20);
  begin_batch();
  microbatch(one, true, {2, 1, 0});
  EXPECT_EQ(heard, 3);
  ReplicaSum several = this->sum(1);
  microbatch(several, false, {2, 1, 0});
  EXPECT_EQ(heard, 3);
}

// Replicas of one stage in this process, whose gradients have other sums in every order.
class OrderedSumTest : public ::testing::Test {
 protected:
  struct Replica {
    std::unique_ptr<FlatPacking> packing;
    std::vector<std::unique_ptr<GradAccumulator>> gradients;
    std::unique_ptr<ReplicaSum> sum;
  };

  void make(const std::vector<int>& order, const std::vector<std::int64_t>& numels,
            std::int64_t bucket_bytes) {
    const int size = static_cast<int>(order.size());
    exchanges_ = std::make_unique<Exchanges>(size);
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (const std::int64_t numel : numels) {
      parameters.push_back(at::ones({numel}));
      names.push_back(std::to_string(names.size()));
    }
    for (int rank = 0; rank < size; ++rank) {
      Replica& replica = replicas_.emplace_back();
      replica.packing = std::make_unique<FlatPacking>(parameters);
      const std::int64_t flags = GradAccumulator::num_flags(*replica.packing, true);
      const auto buffer = [&] { return replica.packing->allocate(at::kFloat, flags); };
      replica.gradients.push_back(std::make_unique<GradAccumulator>(
          *replica.packing, names, std::vector<at::Tensor>{buffer(), buffer()}));
      replica.sum = std::make_unique<ReplicaSum>(
          Replicas{c10::make_intrusive<Exchanging>(rank, size, *exchanges_), order}, bucket_bytes,
          replica.gradients, std::nullopt);
    }
  }
  static at::Tensor gradient(std::int64_t rank, std::int64_t numel) {
    return at::sin(at::arange(1, numel + 1, at::kFloat) * (1.7 + static_cast<double>(rank)));
  }
  // A batch of two microbatches, from the last parameter on.
  ReplicaSum::UnderWay train(std::size_t rank, std::size_t buffer) {
    Replica& replica = replicas_[rank];
    replica.gradients[0]->begin_batch(buffer);
    for (const bool is_last : {false, true}) {
      replica.sum->begin_microbatch(buffer, is_last);
      for (std::size_t i = replica.packing->views().size(); i-- > 0;) {
        const std::int64_t numel = replica.packing->views()[i].numel;
        const at::Tensor mine = gradient(static_cast<std::int64_t>(rank), numel);
        replica.gradients[0]->add(i, is_last ? mine : at::zeros({numel}));
      }
    }
    return replica.sum->end_batch(buffer);
  }
  void train_all(std::size_t buffer) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
      threads.emplace_back(
          [this, rank, buffer] { replicas_[rank].sum->finish(*train(rank, buffer), kGoesOn); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  void expect_sums(const std::vector<int>& order, std::size_t buffer) {
    for (const Replica& replica : replicas_) {
      for (std::size_t i = 0; i < replica.packing->views().size(); ++i) {
        const std::int64_t numel = replica.packing->views()[i].numel;
        at::Tensor want = gradient(order[0], numel);
        for (std::size_t place = 1; place < order.size(); ++place) {
          want = want + gradient(order[place], numel);
        }
        EXPECT_TRUE(at::equal(replica.gradients[0]->view(buffer, i), want)) << "parameter " << i;
      }
    }
  }

  std::unique_ptr<Exchanges> exchanges_;
  std::deque<Replica> replicas_;
};

TEST_F(OrderedSumTest, GradientsAreAddedInTheOrderThatIsGiven) {
  const std::vector<std::vector<int>> orders{{0, 1, 2}, {2, 0, 1}, {1, 3, 2, 0}};
  for (const std::vector<int>& order : orders) {
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
      replicas_.clear();
      make(order, {1000, 7, 1}, bucket_bytes);
      for (const std::size_t buffer : {0, 1}) {
        train_all(buffer);
        expect_sums(order, buffer);
      }
    }
  }
}

TEST_F(OrderedSumTest, EachReplicaSendsWhatARingDoes) {
  constexpr std::int64_t kNumel = 3 << 18;  // three parts of 1 MiB, and some
  make({0, 1, 2, 3}, {kNumel - 16, 16}, 5 << 18);
  train_all(0);
  expect_sums({0, 1, 2, 3}, 0);
  for (const std::int64_t sent : exchanges_->bytes_sent) {
    EXPECT_NEAR(static_cast<double>(sent), 4 * 2.0 * 3 / 4 * kNumel, 64) << "flags more";
  }
  // Room for what two parts bring from the three others.
  EXPECT_LE(replicas_[0].sum->bytes(), 2 * (5 << 18) * 3 / 4);
  EXPECT_GE(replicas_[0].sum->bytes(), 2 * (4 << 18) * 3 / 4);
}

TEST_F(OrderedSumTest, ABatchWaitsUntilTheOneBeforeHasNothingLeftToBegin) {
  make({0, 1}, {16, 16, 16, 16}, 1);
  const ReplicaSum::UnderWay first = train(0, 0);
  EXPECT_EQ(exchanges_->calls[0].size(), 2u) << "as many as there are lanes";
  replicas_[0].gradients[0]->begin_batch(1);
  replicas_[0].sum->begin_microbatch(1, true);
  replicas_[0].gradients[0]->add(3, gradient(0, 16));
  EXPECT_EQ(exchanges_->calls[0].size(), 2u);
}

// Shares of two buckets: what a rank gives others before it has all of its own, and what it takes.
TEST_F(OrderedSumTest, SharesAreGivenBucketByBucket) {
  make({0, 1, 2}, {48, 48, 48, 48, 48, 48}, 3 * 48 * 4);
  std::vector<at::Tensor> flats;
  for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
    replicas_[rank].sum->share(true, {}, {});
    flats.push_back(at::zeros({replicas_[rank].packing->numel()}, at::kShort));
    for (const Share& share : replicas_[rank].sum->shares()) {
      if (share.rank == static_cast<int>(rank)) {
        flats[rank].slice(0, share.begin, share.end).fill_(10 * (share.bucket + 1) + share.rank);
      }
    }
  }
  const auto of_bucket = [&](std::size_t rank, std::size_t bucket) {
    const GradientBuckets::Bucket& all = replicas_[rank].sum->buckets()[bucket];
    return flats[rank].slice(0, all.begin, all.end);
  };
  const auto values = [&](std::int64_t bucket) {
    return at::tensor({10 * bucket, 10 * bucket + 1, 10 * bucket + 2}, at::kShort)
        .repeat_interleave(48);
  };
  for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
    EXPECT_EQ(exchanges_->calls[rank].size(), 0u);
    replicas_[rank].sum->begin_gather(1, {flats[rank]});
    EXPECT_EQ(exchanges_->calls[rank].size(), 2u) << "one for each of the others";
  }
  for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
    EXPECT_TRUE(of_bucket(rank, 0).equal(values(1))) << rank;
    EXPECT_FALSE(of_bucket(rank, 1).equal(values(2))) << rank;
  }
  for (int times = 0; times < 2; ++times) {  // and again from the first bucket on
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
      threads.emplace_back(
          [&, rank] { replicas_[rank].sum->gather(nullptr, {flats[rank]}, kGoesOn); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (std::size_t rank = 0; rank < replicas_.size(); ++rank) {
      EXPECT_EQ(exchanges_->calls[rank].size(), times == 0 ? 4u : 8u);
      EXPECT_TRUE(of_bucket(rank, 0).equal(values(1))) << rank;
      EXPECT_TRUE(of_bucket(rank, 1).equal(values(2))) << rank;
    }
  }
}

}  // namespace
}  // namespace pd2
