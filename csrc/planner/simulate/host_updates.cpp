#include "planner/simulate/host_updates.h"

#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pd2 {
namespace {

// Each update is walked bucket by bucket.
constexpr int kMostBuckets = 1'000'000;

double copying(double bytes, double bandwidth) { return bandwidth > 0 ? bytes / bandwidth : 0; }

}  // namespace

HostUpdates::HostUpdates(const Schedule& schedule, const Costs& costs)
    : schedule_(schedule),
      costs_(costs),
      stages_(schedule.num_stages),
      ranks_(schedule.ranks.size()) {
  const int buckets = costs.host ? costs.host->buckets : 0;
  for (Stage& stage : stages_) stage.left.resize(buckets, 0);
}

double HostUpdates::update(int number, double begins) {
  const HostCosts& host = *costs_.host;
  const StageCosts& cost = cost_of(schedule_, costs_, number);
  Stage& stage = stages_[number];
  Rank& rank = ranks_[schedule_.placement[number]];
  const bool is_summed = cost.all_reduce > 0 || schedule_.twin(number);
  const double has_all = begins + cost.all_reduce;
  const Interval given = is_summed ? Interval{begins, has_all} : stage.made;
  const int n = host.buckets;
  std::vector<double> come(n);  // by bucket: when its gradients are on the host
  for (int k = 0; k < n; ++k) {
    const double ready = std::lerp(given.start, given.end, (k + 1.0) / n);
    rank.down = std::max({rank.down, ready, stage.stepped});
    rank.down += copying(cost.gradient_bytes, host.down) / n;
    come[k] = rank.down;
  }
  stage.gone = rank.down;
  for (int k = 0; k < n; ++k) {
    rank.host = std::max({rank.host, has_all, come[k], stage.left[k]}) + cost.update / n;
    rank.up = std::max({rank.up, rank.host, stage.gone});
    rank.up += copying(cost.weight_bytes, host.up) / n;
    stage.left[k] = rank.up;
  }
  stage.stepped = rank.host;
  return rank.up;
}

void check_host(const HostCosts& host) {
  for (const auto& [name, bandwidth] : {std::pair("down", host.down), std::pair("up", host.up)}) {
    PD2_CHECK(bandwidth >= 0, "host's ", name, ": ", bandwidth,
              ": a bandwidth must be >= 0 (0: unlimited)");
  }
  PD2_CHECK(host.buckets >= 1 && host.buckets <= kMostBuckets, "host's buckets: ", host.buckets,
            ": must be >= 1 and <= ", kMostBuckets);
}

}  // namespace pd2
