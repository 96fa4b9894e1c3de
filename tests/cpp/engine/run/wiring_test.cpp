// What a stage's channels have under way, counted over its wirings.

#include "engine/run/wiring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

namespace pd2 {
namespace {

class Sending : public Sender {
 public:
  explicit Sending(std::int64_t bytes) : bytes_(bytes) {}
  void abort() override {}
  std::int64_t buffer_bytes() const override { return bytes_; }

 private:
  void transfer(LayoutId, Message) override {}
  const std::int64_t bytes_;
};

class Receiving : public Receiver {
 public:
  explicit Receiving(std::int64_t bytes) : bytes_(bytes) {}
  void expect(LayoutId) override {}
  Message receive() override { return {}; }
  void abort() override {}
  std::int64_t buffer_bytes() const override { return bytes_; }

 private:
  const std::int64_t bytes_;
};

EdgeEnd end(std::int64_t received, std::int64_t sent) {
  return {std::make_shared<Receiving>(received), std::make_shared<Sending>(sent)};
}

TEST(Wirings, AChannelOfSeveralWiringsCountsOnce) {
  Wirings wirings;
  EXPECT_EQ(wirings.buffer_bytes(), 0);
  const EdgeEnd in = end(1, 10), out = end(1'000, 100);
  wirings.set(0, {{in}, {out}});
  EXPECT_EQ(wirings.buffer_bytes(), 1'111);
  wirings.set(1, {{in}, {out}});  // the model in evaluation has the same edges
  EXPECT_EQ(wirings.buffer_bytes(), 1'111);
  wirings.set(2, {{in, end(20'000, 30'000)}, {}});
  EXPECT_EQ(wirings.buffer_bytes(), 51'111);
  wirings.clear();
  EXPECT_EQ(wirings.buffer_bytes(), 0);
}

}  // namespace
}  // namespace pd2
