// The text form of schedules, see to_text and from_text in core/schedule/schedule.h.

#include "core/check.h"
#include "core/schedule/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>

namespace pd2 {
namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr std::string_view kNothing = "-";
constexpr std::array<std::string_view, 3> kSections = {"[prologue]", "[steady]", "[epilogue]"};

// A piece of the text that knows where it stands.
struct Token {
  std::string_view text;
  int line = 1;
  int column = 1;

  Token trimmed() const {
    const std::size_t first = text.find_first_not_of(kBlanks);
    if (first == std::string_view::npos) return {text.substr(text.size()), line, column};
    const std::size_t last = text.find_last_not_of(kBlanks);
    return {text.substr(first, last - first + 1), line, column + static_cast<int>(first)};
  }

  std::vector<Token> split(char separator) const {
    std::vector<Token> tokens;
    for (std::size_t begin = 0;;) {
      const std::size_t end = text.find(separator, begin);
      const std::string_view piece = text.substr(begin, end - begin);
      tokens.push_back(Token{piece, line, column + static_cast<int>(begin)}.trimmed());
      if (end == std::string_view::npos) return tokens;
      begin = end + 1;
    }
  }

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... expected) const {
    const std::string found = text.empty() ? "nothing" : detail::concat('"', text, '"');
    detail::throw_value_error(detail::concat("line ", line, ", column ", column, ": expected ",
                                             expected..., ", found ", found));
  }
};

// The lines that are not blank, without comments.
std::vector<Token> lines_of(std::string_view text) {
  std::vector<Token> lines;
  int number = 0;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view whole = text.substr(begin, end - begin);
    const Token line = Token{whole.substr(0, whole.find('#')), ++number}.trimmed();
    if (!line.text.empty()) lines.push_back(line);
    begin = end + 1;
  }
  return lines;
}

std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int parse_number(const Token& token) {
  const std::optional<int> value = parse_int(token.text);
  if (!value) token.fail("a whole number");
  return *value;
}

std::vector<int> parse_numbers(const Token& token) {
  std::vector<int> values;
  if (token.text.empty()) return values;
  for (const Token& each : token.split(',')) values.push_back(parse_number(each));
  return values;
}

Action parse_action(const Token& token) {
  const std::size_t kind = token.text.find_first_of("FBIWU");
  std::optional<int> stage;
  std::optional<int> microbatch;
  if (kind != std::string_view::npos) {
    stage = parse_int(token.text.substr(0, kind));
    microbatch = parse_int(token.text.substr(kind + 1));
  }
  if (!stage || *stage < 0 || !microbatch) token.fail("an action like 2F0");
  return {.stage = *stage,
          .kind = static_cast<ActionKind>(token.text[kind]),
          .microbatch = *microbatch};
}

struct PlacedAction {
  Action action;
  Token token;
};

// A forward and a backward that torch's DualPipeV lets its model mix, "(0F4;7B0)OVERLAP_F_B": a
// rank does one action at a time, so they come one after the other.
std::vector<Token> actions_in(const Token& cell) {
  constexpr std::string_view kEnd = ")OVERLAP_F_B";
  if (!cell.text.starts_with('(')) return {cell};
  if (!cell.text.ends_with(kEnd)) cell.fail("a cell like (0F4;3B0)OVERLAP_F_B");
  const std::string_view inside = cell.text.substr(1, cell.text.size() - 1 - kEnd.size());
  return Token{inside, cell.line, cell.column + 1}.split(';');
}

std::vector<PlacedAction> parse_row(const Token& line) {
  std::vector<PlacedAction> row;
  if (line.text == kNothing) return row;
  for (const Token& cell : line.split(',')) {
    if (cell.text.empty()) continue;
    for (const Token& action : actions_in(cell)) row.push_back({parse_action(action), action});
  }
  return row;
}

std::vector<Action> actions_of(const std::vector<PlacedAction>& row) {
  std::vector<Action> list;
  for (const PlacedAction& each : row) list.push_back(each.action);
  return list;
}

