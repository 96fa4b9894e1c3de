// The planner's parts: which blocks are recomputed, which device does what, links and prices.
#include "core/infinity.h"
#include "instances.h"
#include "planner/plan/blocks.h"
#include "planner/plan/cluster.h"
#include "planner/plan/device_mapping.h"
#include "planner/plan/place.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>

namespace pd2 {
namespace {

using testing::Instances;

bool is_enough(const std::vector<BlockChoice>& blocks, const std::vector<int>& chosen,
               double bytes) {
  double saves = 0;
  double again = 0;
  for (const int i : chosen) {
    saves += blocks[i].saves;
    again = std::max(again, blocks[i].again);
  }
  return saves - again >= bytes - 1e-6;
}

double seconds_of(const std::vector<BlockChoice>& blocks, const std::vector<int>& chosen) {
  return std::accumulate(chosen.begin(), chosen.end(), 0.0,
                         [&](double sum, int i) { return sum + blocks[i].takes; });
}

TEST(PlanBlocks, EqualEnumerationBySize) {
  Instances instances(1);
  int num_chosen = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<BlockChoice> blocks(1 + instances.below(8));
    for (BlockChoice& block : blocks) {
      block = {1.0 + instances.below(9), 1.0 * instances.below(3), 1.0 * instances.below(9)};
    }
    const double bytes = instances.below(20);
    double least = kInfinity;
    for (unsigned set = 0; set < 1u << blocks.size(); ++set) {
      std::vector<int> chosen;
      for (int i = 0; i < static_cast<int>(blocks.size()); ++i) {
        if (set >> i & 1) chosen.push_back(i);
      }
      if (is_enough(blocks, chosen, bytes)) least = std::min(least, seconds_of(blocks, chosen));
    }
    const auto chosen = choose_blocks(blocks, bytes);
    ASSERT_EQ(chosen.has_value(), std::isfinite(least)) << "round " << round;
    if (!chosen) continue;
    ASSERT_TRUE(is_enough(blocks, *chosen, bytes));
    ASSERT_EQ(seconds_of(blocks, *chosen), least) << "round " << round;
    ++num_chosen;
  }
  EXPECT_GT(num_chosen, 100);
}

TEST(PlanBlocks, OfManyEqualOnesAsFewAsNeeded) {
  const std::vector<BlockChoice> blocks(100, {.saves = 3, .again = 2, .takes = 1});
  const auto chosen = choose_blocks(blocks, 10);
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->size(), 4u);
  EXPECT_FALSE(choose_blocks(blocks, 299));
  EXPECT_EQ(choose_blocks(blocks, 298)->size(), 100u);
}

TEST(PlanBlocks, GreedyChoiceOfManyIsEnoughAndNothingOfItSuperfluous) {
  Instances instances(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<BlockChoice> blocks(13 + instances.below(30));
    double all = 0;
    for (BlockChoice& block : blocks) {
      block = {instances.between(0, 9), instances.between(0, 3), instances.between(0, 5)};
      all += block.saves;
    }
    const double bytes = instances.between(0, all);
    const auto chosen = choose_blocks(blocks, bytes);
    if (!chosen) continue;
    ASSERT_TRUE(is_enough(blocks, *chosen, bytes));
    ASSERT_TRUE(std::ranges::is_sorted(*chosen));
  }
}

Cluster matrix(Instances& instances, int devices, int types) {
  Cluster cluster;
  cluster.types.resize(types);
  for (int i = 0; i < devices; ++i) cluster.type_of.push_back(i % types);
  LinkMatrix links = {devices, {}};
  for (int i = 0; i < devices * devices; ++i) {
    links.links.push_back({0, instances.between(1, 100)});
  }
  cluster.topology = links;
  return cluster;
}

double slowest_link(const Cluster& cluster, const DeviceGrid& grid) {
  double sum = 0;
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    for (int replica = 0; replica < grid.width(); ++replica) {
      if (rank > 0) {
        sum += link_between(cluster.topology, grid.at(rank - 1, replica), grid.at(rank, replica))
                   .seconds(1);
      }
    }
  }
  return sum;
}

TEST(PlanMapping, AnnealingIsMostlyAsGoodAsEnumerationAndNeverWorseThanTheIdentity) {
  Instances instances(3);
  int num_equal = 0;
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    const int devices = 4 + instances.below(5);
    const Cluster cluster = matrix(instances, devices, 1 + round % 2);
    const int width = 1 + instances.below(2);
    const DeviceMappings mappings(cluster);
    const DeviceGrid identity = mappings.grid(0, devices / width, width);
    const auto seconds = [&](const DeviceGrid& grid) { return slowest_link(cluster, grid); };
    const double best = seconds(search_mapping(cluster, identity, seconds));
    const double annealed = seconds(anneal_mapping(cluster, identity, seconds));
    ASSERT_LE(best, annealed * (1 + 1e-12));
    ASSERT_LE(annealed, seconds(identity));
    num_equal += annealed <= best * (1 + 1e-12);
  }
  EXPECT_GE(num_equal, kRounds * 3 / 4);
}

