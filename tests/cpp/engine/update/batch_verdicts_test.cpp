#include "engine/update/batch_verdicts.h"

#include "engine/channels/channel.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

bool goes_on() { return false; }

// A process of two, without any connection: what they know goes through the board.
struct Process {
  explicit Process(std::shared_ptr<SharedBoard> given, int rank, int num_stages = 1)
      : board(std::move(given)),
        verdicts(num_stages, discards, c10::make_intrusive<c10d::ProcessGroup>(rank, 2), board) {}

  const std::shared_ptr<SharedBoard> board;
  // Not shared, so that a verdict alone tells the other process.
  const std::shared_ptr<Discards> discards = std::make_shared<Discards>(nullptr);
  BatchVerdicts verdicts;
};

class TwoProcesses : public ::testing::Test {
 protected:
  TwoProcesses()
      : one_(SharedBoard::create(2, 1, SharedBoard::Timeout(20)), 0),
        other_(SharedBoard::open(one_.board->address(), 1, SharedBoard::Timeout(20)), 1) {}

  Process one_;
  Process other_;
};

TEST(BatchVerdicts, AStageWaitsForAllStagesOfTheProcess) {
  const auto discards = std::make_shared<Discards>(nullptr);
  BatchVerdicts verdicts(2, discards, nullptr, nullptr);
  verdicts.give(0, goes_on);
  std::atomic<bool> knows = false;
  std::jthread waiting([&] {
    verdicts.wait(0, goes_on);
    EXPECT_EQ(discards->first(), 0);
    knows = true;
  });
  std::this_thread::sleep_for(150ms);
  EXPECT_FALSE(knows);
  discards->discard(0);  // the second stage fails in the batch
  verdicts.give(0, goes_on);
  waiting.join();
  EXPECT_TRUE(knows);
}

TEST(BatchVerdicts, OneThatIsStoppedDoesNotWait) {
  BatchVerdicts verdicts(2, std::make_shared<Discards>(nullptr), nullptr, nullptr);
  verdicts.give(0, goes_on);
  EXPECT_THROW(verdicts.wait(0, [] { return true; }), ChannelAborted);
}

TEST(BatchVerdicts, BatchesCanComeAgainOnceTheyAreForgotten) {
  const auto discards = std::make_shared<Discards>(nullptr);
  BatchVerdicts verdicts(1, discards, nullptr, nullptr);
  for (const std::int64_t run : {3, 4, 5}) {
    verdicts.give(run, goes_on);
  }
  verdicts.forget();
  EXPECT_THROW(verdicts.wait(4, [] { return true; }), ChannelAborted);
  verdicts.give(4, goes_on);
  verdicts.wait(4, goes_on);
  EXPECT_THROW(verdicts.wait(5, [] { return true; }), ChannelAborted);
}

TEST_F(TwoProcesses, AFailureOfOneIsKnownToTheOtherBeforeItsUpdate) {
  for (std::int64_t batch = 0; batch < 200; ++batch) {
    const bool fails = batch % 7 == 3;
    std::jthread peer([&] {
      if (fails) {
        other_.discards->discard(batch);
      }
      other_.verdicts.give(batch, goes_on);
      other_.verdicts.wait(batch, goes_on);
    });
    one_.verdicts.give(batch, goes_on);
    one_.verdicts.wait(batch, goes_on);
    peer.join();
    ASSERT_EQ(one_.discards->first(), fails ? batch : Discards::kNone);
    one_.discards->go_on();
    other_.discards->go_on();
  }
}

TEST_F(TwoProcesses, NobodyNeedAskForAVerdict) {
  std::jthread peer([&] {
    for (std::int64_t batch = 0; batch < 100; ++batch) {
      other_.verdicts.give(batch, goes_on);
    }
    other_.verdicts.wait(99, goes_on);
  });
  for (std::int64_t batch = 0; batch < 100; ++batch) {
    one_.verdicts.give(batch, goes_on);
    if (batch % 3 == 0) {
      one_.verdicts.wait(batch, goes_on);
    }
  }
  one_.verdicts.wait(99, goes_on);
  peer.join();
  EXPECT_EQ(one_.discards->first(), Discards::kNone);
}

TEST_F(TwoProcesses, StagesOfAProcessWaitTogether) {
  Process& one = one_;
  BatchVerdicts two_stages(2, one.discards, c10::make_intrusive<c10d::ProcessGroup>(0, 2),
                           one.board);
  constexpr std::int64_t kBatches = 100;
  const auto stage = [&](std::int64_t failing) {
    for (std::int64_t batch = 0; batch < kBatches; ++batch) {
      if (batch == failing) {
        one.discards->discard(batch);
      }
      two_stages.give(batch, goes_on);
      two_stages.wait(batch, goes_on);
      EXPECT_EQ(one.discards->covers(batch), batch >= 40);
    }
  };
  std::array<std::jthread, 3> threads{std::jthread(stage, -1), std::jthread(stage, 40),
                                      std::jthread([&] {
                                        for (std::int64_t batch = 0; batch < kBatches; ++batch) {
                                          other_.verdicts.give(batch, goes_on);
                                          other_.verdicts.wait(batch, goes_on);
                                          EXPECT_EQ(other_.discards->covers(batch), batch >= 40);
                                        }
                                      })};
}

TEST_F(TwoProcesses, AStopEndsWaitingForTheOther) {
  one_.verdicts.give(0, goes_on);
  EXPECT_THROW(one_.verdicts.wait(0, [] { return true; }), ChannelAborted);
}

TEST(BatchVerdicts, AProcessThatGivesNoWordIsNotWaitedForLongerThanTheTimeout) {
  Process one(SharedBoard::create(2, 1, SharedBoard::Timeout(0.3)), 0);
  const Process silent(SharedBoard::open(one.board->address(), 1, SharedBoard::Timeout(0.3)), 1);
  one.verdicts.give(0, goes_on);
  EXPECT_THROW(one.verdicts.wait(0, goes_on), PeerTimeout);
}

}  // namespace
}  // namespace pd2
