// Texts of schedules with random changes: each is read or refused by a ValueError that says
// something, and what is read is written as it was read. PD2_FUZZ_INPUTS says how many.

#include "core/schedule/unroll.h"
#include "core/schedule/validate.h"
#include "raises.h"
#include "schedule_mutations.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {
namespace {

using testing::ScheduleMutator;
using testing::value_error;

constexpr int kInputsPerSeed = 100;

int num_inputs() {
  const char* given = std::getenv("PD2_FUZZ_INPUTS");
  return given ? std::atoi(given) : 20'000;
}

// What parsers stumble over: the ends of int, signs, sections, bytes that are no text.
constexpr std::array<std::string_view, 28> kPieces = {
    "2147483647",
    "2147483648",
    "-2147483648",
    "-1",
    "0",
    "999999999999999999999",
    "0F0",
    "1B2147483647",
    "0U-1",
    "0I0",
    "0W0",
    "2147483647F0",
    ",",
    "\n",
    ":",
    "#",
    "-",
    " ",
    "\t\r",
    "[prologue]",
    "[steady]",
    "[",
    "pipelines: 2\n",
    "versions:",
    "\xff\x80",
    "+1",
    "0F",
    "F",
};

// One small change of bytes, or of a line.
void change(ScheduleMutator& random, std::string& text) {
  const int size = static_cast<int>(text.size());
  const int at = random.below(size + 1);
  const int length = random.below(3) ? random.below(4) : random.below(60);
  switch (random.below(7)) {
    case 0:
      if (at < size) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
      return;
    case 1:
      text.erase(at, length);
      return;
    case 2:
      text.insert(at, text.substr(random.below(size + 1), length));
      return;
    case 3:
      if (random.below(10) == 0) text.resize(at);
      return;
    case 4: {
      const std::size_t digit = text.find_first_of("0123456789", at);
      if (digit != std::string::npos) text[digit] = static_cast<char>('0' + random.below(10));
      return;
    }
    case 5: {
      const std::size_t digit = text.find_first_of("0123456789", at);
      if (digit != std::string::npos) text.replace(digit, 1, kPieces[random.below(12)]);
      return;
    }
    default:
      text.insert(at, kPieces[random.below(static_cast<int>(kPieces.size()))]);
  }
}

std::string some_text(ScheduleMutator& random) {
  Schedule schedule = random.make(5, 6);
  if (random.below(3) == 0) {
    for (int i = 0; i < 3; ++i) random.change(schedule);
  }
  std::string csv;
  if (random.below(3) == 0 && value_error([&] { csv = to_csv(schedule); }).empty()) return csv;
  return to_text(schedule);
}

struct Count {
  int read = 0;
  int legal = 0;
};

void give(const std::string& text, Count& count) {
  Schedule schedule;
  const std::string error = value_error([&] { schedule = from_text(text); });
  if (!error.empty()) {
    ASSERT_EQ(error.rfind("line ", 0), 0u) << error;
    return;
  }
  ++count.read;
  ASSERT_EQ(from_text(to_text(schedule)), schedule) << text;
  if (!value_error([&] { validate(schedule); }).empty()) return;
  ++count.legal;
  ASSERT_GE(schedule.total_microbatches(), 1) << text;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    ASSERT_GE(max_in_flight(schedule, stage), 1) << text;
  }
}

TEST(ScheduleTextFuzz, EveryTextIsReadOrRefused) {
  Count count;
  const int inputs = num_inputs();
  for (int input = 0; input < inputs; input += kInputsPerSeed) {
    ScheduleMutator random(static_cast<unsigned>(input));
    const std::string whole = some_text(random);
    for (int i = 0; i < kInputsPerSeed; ++i) {
      std::string text = whole;
      for (int changes = random.below(4); changes >= 0; --changes) change(random, text);
      SCOPED_TRACE(input + i);
      give(text, count);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(count.read, inputs / 20);
  EXPECT_GT(count.legal, inputs / 50);
  RecordProperty("read", count.read);
  RecordProperty("legal", count.legal);
}

}  // namespace
}  // namespace pd2
