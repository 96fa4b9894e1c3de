#include "engine/run/action_range.h"

#include "core/check.h"

#include <string>
#include <string_view>

namespace pd2 {
namespace {

std::string_view name_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kInputGrad:
      return "input gradient";
    case ActionKind::kWeightGrad:
      return "weight gradient";
    case ActionKind::kUpdate:
      return "update";
    case ActionKind::kRecompute:
      return "recompute";
  }
  return "";
}

}  // namespace

ActionRange::ActionRange(int stage, ActionKind kind, std::int64_t batch, int microbatch,
                         std::int64_t version) {
  if (range_.isActive()) {
    range_.before(detail::concat(
        "pd2 stage ", stage, " ", name_of(kind), " batch ", batch,
        kind == ActionKind::kUpdate ? std::string() : detail::concat(" microbatch ", microbatch),
        " version ", version));
  }
}

ActionRange::ActionRange(int stage, int microbatch, std::int64_t version) {
  if (range_.isActive()) {
    range_.before(detail::concat("pd2 stage ", stage, " evaluation microbatch ", microbatch,
                                 " version ", version));
  }
}

}  // namespace pd2
