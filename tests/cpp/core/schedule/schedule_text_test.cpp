#include "core/schedule/schedule.h"
#include "core/schedule/validate.h"
#include "made_schedules.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <random>

namespace pd2 {
namespace {

using testing::value_error;

const char* const kTwoStages = R"(name: 2bw
stages: 2
microbatches: 2
delay: 1
placement: 0,1
versions: 2,2
[prologue]
0F0,0F1,0B0
1F0,1B0,1F1,1B1,1U1
[steady]
0F0,0B-1,0U-1,0F1,0B0
1F0,1B0,1F1,1B1,1U1
[epilogue]
0B1,0U1
-
)";

TEST(ScheduleText, IsWhatTheHeaderShows) {
  EXPECT_EQ(to_text(make_schedule("2bw", 2, 2)), kTwoStages);
}

TEST(ScheduleText, RoundTripsEveryMadeSchedule) {
  for (const Schedule& schedule : testing::made_schedules(5, 11)) {
    EXPECT_EQ(from_text(to_text(schedule)), schedule) << to_text(schedule);
  }
}

TEST(ScheduleText, RoundTripsWhatIsNotLegal) {
  Schedule schedule;
  schedule.name = "of my own: with [brackets]";
  schedule.num_stages = -3;
  schedule.delay = {7, -2};
  schedule.late_forwards = {0, 9};
  schedule.placement = {1, -1};
  schedule.ranks = {{{}, {{3, ActionKind::kInputGrad, -9}}, {}}, {}};
  EXPECT_EQ(from_text(to_text(schedule)), schedule);
  EXPECT_EQ(from_text(to_text(Schedule())), Schedule());
}

TEST(ScheduleText, IgnoresBlanksCommentsAndEmptyCells) {
  const char* const text =
      "# by hand\r\n\r\n  name :  2bw # two\r\nstages:2\nmicrobatches: 2\nversions: 2 , 2\n"
      "placement:0,1\n delay: 1\n\n[prologue]\n 0F0 ,,0F1,\t0B0,,\n,1F0,1B0,1F1,1B1,1U1\n"
      "[steady]\n0F0,0B-1,0U-1,0F1,0B0\n1F0,1B0,1F1,1B1,1U1\n[epilogue]\n0B1,0U1\n,,,";
  EXPECT_EQ(from_text(text), make_schedule("2bw", 2, 2));
}

// As torch.distributed.pipelining 2.9 to 2.13 dumps Schedule1F1B for two stages.
TEST(ScheduleText, ComputeOnlyCsvIsASynchronousSchedule) {
  const Schedule schedule = from_text("0F0,0F1,,0B0,0F2,0B1,,0B2\r\n,1F0,1B0,1F1,1B1,1F2,1B2,\r\n");
  Schedule expected = make_schedule("1f1b", 2, 3);
  expected.name = "csv";
  EXPECT_EQ(schedule, expected);
  EXPECT_NO_THROW(validate(schedule));
}

TEST(ScheduleText, OfTwoPipelinesSaysSo) {
  const Schedule schedule = make_schedule("chimera", 2, 2);
  EXPECT_EQ(to_text(schedule),
            "name: chimera\npipelines: 2\nstages: 4\nmicrobatches: 1\ndelay: 0\n"
            "placement: 0,1,1,0\nversions: 1,1,1,1\n"
            "[prologue]\n0F0,3F0,3B0,0B0,3U0,0U0\n2F0,1F0,1B0,2B0,1U0,2U0\n"
            "[steady]\n0F0,3F0,3B0,0B0,3U0,0U0\n2F0,1F0,1B0,2B0,1U0,2U0\n"
            "[epilogue]\n-\n-\n");
  EXPECT_EQ(value_error([&] { to_csv(schedule); }),
            "schedule chimera: pipelines: 2: the CSV holds schedules of one pipeline only");
}

TEST(ScheduleText, CsvPlacesSeveralStagesOnARank) {
  const Schedule schedule = from_text("0F0,,2F0,,,2B0,,0B0\n,1F0,,3F0,3B0,,1B0,\n");
  EXPECT_EQ(schedule.num_stages, 4);
  EXPECT_EQ(schedule.num_microbatches, 1);
  EXPECT_EQ(schedule.placement, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{1, 1, 1, 1}));
  const std::vector<Action> expected = {
      {0, ActionKind::kForward, 0},  {2, ActionKind::kForward, 0}, {2, ActionKind::kBackward, 0},
      {0, ActionKind::kBackward, 0}, {0, ActionKind::kUpdate, 0},  {2, ActionKind::kUpdate, 0}};
  EXPECT_EQ(schedule.ranks[0].prologue, expected);
  EXPECT_EQ(schedule.ranks[0].steady, expected);
  EXPECT_TRUE(schedule.ranks[0].epilogue.empty());
  EXPECT_NO_THROW(validate(schedule));
}