// torch.distributed.pipelining's compute-only CSV.
Schedule parse_csv(const std::vector<Token>& lines) {
  Schedule schedule;
  schedule.name = "csv";
  std::map<int, int> rank_of;  // by stage
  std::optional<PlacedAction> highest_stage;
  for (const Token& line : lines) {
    const int rank = static_cast<int>(schedule.ranks.size());
    const std::vector<PlacedAction> row = parse_row(line);
    std::set<int> stages;
    int last_microbatch = -1;
    for (const PlacedAction& each : row) {
      const Action& action = each.action;
      if (action.kind == ActionKind::kUpdate) each.token.fail("no update in a compute-only CSV");
      if (action.microbatch < 0 || action.microbatch == std::numeric_limits<int>::max()) {
        each.token.fail("a microbatch number >= 0");
      }
      const auto [known, is_new] = rank_of.emplace(action.stage, rank);
      if (known->second != rank) {
        each.token.fail("stage ", action.stage, " on rank ", known->second, " only, not on rank ",
                        rank);
      }
      if (!highest_stage || action.stage > highest_stage->action.stage) highest_stage = each;
      stages.insert(action.stage);
      last_microbatch = std::max(last_microbatch, action.microbatch);
    }
    schedule.num_microbatches = std::max(schedule.num_microbatches, last_microbatch + 1);
    RankActions& actions = schedule.ranks.emplace_back();
    actions.prologue = actions_of(row);
    for (const int stage : stages) {
      actions.prologue.push_back({.stage = stage, .kind = ActionKind::kUpdate});
    }
  }

  schedule.num_stages = static_cast<int>(rank_of.size());
  for (const auto& [stage, rank] : rank_of) {
    const int expected = static_cast<int>(schedule.placement.size());
    if (stage != expected) {
      highest_stage->token.fail("stages 0 to ", rank_of.size() - 1, " without a gap, stage ",
                                expected, " is missing");
    }
    schedule.placement.push_back(rank);
  }
  schedule.delay.assign(schedule.num_stages, 0);
  schedule.num_versions.assign(schedule.num_stages, 1);
  for (RankActions& actions : schedule.ranks) {
    for (Action& action : actions.prologue) {
      if (action.kind == ActionKind::kUpdate) action.microbatch = schedule.num_microbatches - 1;
    }
    actions.steady = actions.prologue;
  }
  return schedule;
}

// The `key: value` lines before the first section, which becomes the next line.
std::map<std::string_view, Token> read_header(const std::vector<Token>& lines, std::size_t& next) {
  constexpr std::array<std::string_view, 8> kKeys = {
      "name", "pipelines", "stages", "microbatches", "delay", "late", "placement", "versions"};
  std::map<std::string_view, Token> values;
  for (; next < lines.size() && lines[next].text.front() != '['; ++next) {
    const Token& line = lines[next];
    const std::size_t colon = line.text.find(':');
    if (colon == std::string_view::npos) line.fail("\"key: value\" or ", kSections[0]);
    const Token key = Token{line.text.substr(0, colon), line.line, line.column}.trimmed();
    const Token value =
        Token{line.text.substr(colon + 1), line.line, line.column + static_cast<int>(colon) + 1}
            .trimmed();
    if (std::find(kKeys.begin(), kKeys.end(), key.text) == kKeys.end()) {
      key.fail("one of name, pipelines, stages, microbatches, delay, late, placement, versions");
    }
    if (!values.emplace(key.text, value).second) key.fail("each key once");
  }
  return values;
}

Schedule parse_sections(const std::vector<Token>& lines) {
  std::size_t next = 0;
  const std::map<std::string_view, Token> header = read_header(lines, next);
  const Token& behind = lines[std::min(next, lines.size() - 1)];
  const auto value = [&](std::string_view key) -> const Token& {
    const auto entry = header.find(key);
    if (entry == header.end()) behind.fail("\"", key, ": ...\" before the first section");
    return entry->second;
  };
  Schedule schedule;
  const Token& name = value("name");
  if (name.text.find('\r') != std::string_view::npos) name.fail("a name on one line");
  schedule.name = name.text;
  if (header.contains("pipelines")) schedule.num_pipelines = parse_number(value("pipelines"));
  schedule.num_stages = parse_number(value("stages"));
  schedule.num_microbatches = parse_number(value("microbatches"));
  schedule.delay = parse_numbers(value("delay"));
  if (header.contains("late")) schedule.late_forwards = parse_numbers(value("late"));
  schedule.placement = parse_numbers(value("placement"));
  if (schedule.delay.size() == 1) {
    schedule.delay.resize(schedule.placement.size(), schedule.delay.front());
  }
  schedule.num_versions = parse_numbers(value("versions"));

  const Token& last = lines.back();
  const Token end = {last.text.substr(last.text.size()), last.line,
                     last.column + static_cast<int>(last.text.size())};
  const auto line_or_end = [&] { return next < lines.size() ? lines[next] : end; };
  std::array<std::vector<std::vector<Action>>, kSections.size()> sections;
  for (std::size_t i = 0; i < kSections.size(); ++i) {
    if (line_or_end().text != kSections[i]) line_or_end().fail(kSections[i]);
    for (++next; next < lines.size() && lines[next].text.front() != '['; ++next) {
      sections[i].push_back(actions_of(parse_row(lines[next])));
    }
    if (sections[i].size() != sections[0].size()) {
      line_or_end().fail(sections[0].size(), " rows in ", kSections[i], " as in ", kSections[0],
                         " but it has ", sections[i].size());
    }
  }
  if (next < lines.size()) lines[next].fail("the end after ", kSections.back());
  for (std::size_t rank = 0; rank < sections[0].size(); ++rank) {
    schedule.ranks.push_back({.prologue = std::move(sections[0][rank]),
                              .steady = std::move(sections[1][rank]),
                              .epilogue = std::move(sections[2][rank])});
  }
  return schedule;
}

