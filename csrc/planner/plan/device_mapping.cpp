#include "planner/plan/device_mapping.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

namespace pd2 {
namespace {

constexpr int kMostPermutedTypes = 4;

std::vector<std::vector<int>> orders_of_types(const Cluster& cluster) {
  std::vector<int> types(cluster.types.size());
  std::iota(types.begin(), types.end(), 0);
  if (types.size() <= kMostPermutedTypes) {
    std::vector<std::vector<int>> orders;
    do {
      orders.push_back(types);
    } while (std::ranges::next_permutation(types).found);
    return orders;
  }
  std::ranges::stable_sort(types, {}, [&](int type) { return cluster.types[type].slowness; });
  return {types, {types.rbegin(), types.rend()}};
}

std::vector<int> by_types(const Cluster& cluster, const std::vector<int>& types) {
  std::vector<int> devices;
  for (const int type : types) {
    for (int device = 0; device < cluster.num_devices(); ++device) {
      if (cluster.type_of[device] == type) devices.push_back(device);
    }
  }
  return devices;
}

// Whether ranks are within rows and replicas within columns, or with an odd mapping the other way.
bool fits(const Mesh& mesh, int mapping, int ranks, int width) {
  return mapping % 2 == 1 ? ranks <= mesh.rows && width <= mesh.columns
                          : width <= mesh.rows && ranks <= mesh.columns;
}

// All of the cluster's devices, those of the grid first, then the others.
class Places {
 public:
  Places(const Cluster& cluster, const DeviceGrid& grid)
      : cluster_(cluster), grid_(grid), devices_(grid.devices()) {
    std::vector<bool> is_used(cluster.num_devices(), false);
    for (const int device : devices_) is_used[device] = true;
    for (int device = 0; device < cluster.num_devices(); ++device) {
      if (!is_used[device]) devices_.push_back(device);
    }
  }

  std::size_t count() const { return devices_.size(); }
  std::size_t used() const { return grid_.devices().size(); }
  bool may_swap(std::size_t a, std::size_t b) const {
    return a != b && cluster_.type_of[devices_[a]] == cluster_.type_of[devices_[b]];
  }
  void swap(std::size_t a, std::size_t b) { std::swap(devices_[a], devices_[b]); }
  // Whether replicas may come in any order. Not if a device of another type is in one of them.
  bool are_alike() const { return cluster_.types.size() == 1; }
  bool are_rising(std::size_t a, std::size_t b) const { return devices_[a] < devices_[b]; }

  const DeviceGrid& grid() {
    std::copy_n(devices_.begin(), used(), grid_.devices().begin());
    return grid_;
  }

 private:
  const Cluster& cluster_;
  DeviceGrid grid_;
  std::vector<int> devices_;
};

struct Best {
  DeviceGrid grid;
  double seconds;

  void consider(const DeviceGrid& other, double other_seconds) {
    if (other_seconds < seconds) {
      grid = other;
      seconds = other_seconds;
    }
  }
};

// Every way to fill places `place` .. : swaps each later device in. Where replicas are alike, those
// of rank 0 come in rising order.
void enumerate(Places& places, std::size_t place, int width,
               const std::function<double(const DeviceGrid&)>& seconds, Best& best) {
  if (place == places.used()) {
    const DeviceGrid& grid = places.grid();
    best.consider(grid, seconds(grid));
    return;
  }
  for (std::size_t other = place; other < places.count(); ++other) {
    if (other != place && !places.may_swap(place, other)) continue;
    places.swap(place, other);
    if (place == 0 || place >= std::size_t(width) || !places.are_alike() ||
        places.are_rising(place - 1, place)) {
      enumerate(places, place + 1, width, seconds, best);
    }
    places.swap(place, other);
  }
}

}  // namespace

DeviceMappings::DeviceMappings(const Cluster& cluster) : cluster_(cluster) {
  for (const std::vector<int>& types : orders_of_types(cluster)) {
    orders_.push_back(by_types(cluster, types));
  }
}

bool DeviceMappings::is_repeated(int mapping, int ranks, int width) const {
  const Mesh* mesh = std::get_if<Mesh>(&cluster_.topology);
  if (mesh == nullptr) return mapping % 2 == 1 && (ranks == 1 || width == 1);
  return mapping >= 2 && fits(*mesh, mapping, ranks, width);
}

DeviceGrid DeviceMappings::grid(int mapping, int ranks, int width) const {
  const std::vector<int>& order = orders_[mapping / 2];
  const bool is_other = mapping % 2 == 1;
  DeviceGrid grid(ranks, width);
  const Mesh* mesh = std::get_if<Mesh>(&cluster_.topology);
  const bool is_on_mesh = mesh != nullptr && fits(*mesh, mapping, ranks, width);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int replica = 0; replica < width; ++replica) {
      if (is_on_mesh) {
        const int row = is_other ? rank : replica;
        const int column = is_other ? replica : rank;
        grid.at(rank, replica) = row * mesh->columns + column;
      } else {
        grid.at(rank, replica) = order[is_other ? rank * width + replica : replica * ranks + rank];
      }
    }
  }
  return grid;
}

double slowness_of_rank(const Cluster& cluster, const DeviceGrid& grid, int rank,
                        std::span<const int> microbatches) {
  const double most = microbatches.empty() ? 1 : *std::ranges::max_element(microbatches);
  double slowest = 0;
  for (int replica = 0; replica < grid.width(); ++replica) {
    const double share = microbatches.empty() ? 1 : microbatches[replica] / most;
    slowest = std::max(slowest, share * cluster.type(grid.at(rank, replica)).slowness);
  }
  return slowest;
}

double DeviceMappings::speed(int mapping, int ranks, int width,
                             std::span<const int> microbatches) const {
  if (cluster_.types.size() == 1) return ranks / cluster_.types.front().slowness;
  const DeviceGrid devices = grid(mapping, ranks, width);
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    sum += 1 / slowness_of_rank(cluster_, devices, rank, microbatches);
  }
  return sum;
}

DeviceGrid search_mapping(const Cluster& cluster, const DeviceGrid& grid,
                          const std::function<double(const DeviceGrid&)>& seconds) {
  if (cluster.num_devices() > kMostEnumeratedDevices) {
    return anneal_mapping(cluster, grid, seconds);
  }
  Best best = {grid, seconds(grid)};
  Places places(cluster, grid);
  enumerate(places, 0, grid.width(), seconds, best);
  return best.grid;
}

DeviceGrid anneal_mapping(const Cluster& cluster, const DeviceGrid& grid,
                          const std::function<double(const DeviceGrid&)>& seconds) {
  Places places(cluster, grid);
  Best best = {grid, seconds(grid)};
  double now = best.seconds;
  if (places.count() < 2) return grid;
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return std::size_t(random()) % n; };
  // From a twentieth of the time down to a millionth, as most swaps change little.
  const int steps = std::clamp(1'000'000 / cluster.num_devices(), 1000, 10'000);
  for (int step = 0; step < steps; ++step) {
    const double temperature = best.seconds * 0.05 * std::pow(2e-5, double(step) / steps);
    const std::size_t a = below(places.used());
    const std::size_t b = below(places.count());
    if (!places.may_swap(a, b)) continue;
    places.swap(a, b);
    const DeviceGrid& tried = places.grid();
    const double then = seconds(tried);
    const double draw = (random() + 0.5) / 4294967296.0;
    if (then <= now || draw < std::exp((now - then) / temperature)) {
      now = then;
      best.consider(tried, then);
    } else {
      places.swap(a, b);
    }
  }
  return best.grid;
}

}  // namespace pd2
