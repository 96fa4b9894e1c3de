// The cluster that a model is planned for: devices of one or several types, their links and prices.

#pragma once

#include "core/infinity.h"

#include <algorithm>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace pd2 {

struct Link {
  double latency = 0;            // seconds
  double bandwidth = kInfinity;  // bytes per second, each direction

  double seconds(double bytes) const { return latency + bytes / bandwidth; }
  bool operator==(const Link&) const = default;
};

// Devices 0 .. devices_per_server - 1 are in the first server, and so on.
struct Servers {
  int devices_per_server = 1;
  Link inside;
  Link outside;
};

// Device row * columns + column. Every row and every column is a network of its own (HammingMesh,
// arXiv 2209.01346); between devices that share neither, messages take both, one after the other.
struct Mesh {
  int rows = 1;
  int columns = 1;
  Link row;     // between devices of one row
  Link column;  // between devices of one column
};

// Measured links: that of devices a and b is at a * num_devices + b.
struct LinkMatrix {
  int num_devices = 0;
  std::vector<Link> links;
};

using Topology = std::variant<Servers, Mesh, LinkMatrix>;

// Between two different devices, the slower one of both directions.
Link link_between(const Topology& topology, int a, int b);

// The fastest bandwidth and the least latency that any two devices may have.
Link best_link(const Topology& topology);

struct Price {
  double from_hour = 0;  // hours from now
  double per_hour = 0;   // of one device
};

struct DeviceType {
  std::string name;
  double slowness = 1;  // seconds here over seconds on the profiled device
  double memory_bytes = kInfinity;
  std::vector<Price> prices;  // by rising hour, the first at 0; none: free
};

// A measured time in which ranks added up bytes.
struct AllReduceTime {
  int ranks = 0;
  double bytes = 0;
  double seconds = 0;
};

struct Cluster {
  std::vector<DeviceType> types;
  std::vector<int> type_of;  // by device
  Topology topology;
  std::vector<AllReduceTime> all_reduce;  // none: by the ring's formula

  int num_devices() const { return static_cast<int>(type_of.size()); }
  const DeviceType& type(int device) const { return types[type_of[device]]; }
  double least_slowness() const {
    return std::ranges::min_element(types, {}, &DeviceType::slowness)->slowness;
  }
};

// Seconds in which n devices, a ring of these links, add up `bytes` each: 2 (n - 1) steps of
// bytes / n over the slowest link. With measured times of n ranks: on the line through the two
// nearest sizes.
double all_reduce_seconds(const Cluster& cluster, int n, std::span<const Link> links, double bytes);

struct Start {
  double hour = 0;   // from now
  double price = 0;  // of the run
};

// The cheapest time to begin a run of `hours` on all these devices, up to `within` hours from now;
// of equally cheap ones the earliest. Found by scanning the hours at which a run begins or ends as
// a price changes: between them its price is linear.
Start cheapest_start(const Cluster& cluster, std::span<const int> devices, double hours,
                     double within = 0);
double price_per_hour_now(const Cluster& cluster, std::span<const int> devices);

}  // namespace pd2
