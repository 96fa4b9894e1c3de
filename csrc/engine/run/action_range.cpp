#include "engine/run/action_range.h"

#include "core/check.h"

#include <string>

namespace pd2 {
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
