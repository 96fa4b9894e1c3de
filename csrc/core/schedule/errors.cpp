#include "core/schedule/errors.h"

#include <algorithm>

namespace pd2 {
namespace {

constexpr int kMaxColumns = 32;

using Rows = std::vector<std::vector<std::string>>;  // of cells, with a place for marks around each

Rows rows_of(const Schedule& schedule, ListKind list, const std::vector<Mark>& marks) {
  Rows rows;
  for (const RankActions& rank : schedule.ranks) {
    std::vector<std::string>& row = rows.emplace_back();
    for (const Action& action : actions(rank, list)) {
      row.push_back(detail::concat(" ", to_string(action), " "));
    }
  }
  for (const auto& [cell, missing] : marks) {
    if (cell.list != list) continue;
    std::vector<std::string>& row = rows.at(cell.rank);
    if (!missing.empty()) {
      row.push_back(detail::concat(">", missing, "<"));
      continue;
    }
    row.at(cell.index).front() = '>';
    row.at(cell.index).back() = '<';
  }
  return rows;
}

int first_marked_column(const Rows& rows) {
  std::optional<std::size_t> first;
  for (const auto& row : rows) {
    for (std::size_t column = 0; column < std::min(row.size(), first.value_or(row.size()));
         ++column) {
      if (row[column].front() == '>') first = column;
    }
  }
  return static_cast<int>(first.value_or(0));
}

void append_list(std::string& text, const Rows& rows) {
  std::size_t num_columns = 0;
  std::size_t width = 0;
  for (const auto& row : rows) {
    num_columns = std::max(num_columns, row.size());
    for (const std::string& cell : row) width = std::max(width, cell.size());
  }
  std::size_t begin = 0;
  if (num_columns > kMaxColumns) begin = std::max(0, first_marked_column(rows) - kMaxColumns / 2);
  const std::size_t end = std::min(num_columns, begin + kMaxColumns);
  const std::size_t label_width = std::to_string(rows.size()).size();

  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::vector<std::string>& row = rows[rank];
    const std::string label = std::to_string(rank);
    text += detail::concat("  rank ", std::string(label_width - label.size(), ' '), label, " |");
    if (begin > 0) text += " ...";
    for (std::size_t column = begin; column < std::min(end, row.size()); ++column) {
      text += row[column] + std::string(width - row[column].size(), ' ');
    }
    if (row.size() > end) text += " ...";
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
}

// The lists with a column per position, ranks as rows; marked cells look like >2B0<. Of long lists
// only the columns around the first mark are shown.
std::string grid(const Schedule& schedule, const std::vector<Mark>& marks) {
  std::string text;
  for (const ListKind list : {ListKind::kPrologue, ListKind::kSteady, ListKind::kEpilogue}) {
    text += detail::concat(to_string(list), ":\n");
    append_list(text, rows_of(schedule, list, marks));
  }
  return text;
}

}  // namespace

const char* to_string(ScheduleRule rule) {
  constexpr const char* kNames[] = {
      "sizes",        "placement",       "numbering",
      "exactly once", "after forward",   "microbatch order",
      "update order", "weight versions", "deadlock",
  };
  return kNames[static_cast<int>(rule)];
}

void throw_schedule_error(const Schedule& schedule, ScheduleRule rule,
                          const std::vector<Mark>& marks, const std::string& text) {
  std::string whole = detail::concat("schedule ", schedule.name, ": ", text);
  std::optional<ScheduleError::Place> place;
  if (!marks.empty()) {
    whole += detail::concat("\n", grid(schedule, marks));
    const auto& [cell, missing] = marks.front();
    place = {cell.rank, cell.list, missing.empty() ? std::optional(cell.index) : std::nullopt};
  }
  if (rule == ScheduleRule::kDeadlock) throw Deadlock(whole, place);
  throw ScheduleError(whole, rule, place);
}

}  // namespace pd2