// The reference tries all permutations of the places.
TEST(PlanMapping, EnumerationIsExactAndKeepsTypesInPlace) {
  Instances instances(4);
  for (int round = 0; round < 10; ++round) {
    const Cluster cluster = matrix(instances, 6, 1 + round % 2);
    const DeviceGrid identity = DeviceMappings(cluster).grid(0, 2, 2);  // two devices stay idle
    const auto seconds = [&](const DeviceGrid& grid) { return slowest_link(cluster, grid); };
    double least = kInfinity;
    std::vector<int> order = {0, 1, 2, 3, 4, 5};
    do {
      DeviceGrid grid(2, 2);
      std::copy_n(order.begin(), 4, grid.devices().begin());
      bool keeps_types = true;
      for (int i = 0; i < 4; ++i) {
        keeps_types = keeps_types &&
                      cluster.type_of[grid.devices()[i]] == cluster.type_of[identity.devices()[i]];
      }
      if (keeps_types) least = std::min(least, seconds(grid));
    } while (std::ranges::next_permutation(order).found);
    EXPECT_EQ(seconds(search_mapping(cluster, identity, seconds)), least);
  }
}

TEST(PlanDeviceMappings, PlaceEveryDeviceOnceAndReplicasOrRanksSideBySide) {
  Cluster cluster;
  cluster.types.resize(1);
  cluster.type_of.assign(12, 0);
  cluster.topology = Servers{4, {}, {}};
  const DeviceMappings mappings(cluster);
  EXPECT_EQ(mappings.grid(0, 3, 4).devices(),
            (std::vector<int>{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}));
  EXPECT_EQ(mappings.grid(1, 3, 4).of_rank(1).front(), 4);
  cluster.topology = Mesh{4, 3, {}, {}};
  const DeviceMappings on_mesh(cluster);
  // Ranks along a row, then along a column.
  EXPECT_EQ(on_mesh.grid(0, 3, 4).at(2, 1), 1 * 3 + 2);
  EXPECT_EQ(on_mesh.grid(1, 4, 3).at(2, 1), 2 * 3 + 1);
  for (int mapping = 0; mapping < on_mesh.count(); ++mapping) {
    const std::vector<int> devices = on_mesh.grid(mapping, 2, 6).devices();
    EXPECT_EQ(std::set<int>(devices.begin(), devices.end()).size(), 12u);
  }
}

TEST(PlanCluster, AllReduceIsTheRingsOrTheMeasuredOne) {
  Cluster cluster;
  cluster.types.resize(1);
  cluster.type_of.assign(4, 0);
  cluster.topology = Servers{2, {1, 100}, {2, 10}};
  const auto all_reduce = [&](int ranks, int width, double bytes) {
    const PipelineShape shape = {&planned_method("2bw"), ranks, 1, ranks};
    const DeviceGrid grid = DeviceMappings(cluster).grid(1, ranks, width);
    return GridLinks(cluster, shape, grid).all_reduce(0, bytes);
  };
  EXPECT_DOUBLE_EQ(all_reduce(2, 2, 100), 2 * (1 + 0.5));
  EXPECT_DOUBLE_EQ(all_reduce(1, 4, 100), 2 * 3 * (2 + 2.5));
  EXPECT_EQ(all_reduce(4, 1, 100), 0);
  cluster.all_reduce = {{4, 200, 5}, {4, 100, 3}, {2, 50, 1}};
  EXPECT_DOUBLE_EQ(all_reduce(1, 4, 150), 4);
  EXPECT_DOUBLE_EQ(all_reduce(1, 4, 50), 3);
  EXPECT_DOUBLE_EQ(all_reduce(1, 4, 400), 10);
}

