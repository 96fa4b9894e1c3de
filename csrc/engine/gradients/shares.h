// Which replica steps which parameters, where each parameter has its state on one of them.
#pragma once

#include "engine/gradients/gradient_buckets.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pd2 {

// Neighbouring parameters of one bucket, with the padding after them. The first and the last one
// may be in part another rank's.
struct Share {
  std::size_t dtype;
  int rank;
  std::size_t first, last;  // parameters
  std::int64_t begin, end;  // elements
  std::size_t bucket = 0;
};

// By dtype and parameter: whether its elements may be several ranks'. Empty: none may.
using MayCut = std::vector<std::vector<bool>>;

// Every bucket is cut into a run for each rank, in the order of the ranks: its gradients are
// exchanged at once. No rank gets more bytes than it must, given what it has of other buckets;
// those with the largest parameters come first. A parameter is cut only if it may be, and if it is
// so large that shares would be unequal otherwise: more than a sixteenth of one. The same on all
// ranks; in the order of the buckets.
std::vector<Share> share_out(const std::vector<GradientBuckets::Bucket>& buckets,
                             const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                             int num_ranks, const MayCut& may_cut);

}  // namespace pd2