template <typename Values, typename Format>
std::string joined(const Values& values, Format format) {
  std::string text;
  for (const auto& value : values) {
    if (!text.empty()) text += ',';
    text += format(value);
  }
  return text;
}

std::string section_text(std::string_view name, const std::vector<RankActions>& ranks,
                         std::vector<Action> RankActions::*list) {
  std::string text = detail::concat(name, "\n");
  for (const RankActions& rank : ranks) {
    const std::string row = joined(rank.*list, [](const Action& each) { return to_string(each); });
    text += detail::concat(row.empty() ? kNothing : row, "\n");
  }
  return text;
}

}  // namespace

std::string to_text(const Schedule& schedule) {
  PD2_CHECK(schedule.name.find_first_of("#\r\n") == std::string::npos &&
                Token{schedule.name}.trimmed().text == schedule.name,
            "schedule name: \"", schedule.name,
            "\": the text form needs a name on one line, without '#' and blanks around it");
  const auto number = [](int value) { return std::to_string(value); };
  const std::vector<int> one_delay(schedule.delay.begin(),
                                   schedule.delay.begin() + !schedule.delay.empty());
  const bool all_equal =
      schedule.delay.size() == schedule.placement.size() && schedule.has_one_delay();
  const std::string pipelines =
      schedule.num_pipelines == 1 ? "" : detail::concat("\npipelines: ", schedule.num_pipelines);
  const std::string late = schedule.late_forwards.empty()
                               ? ""
                               : detail::concat("\nlate: ", joined(schedule.late_forwards, number));
  return detail::concat("name: ", schedule.name, pipelines, "\nstages: ", schedule.num_stages,
                        "\nmicrobatches: ", schedule.num_microbatches,
                        "\ndelay: ", joined(all_equal ? one_delay : schedule.delay, number), late,
                        "\nplacement: ", joined(schedule.placement, number),
                        "\nversions: ", joined(schedule.num_versions, number), "\n",
                        section_text(kSections[0], schedule.ranks, &RankActions::prologue),
                        section_text(kSections[1], schedule.ranks, &RankActions::steady),
                        section_text(kSections[2], schedule.ranks, &RankActions::epilogue));
}

std::string to_csv(const Schedule& schedule) {
  PD2_CHECK(schedule.num_pipelines == 1, "schedule ", schedule.name,
            ": pipelines: ", schedule.num_pipelines,
            ": the CSV holds schedules of one pipeline only");
  std::string text;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const RankActions& actions = schedule.ranks[rank];
    PD2_CHECK(actions.prologue == actions.steady && actions.epilogue.empty(), "schedule ",
              schedule.name, ": rank ", rank, " has ", actions.epilogue.size(),
              " actions in its epilogue",
              actions.prologue == actions.steady ? "" : " and another prologue than steady list",
              ": the CSV holds schedules that drain at every batch only");
    std::vector<Action> compute;
    std::ranges::copy_if(actions.steady, std::back_inserter(compute),
                         [](const Action& each) { return each.kind != ActionKind::kUpdate; });
    text += joined(compute, [](const Action& each) { return to_string(each); });
    text += '\n';
  }
  return text;
}

Schedule from_text(std::string_view text) {
  const std::vector<Token> lines = lines_of(text);
  if (lines.empty()) Token{}.fail("a schedule");
  const std::string_view first = lines.front().text;
  // Actions have neither, so that a first line with one is the header of our own form.
  const bool has_header = first.find_first_of(":[") != std::string_view::npos;
  return has_header ? parse_sections(lines) : parse_csv(lines);
}

}  // namespace pd2
