// Random problems for the planner.

#pragma once

#include "planner/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace pd2::testing {

class Instances {
 public:
  explicit Instances(unsigned seed) : random_(seed) {}

  int below(int n) { return static_cast<int>(random_() % n); }
  double between(double low, double high) {
    return low + (high - low) * (random_() / 4294967296.0);
  }

  // A chain with some skip connections, sometimes of uneven layers.
  ProfiledModel model(int most_layers) {
    ProfiledModel model;
    const int n = 1 + below(most_layers);
    const double spread = below(2) == 0 ? 0 : 1.5;
    std::vector<LayerCost> layers(n);
    for (LayerCost& layer : layers) {
      const double size = std::exp(between(-spread, spread));
      const double trained = 1e6 * size * (below(6) > 0);
      layer = {.forward = 1e-3 * size,
               .input_grad = 1e-3 * size * between(0.8, 1.2),
               .weight_grad = 1e-3 * size * between(0.8, 1.2),
               .activation_bytes = 1e6 * between(0.5, 4),
               .parameter_bytes = trained + (below(4) == 0 ? 5e5 : 0),
               .trained_bytes = trained};
    }
    std::vector<Edge> edges;
    for (int i = 0; i + 1 < n; ++i) edges.push_back({i, i + 1, 100'000 + below(400'000)});
    for (int i = 0; i + 2 < n; ++i) {
      if (below(4) == 0) edges.push_back({i, i + 2 + below(n - i - 2), edges[i].bytes});
    }
    // Sometimes a layer's value is read past the next one alone.
    if (n > 3 && below(3) == 0) {
      const int i = below(n - 2);
      edges[i].consumer = i + 2;
    }
    std::vector<Value> shared;
    for (int i = 0; i + 1 < n; ++i) {
      if (below(4) > 0) continue;
      shared.push_back({.producer = i, .consumers = {i + 1}, .kept_bytes = 1e6 * between(0.1, 1)});
      if (const int later = i + 2 + below(n); later < n) shared.back().consumers.push_back(later);
    }
    if (n > 2 && below(3) == 0) {
      Value& tied = shared.emplace_back(Value{.producer = 0, .consumers = {n - 1}});
      (below(3) > 0 ? tied.trained_bytes : tied.frozen_bytes) = 1e6 * between(0.1, 2);
    }
    for (int rows = 1; rows <= 4; rows *= 2) {
      if (rows > 1 && below(4) == 0) continue;
      ProfiledRows profiled = {rows, layers, edges, shared};
      for (LayerCost& layer : profiled.layers) {
        for (double* cost : {&layer.forward, &layer.input_grad, &layer.weight_grad}) {
          *cost *= 0.3 + 0.7 * rows;
        }
        layer.activation_bytes *= rows;
      }
      for (Edge& edge : profiled.edges) edge.bytes *= rows;
      for (Value& value : profiled.shared) value.kept_bytes *= rows;
      model.microbatches.push_back(profiled);
    }
    for (int i = 0; i + 1 < n; ++i) model.can_cut.push_back(below(5) > 0);
    for (int first = 0; first < n;) {
      const int end = std::min(n, first + 1 + below(3));
      if (below(3) > 0) model.blocks.push_back({first, end});
      first = end;
    }
    model.seconds_per_update_byte = below(2) * 1e-9;
    return model;
  }

  Link link() {
    return {.latency = below(2) * between(1e-6, 2e-4),
            .bandwidth = std::exp(between(std::log(1e8), std::log(1e11)))};
  }

  Topology topology(int devices) {
    const int kind = below(3);
    if (kind == 0) {
      Servers servers;
      servers.devices_per_server = 1 + below(devices);
      servers.inside = link();
      servers.outside = link();
      return servers;
    }
    if (kind == 1) {
      int rows = 1 + below(devices);
      while (devices % rows != 0) --rows;
      return Mesh{rows, devices / rows, link(), link()};
    }
    LinkMatrix matrix = {devices, {}};
    for (int i = 0; i < devices * devices; ++i) matrix.links.push_back(link());
    return matrix;
  }

  Cluster cluster(int most_devices) {
    Cluster cluster;
    const int devices = 1 + below(most_devices);
    const int types = 1 + (below(3) == 0);
    for (int i = 0; i < types; ++i) {
      DeviceType type;
      type.name = std::to_string(i);
      type.slowness = i == 0 ? 1.0 : between(0.5, 2);
      if (below(3) > 0) type.memory_bytes = std::exp(between(std::log(8e6), std::log(3e8)));
      type.prices = {{0, between(0.5, 3)}};
      if (below(2) == 0) type.prices.push_back({between(1e-4, 1e-2), between(0.5, 3)});
      cluster.types.push_back(type);
    }
    for (int i = 0; i < devices; ++i) cluster.type_of.push_back(below(types));
    cluster.topology = topology(devices);
    return cluster;
  }

  // Of those in a V, which take the longest to simulate, one.
  std::vector<std::string> schedules() {
    std::vector<std::string> all = planned_schedules();
    std::ranges::shuffle(all, random_);
    const auto is_v = [](const std::string& name) { return planned_method(name).is_v(); };
    const auto vs = std::ranges::stable_partition(all, std::not_fn(is_v));
    all.erase(vs.begin() + 1, vs.end());
    return all;
  }

  PlanProblem problem(int most_layers, int most_devices) {
    PlanProblem problem = {model(most_layers), cluster(most_devices), {}};
    PlanOptions& options = problem.options;
    options.batch = 1 << (2 + below(4));
    options.largest_batch = options.batch + below(2) * below(options.batch);
    options.schedules = schedules();
    options.stages_per_rank = {2, 3};
    const Objective objectives[] = {Objective::kThroughput, Objective::kCost, Objective::kMemory};
    options.objective = objectives[std::max(0, below(5) - 2)];
    options.num_batches = below(2) * 1000;
    if (options.objective == Objective::kCost && options.num_batches > 0) {
      options.start_within = below(2) * 1e-2;
    }
    options.state = below(3);
    options.unequal_replicas = true;
    options.microbatches_behind = 3 * below(2);
    return problem;
  }

 private:
  std::mt19937 random_;
};

}  // namespace pd2::testing