TEST(ScheduleText, CsvOfSplitBackwardsIsLegal) {
  EXPECT_NO_THROW(validate(from_text("0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n")));
}

// As torch.distributed.pipelining 2.13 dumps ScheduleDualPipeV for two ranks, in parts.
TEST(ScheduleText, CsvOfOverlappedActionsHasOneAfterTheOther) {
  const Schedule schedule =
      from_text("0F0,( 0F1;1B0 )OVERLAP_F_B,1F0,(1F1;0B0)OVERLAP_F_B,1B1,0B1\r\n");
  EXPECT_EQ(schedule, from_text("0F0,0F1,1B0,1F0,1F1,0B0,1B1,0B1\n"));
}

std::string text_error(const std::string& text) {
  return value_error([&] { from_text(text); });
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  return text.replace(text.find(what), what.size(), by);
}

TEST(ScheduleText, ErrorsNameLineAndColumn) {
  EXPECT_EQ(text_error(""), "line 1, column 1: expected a schedule, found nothing");
  EXPECT_EQ(text_error("# nothing\n\n"), "line 1, column 1: expected a schedule, found nothing");
  EXPECT_EQ(
      text_error("name: a\rb\nstages: 1\nmicrobatches: 1\ndelay: 0\nplacement: 0\nversions: 1\n"),
      "line 1, column 7: expected a name on one line, found \"a\rb\"");
  EXPECT_EQ(text_error("0F0,0F1\n\n1F0, 1X1\n"),
            "line 3, column 6: expected an action like 2F0, found \"1X1\"");
  for (const char* bad : {"F0", "0F", "0F1.5", "-1F0", "0F99999999999", "0FF0", "0F0 0B0", "0f0"}) {
    EXPECT_EQ(text_error(std::string("0F0,") + bad),
              std::string("line 1, column 5: expected an action like 2F0, found \"") + bad + "\"");
  }
  EXPECT_EQ(text_error("0F0,(0F1;0X0)OVERLAP_F_B"),
            "line 1, column 10: expected an action like 2F0, found \"0X0\"");
  EXPECT_EQ(text_error("0F0,()OVERLAP_F_B"),
            "line 1, column 6: expected an action like 2F0, found nothing");
  EXPECT_EQ(text_error("0F0,(0F1;0B0"),
            "line 1, column 5: expected a cell like (0F4;3B0)OVERLAP_F_B, found \"(0F1;0B0\"");
  EXPECT_EQ(text_error("0F0,0U0"),
            "line 1, column 5: expected no update in a compute-only CSV, found \"0U0\"");
  EXPECT_EQ(text_error("0F0,0F-1"),
            "line 1, column 5: expected a microbatch number >= 0, found \"0F-1\"");
  EXPECT_EQ(text_error("0F0,0B0\n1F0,0F1"),
            "line 2, column 5: expected stage 0 on rank 0 only, not on rank 1, found \"0F1\"");
  EXPECT_EQ(text_error("0F0,0B0\n3F0,1F0"),
            "line 2, column 1: expected stages 0 to 2 without a gap, stage 2 is missing, "
            "found \"3F0\"");
}

