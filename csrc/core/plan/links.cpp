#include "core/plan/links.h"

#include <algorithm>

namespace pd2 {
namespace {

// Servers and meshes have three kinds of links at most. Measured links all differ and are not
// compared with each other.
void add_if_new(std::vector<Link>& links, const Link& link) {
  const auto end = links.begin() + std::min<std::ptrdiff_t>(std::ssize(links), 3);
  if (std::find(links.begin(), end, link) == end) links.push_back(link);
}

}  // namespace

std::vector<Link> GridLinks::links_between(int from, int to) const {
  std::vector<Link> links;
  const int last = shape_.ranks - 1;
  const auto take = [&](int sender, int receiver) {
    for (int replica = 0; replica < devices_.width(); ++replica) {
      add_if_new(links, link_between(cluster_.topology, devices_.at(sender, replica),
                                     devices_.at(receiver, replica)));
    }
  };
  take(from, to);
  if (shape_.method->is_bidirectional()) take(last - from, last - to);
  return links;
}

Link GridLinks::slowest(int from, int to, double bytes) {
  const std::pair ranks(from % shape_.ranks, to % shape_.ranks);
  if (ranks.first == ranks.second) return {};
  if (devices_.width() == 1 && !shape_.method->is_bidirectional()) {
    return link_between(cluster_.topology, devices_.at(ranks.first, 0),
                        devices_.at(ranks.second, 0));
  }
  std::vector<Link>& links = messages_[ranks];
  if (links.empty()) links = links_between(ranks.first, ranks.second);
  return *std::ranges::max_element(links, {},
                                   [&](const Link& link) { return link.seconds(bytes); });
}

double GridLinks::all_reduce(int stage, double bytes) {
  Copies& copies = copies_[stage];
  if (copies.count == 0) {
    std::vector<int> devices;
    for (const int rank : shape_.ranks_of(stage)) {
      const std::span<const int> more = devices_.of_rank(rank);
      devices.insert(devices.end(), more.begin(), more.end());
    }
    copies.count = static_cast<int>(devices.size());
    for (int i = 0; i < copies.count; ++i) {
      add_if_new(copies.links,
                 link_between(cluster_.topology, devices[i], devices[(i + 1) % copies.count]));
    }
  }
  return all_reduce_seconds(cluster_, copies.count, copies.links, bytes);
}

}  // namespace pd2
