#include "planner/plan/cluster.h"

#include "core/infinity.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace pd2 {
namespace {

// Both networks, one after the other.
Link chained(const Link& a, const Link& b) {
  return {.latency = a.latency + b.latency, .bandwidth = 1 / (1 / a.bandwidth + 1 / b.bandwidth)};
}

Link slower(const Link& a, const Link& b) {
  return {.latency = std::max(a.latency, b.latency),
          .bandwidth = std::min(a.bandwidth, b.bandwidth)};
}

Link faster(const Link& a, const Link& b) {
  return {.latency = std::min(a.latency, b.latency),
          .bandwidth = std::max(a.bandwidth, b.bandwidth)};
}

Link between(const Servers& servers, int a, int b) {
  const int each = servers.devices_per_server;
  return a / each == b / each ? servers.inside : servers.outside;
}

Link between(const Mesh& mesh, int a, int b) {
  const bool same_row = a / mesh.columns == b / mesh.columns;
  const bool same_column = a % mesh.columns == b % mesh.columns;
  return same_row ? mesh.row : same_column ? mesh.column : chained(mesh.row, mesh.column);
}

Link between(const LinkMatrix& matrix, int a, int b) {
  const int n = matrix.num_devices;
  return slower(matrix.links[std::size_t(a) * n + b], matrix.links[std::size_t(b) * n + a]);
}

Link best(const Servers& servers) { return faster(servers.inside, servers.outside); }

Link best(const Mesh& mesh) { return faster(mesh.row, mesh.column); }

Link best(const LinkMatrix& matrix) {
  Link best = {.latency = kInfinity, .bandwidth = 0};
  for (int a = 0; a < matrix.num_devices; ++a) {
    for (int b = 0; b < a; ++b) best = faster(best, between(matrix, a, b));
  }
  return matrix.num_devices > 1 ? best : Link{};
}

// The price of one device from now to any hour.
class PaidUntil {
 public:
  explicit PaidUntil(const std::vector<Price>& prices) : prices_(prices) {
    double sum = 0;
    for (std::size_t i = 0; i < prices.size(); ++i) {
      if (i > 0) sum += (prices[i].from_hour - prices[i - 1].from_hour) * prices[i - 1].per_hour;
      sums_.push_back(sum);
    }
  }

  double operator()(double hour) const {
    if (prices_.empty()) return 0;
    const auto next = std::ranges::upper_bound(prices_, hour, {}, &Price::from_hour);
    const std::size_t i = next - prices_.begin() - 1;
    return sums_[i] + (hour - prices_[i].from_hour) * prices_[i].per_hour;
  }

 private:
  const std::vector<Price>& prices_;
  std::vector<double> sums_;  // until each price begins
};

// Interpolates the measured times of n ranks, which are sorted by bytes; below the smallest size it
// is the smallest one's time, above the largest the bytes at its rate.
double measured_seconds(const std::vector<AllReduceTime>& times, double bytes) {
  if (bytes <= times.front().bytes) return times.front().seconds;
  for (std::size_t i = 1; i < times.size(); ++i) {
    const AllReduceTime& a = times[i - 1];
    const AllReduceTime& b = times[i];
    if (bytes <= b.bytes) {
      return a.seconds + (b.seconds - a.seconds) * (bytes - a.bytes) / (b.bytes - a.bytes);
    }
  }
  return times.back().seconds * bytes / times.back().bytes;
}

}  // namespace

Link link_between(const Topology& topology, int a, int b) {
  return std::visit([&](const auto& each) { return between(each, a, b); }, topology);
}

Link best_link(const Topology& topology) {
  return std::visit([](const auto& each) { return best(each); }, topology);
}

double all_reduce_seconds(const Cluster& cluster, int n, std::span<const Link> links,
                          double bytes) {
  if (n < 2 || bytes <= 0) return 0;
  std::vector<AllReduceTime> measured;
  for (const AllReduceTime& time : cluster.all_reduce) {
    if (time.ranks == n) measured.push_back(time);
  }
  if (!measured.empty()) {
    std::ranges::sort(measured, {}, &AllReduceTime::bytes);
    return measured_seconds(measured, bytes);
  }
  double slowest = 0;
  for (const Link& link : links) slowest = std::max(slowest, link.seconds(bytes / n));
  return 2 * (n - 1) * slowest;
}

Start cheapest_start(const Cluster& cluster, std::span<const int> devices, double hours,
                     double within) {
  std::vector<int> count(cluster.types.size(), 0);
  for (const int device : devices) ++count[cluster.type_of[device]];
  std::vector<std::pair<int, PaidUntil>> paid;
  std::set<double> starts = {0, within};
  for (std::size_t i = 0; i < count.size(); ++i) {
    if (count[i] == 0) continue;
    const std::vector<Price>& prices = cluster.types[i].prices;
    paid.emplace_back(count[i], PaidUntil(prices));
    for (const Price& price : prices) {
      for (const double start : {price.from_hour, price.from_hour - hours}) {
        if (start > 0 && start < within) starts.insert(start);
      }
    }
  }
  Start best = {.hour = 0, .price = kInfinity};
  for (const double start : starts) {
    double price = 0;
    for (const auto& [devices_of_type, until] : paid) {
      price += devices_of_type * (until(start + hours) - until(start));
    }
    if (price < best.price * (1 - 1e-12)) best = {start, price};
  }
  return best;
}

double price_per_hour_now(const Cluster& cluster, std::span<const int> devices) {
  double sum = 0;
  for (const int device : devices) {
    const std::vector<Price>& prices = cluster.type(device).prices;
    if (!prices.empty()) sum += prices.front().per_hour;
  }
  return sum;
}

}  // namespace pd2