TEST(ScheduleText, HeaderErrorsNameLineAndColumn) {
  EXPECT_EQ(text_error(replaced(kTwoStages, "stages: 2", "stages: two")),
            "line 2, column 9: expected a whole number, found \"two\"");
  EXPECT_EQ(text_error(replaced(kTwoStages, "placement: 0,1", "placement: 0, ,1")),
            "line 5, column 14: expected a whole number, found nothing");
  EXPECT_EQ(text_error(replaced(kTwoStages, "delay", "  dellay")),
            "line 4, column 3: expected one of name, pipelines, stages, microbatches, delay, late, "
            "placement, "
            "versions, found \"dellay\"");
  EXPECT_EQ(text_error(replaced(kTwoStages, "delay: 1", "stages: 2")),
            "line 4, column 1: expected each key once, found \"stages\"");
  EXPECT_EQ(text_error(replaced(kTwoStages, "delay: 1\n", "")),
            "line 6, column 1: expected \"delay: ...\" before the first section, "
            "found \"[prologue]\"");
  EXPECT_EQ(text_error(replaced(kTwoStages, "delay: 1", "0F0")),
            "line 4, column 1: expected \"key: value\" or [prologue], found \"0F0\"");
}

TEST(ScheduleText, SectionErrorsNameLineAndColumn) {
  EXPECT_EQ(text_error(replaced(kTwoStages, "[steady]", "[steddy]")),
            "line 10, column 1: expected [steady], found \"[steddy]\"");
  EXPECT_EQ(text_error(replaced(kTwoStages, "[epilogue]\n0B1,0U1\n-\n", "")),
            "line 12, column 20: expected [epilogue], found nothing");
  EXPECT_EQ(text_error(replaced(kTwoStages, "0B1,0U1\n", "")),
            "line 14, column 2: expected 2 rows in [epilogue] as in [prologue] but it has 1, "
            "found nothing");
  EXPECT_EQ(text_error(std::string(kTwoStages) + "[more]\n"),
            "line 16, column 1: expected the end after [epilogue], found \"[more]\"");
}

TEST(ScheduleText, ANameThatWouldNotComeBackIsRefused) {
  Schedule schedule = make_schedule("1f1b", 1, 1);
  for (const char* name : {"two\nlines", " blank", "a # comment"}) {
    schedule.name = name;
    EXPECT_NE(value_error([&] { to_text(schedule); }).find(name), std::string::npos);
  }
}

TEST(ScheduleText, DamagedTextIsReadOrRefusedWithAValueError) {
  std::mt19937 random(5);
  const std::string letters = "0123456789,-:[]#\n FBIWUx";
  int num_legal = 0;
  int num_read = 0;
  for (int round = 0; round < 10000; ++round) {
    std::string text = round % 2 == 0 ? kTwoStages : "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
    for (int i = 1 + static_cast<int>(random() % 3); i > 0; --i) {
      const std::size_t at = random() % text.size();
      const char letter = letters[random() % letters.size()];
      switch (random() % 3) {
        case 0:
          text[at] = letter;
          break;
        case 1:
          text.insert(at, 1, letter);
          break;
        default:
          text.erase(at, 1);
      }
    }
    try {
      const Schedule schedule = from_text(text);
      ++num_read;
      EXPECT_EQ(from_text(to_text(schedule)), schedule) << text;
      validate(schedule);
      ++num_legal;
    } catch (const ValueError& error) {
      EXPECT_STRNE(error.what(), "");
    }
  }
  EXPECT_GT(num_read, num_legal);
  EXPECT_GT(num_legal, 0);
}

}  // namespace
}  // namespace pd2