TEST(PlanGridLinks, TheSlowestOfAllReplicasIsTaken) {
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 2 * (1 + static_cast<int>(random() % 3));
    const int width = 1 + static_cast<int>(random() % 4);
    LinkMatrix matrix = {ranks * width, {}};
    for (int i = 0; i < matrix.num_devices * matrix.num_devices; ++i) {
      matrix.links.push_back({double(random() % 4), 1.0 + random() % 4});
    }
    Cluster cluster;
    cluster.types.resize(1);
    cluster.type_of.assign(matrix.num_devices, 0);
    cluster.topology = matrix;
    const char* names[] = {"chimera", "interleaved", "2bw_v_half"};
    const std::string name = names[round % 3];
    const int chunks = name == "chimera" ? 1 : 2;
    const PipelineShape shape = {&planned_method(name), ranks, chunks, 2 * ranks};
    const DeviceGrid grid = DeviceMappings(cluster).grid(round % 2, ranks, width);
    GridLinks links(cluster, shape, grid);
    for (const double bytes : {1.0, 8.0, 3.0}) {
      for (int from = 0; from < shape.depth(); ++from) {
        double longest = 0;  // step of the ring
        std::vector<int> copies;
        for (const int rank : shape.ranks_of(from)) {
          for (int i = 0; i < width; ++i) copies.push_back(grid.at(rank, i));
        }
        const auto n = static_cast<int>(copies.size());
        for (int i = 0; i < n; ++i) {
          const Link link = link_between(cluster.topology, copies[i], copies[(i + 1) % n]);
          longest = std::max(longest, link.seconds(bytes / n));
        }
        EXPECT_DOUBLE_EQ(links.all_reduce(from, bytes), n > 1 ? 2 * (n - 1) * longest : 0);
        for (int to = from + 1; to < shape.depth(); ++to) {
          double slowest = 0;
          for (int copy = 0; copy < (name == "chimera" ? 2 : 1); ++copy) {
            const auto on = [&](int stage) { return shape.ranks_of(stage)[copy]; };
            for (int i = 0; i < width && on(from) != on(to); ++i) {
              const Link link =
                  link_between(cluster.topology, grid.at(on(from), i), grid.at(on(to), i));
              slowest = std::max(slowest, link.seconds(bytes));
            }
          }
          const bool is_same_rank = shape.ranks_of(from)[0] == shape.ranks_of(to)[0];
          EXPECT_EQ(is_same_rank ? 0 : links.slowest(from, to, bytes).seconds(bytes), slowest);
        }
      }
    }
  }
}

TEST(PlanCluster, PricesAreAddedUpOverTime) {
  Cluster cluster;
  cluster.types.resize(2);
  cluster.types[0].prices = {{0, 2}, {3, 1}};
  cluster.type_of = {0, 0, 1};
  const auto price_of = [&](const std::vector<int>& devices, double hours) {
    return cheapest_start(cluster, devices, hours).price;
  };
  EXPECT_DOUBLE_EQ(price_of({0, 1, 2}, 5), 2 * (3 * 2 + 2 * 1));
  EXPECT_DOUBLE_EQ(price_of({0}, 1.5), 3);
  EXPECT_DOUBLE_EQ(price_per_hour_now(cluster, std::vector<int>{0, 2}), 2);
}

TEST(PlanCluster, TheCheapestStartIsThatOfAFineGrid) {
  Instances instances(9);
  int num_later = 0;
  for (int round = 0; round < 100; ++round) {
    Cluster cluster;
    for (int type = 0; type < 2; ++type) {
      double hour = 0;
      for (DeviceType& each = cluster.types.emplace_back(); hour < 12;
           hour += 1 + instances.below(4)) {
        each.prices.push_back({hour, 0.25 * (1 + instances.below(12))});
      }
    }
    cluster.type_of = {0, 1, 1};
    const std::vector<int> devices = {0, 1, 2};
    const double hours = 0.5 * (1 + instances.below(10));
    const double within = 0.5 * instances.below(16);
    // Prices change at whole hours: halves are enough.
    const auto price_per_hour = [&](double hour) {
      double sum = 0;
      for (const int device : devices) {
        const std::vector<Price>& prices = cluster.type(device).prices;
        const auto next = std::ranges::upper_bound(prices, hour, {}, &Price::from_hour);
        sum += std::prev(next)->per_hour;
      }
      return sum;
    };
    Start expected = {0, kInfinity};
    for (double start = 0; start <= within; start += 0.5) {
      double price = 0;
      for (double hour = start; hour < start + hours; hour += 0.5)
        price += 0.5 * price_per_hour(hour);
      if (price < expected.price) expected = {start, price};
    }
    const Start found = cheapest_start(cluster, devices, hours, within);
    EXPECT_DOUBLE_EQ(found.price, expected.price) << "round " << round;
    EXPECT_DOUBLE_EQ(found.hour, expected.hour) << "round " << round;
    num_later += found.hour > 0;
  }
  EXPECT_GT(num_later, 50);
}

TEST(PlanCluster, LinksOfAMeshGoAlongItsRowsAndColumns) {
  const Topology mesh = Mesh{2, 3, {1, 30}, {2, 60}};
  EXPECT_EQ(link_between(mesh, 0, 2).bandwidth, 30);
  EXPECT_EQ(link_between(mesh, 1, 4).bandwidth, 60);
  EXPECT_DOUBLE_EQ(link_between(mesh, 0, 4).bandwidth, 20);
  EXPECT_EQ(link_between(mesh, 0, 4).latency, 3);
  const Topology matrix = LinkMatrix{2, {{}, {1, 9}, {3, 12}, {}}};
  EXPECT_EQ(link_between(matrix, 0, 1).latency, 3);
  EXPECT_EQ(link_between(matrix, 1, 0).bandwidth, 9);
}

}  // namespace
}  // namespace pd2
