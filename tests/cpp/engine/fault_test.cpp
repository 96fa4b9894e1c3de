#include "engine/fault.h"

#include "engine/with_peer.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace pd2 {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr int kHere = 5;

template <typename Throw>
Failure failure_when(Throw throws) {
  try {
    throws();
  } catch (...) {
    return failure_of(std::current_exception(), kHere);
  }
  return {};
}

// What a transfer with rank 3 fails with, which takes `seconds`.
Failure failed_transfer(double timeout, double seconds, std::optional<int> rank = 3) {
  return failure_when([&] {
    with_peer(timeout, rank, [&] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      throw std::runtime_error("broken");
    });
  });
}

TEST(FailureOf, TellsThisProcessWhereNothingElseIsKnown) {
  const Failure failure = failure_when([] { throw std::runtime_error("broken"); });
  EXPECT_EQ(failure.type, "StageError");
  EXPECT_EQ(failure.rank, kHere);
  EXPECT_EQ(failure.cause, "broken");
  EXPECT_EQ(failure.traceback, "");
  EXPECT_EQ(failure_when([] { throw 7; }).cause, "unknown exception");
}

TEST(FailureOf, KeepsTheBacktraceOfTorchsErrorsOutOfTheCause) {
  const Failure failure = failure_when([] { TORCH_CHECK(false, "no shape"); });
  EXPECT_EQ(failure.cause, "no shape");
  EXPECT_EQ(failure.traceback.find("no shape"), 0u);
}

TEST(WithPeer, ReturnsWhatTheTransferDoes) {
  EXPECT_EQ(with_peer(kForever, 3, [] { return 7; }), 7);
}

TEST(WithPeer, TakesAFailureAfterTheTimeoutForATimeout) {
  EXPECT_EQ(failed_transfer(0.05, 0.06).type, "PeerTimeout");
  EXPECT_EQ(failed_transfer(60, 0).type, "PeerLost");
  EXPECT_EQ(failed_transfer(kForever, 0).type, "PeerLost");
}

TEST(WithPeer, NamesThePeerIfItIsKnown) {
  EXPECT_EQ(failed_transfer(60, 0).rank, 3);
  EXPECT_EQ(failed_transfer(60, 0).cause, "rank 3: broken");
  EXPECT_EQ(failed_transfer(60, 0, std::nullopt).rank, std::nullopt);
  EXPECT_EQ(failed_transfer(60, 0, std::nullopt).cause, "broken");
}

TEST(WithPeer, KeepsTheTypeThatATransportTells) {
  const auto type_of = [](auto error) {
    return failure_when([&] { with_peer(kForever, 3, [&] { throw error; }); }).type;
  };
  EXPECT_EQ(type_of(PeerTimeout("silent")), "PeerTimeout");
  EXPECT_EQ(type_of(PeerLost("gone")), "PeerLost");
}

TEST(FaultTest, KeepsTheFirstFailureAndThrowsItToAllThatWait) {
  Fault fault(kHere);
  EXPECT_FALSE(fault.failure());
  fault.rethrow_if_raised();
  fault.raise({.text = "first", .stage = 2, .microbatch = 1});
  fault.raise({.text = "second"});
  try {
    fault.rethrow_if_raised();
    FAIL();
  } catch (const PipelineError& error) {
    EXPECT_STREQ(error.what(), "first");
    EXPECT_EQ(error.failure().stage, 2);
    EXPECT_EQ(error.failure().microbatch, 1);
    EXPECT_EQ(error.failure().batch, std::nullopt);
  }
}

// As NCCL's aborts, which wait for an idle device, while another group's kernels spin on it.
TEST(Fault, AbortsAllAtOnceAsEachMayWaitForTheOthers) {
  Fault fault;
  auto all = std::make_shared<std::barrier<>>(3);
  auto ended = std::make_shared<std::atomic<int>>(0);
  for (int i = 0; i < 3; ++i) {
    fault.abort_on_raise([=] {
      all->arrive_and_wait();
      ++*ended;
    });
  }
  fault.raise(Failure{});
  EXPECT_EQ(*ended, 3);
}

TEST(Fault, AbortsWhatDevicesWaitForOnceTheyHadTheTimeToComeToRest) {
  Fault fault;
  const int first = 0, second = 0;
  std::mutex mutex;
  std::string order;
  const auto say = [&](const char* what) {
    const std::lock_guard lock(mutex);
    order += what;
  };
  fault.abort_on_raise([&] { say("abort "); });
  for (const int* owner : {&first, &second}) {
    fault.on_raise(
        owner, [&] { say("end "); }, [&](auto) { say("rest "); });
  }
  fault.raise(Failure{});
  EXPECT_EQ(order, "end end rest rest abort ");
}

TEST(Fault, AbortsAlsoIfWhatEndsWaitingHasToWaitForThat) {
  Fault fault;
  const int owner = 0;
  std::promise<void> aborted;
  fault.abort_on_raise([&] { aborted.set_value(); });
  std::chrono::steady_clock::duration left{1};
  fault.on_raise(
      &owner, [&] { aborted.get_future().wait(); },
      [&](auto until) { left = until - std::chrono::steady_clock::now(); });
  fault.raise(Failure{});
  EXPECT_LE(left.count(), 0);  // and the device has gone on without it
}

// Runs until it is let go on, and a little longer.
struct SlowCall {
  void run() {
    runs.set_value();
    goes_on.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    has_ended = true;
  }
  std::promise<void> runs, goes_on;
  std::atomic<bool> has_ended = false;
};

TEST(Fault, LetsOthersWaitUntilDevicesHadTheTimeToComeToRest) {
  Fault fault;
  fault.wait_for_rest();  // there is nothing to wait for
  const int owner = 0;
  SlowCall rest;
  fault.on_raise(
      &owner, [] {}, [&](auto) { rest.run(); });
  auto raising = std::async(std::launch::async, [&] { fault.raise(Failure{}); });
  rest.runs.get_future().wait();
  rest.goes_on.set_value();
  fault.wait_for_rest();
  EXPECT_TRUE(rest.has_ended);
}

TEST(Fault, IsKnownToWhoeverItsCallbacksWakeAndWait) {
  Fault fault;
  const int owner = 0;
  bool is_known = false;
  fault.on_raise(&owner, [&] {
    // A thread that asks meanwhile gets an answer.
    is_known = std::async(std::launch::async, [&] { return fault.failure(); }).get().has_value();
  });
  fault.raise(Failure{});
  EXPECT_TRUE(is_known);
}

TEST(Fault, ForgetsACallbackThatRunsOnlyWhenItHasEnded) {
  Fault fault;
  const int owner = 0, other = 0;
  SlowCall call;
  fault.on_raise(&owner, [&] { call.run(); });
  auto raising = std::async(std::launch::async, [&] { fault.raise(Failure{}); });
  call.runs.get_future().wait();
  fault.forget(&other);  // has nothing to wait for
  EXPECT_FALSE(call.has_ended);
  call.goes_on.set_value();
  fault.forget(&owner);
  EXPECT_TRUE(call.has_ended);
}

TEST(Fault, RunsWhatComesLateAtOnce) {
  Fault fault;
  fault.raise(Failure{});
  int calls = 0;
  fault.on_raise(&calls, [&] { ++calls; });
  fault.abort_on_raise([&] { ++calls; });
  int num_rests = 0;
  fault.on_raise(
      &num_rests, [&] { ++calls; }, [&](auto) { ++num_rests; });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(num_rests, 1);
}

}  // namespace
}  // namespace pd2
