// Which device is which rank of which replica.

#pragma once

#include "planner/plan/cluster.h"

#include <functional>
#include <span>
#include <vector>

namespace pd2 {

// Devices by rank and replica.
class DeviceGrid {
 public:
  DeviceGrid(int ranks, int width) : width_(width), devices_(std::size_t(ranks) * width, 0) {}

  int ranks() const { return static_cast<int>(devices_.size()) / width_; }
  int width() const { return width_; }
  int at(int rank, int replica) const { return devices_[std::size_t(rank) * width_ + replica]; }
  int& at(int rank, int replica) { return devices_[std::size_t(rank) * width_ + replica]; }
  std::span<const int> of_rank(int rank) const {
    return std::span(devices_).subspan(std::size_t(rank) * width_, width_);
  }
  const std::vector<int>& devices() const { return devices_; }
  std::vector<int>& devices() { return devices_; }

  bool operator==(const DeviceGrid&) const = default;

 private:
  int width_;
  std::vector<int> devices_;  // rank by rank
};

// The slowness of a rank's slowest device. `microbatches`: of each replica, if they have different
// numbers; then a device that has fewer than others counts as if it were as much faster.
double slowness_of_rank(const Cluster& cluster, const DeviceGrid& grid, int rank,
                        std::span<const int> microbatches);

// The device mappings that are tried, by number: which type of device comes first (every
// order of up to 4 types, else by slowness, up and down), and what is adjacent: the ranks of a
// replica, as torchrun numbers them, or the replicas of a rank. On a mesh into which it fits: ranks
// along a row and replicas along a column, or the other way round; devices of several types are
// taken as they come there.
class DeviceMappings {
 public:
  explicit DeviceMappings(const Cluster& cluster);

  int count() const { return 2 * static_cast<int>(orders_.size()); }
  // Whether an earlier mapping is the same for these sizes.
  bool is_repeated(int mapping, int ranks, int width) const;
  DeviceGrid grid(int mapping, int ranks, int width) const;
  // For a bound on time: sum over the ranks of 1 / slowness_of_rank().
  double speed(int mapping, int ranks, int width, std::span<const int> microbatches) const;

 private:
  const Cluster& cluster_;
  std::vector<std::vector<int>> orders_;  // of devices
};

// search_mapping() tries every mapping of clusters of at most this many devices.
inline constexpr int kMostEnumeratedDevices = 8;

// The grid for which `seconds` is least, with devices put elsewhere, those not in the grid
// included; a device takes the place of one of its type only. By enumeration, or by simulated
// annealing with a fixed seed. Never worse than the given grid.
DeviceGrid search_mapping(const Cluster& cluster, const DeviceGrid& grid,
                          const std::function<double(const DeviceGrid&)>& seconds);

// search_mapping() by annealing, whatever the number of devices.
DeviceGrid anneal_mapping(const Cluster& cluster, const DeviceGrid& grid,
                          const std::function<double(const DeviceGrid&)>& seconds);

}  // namespace pd2
