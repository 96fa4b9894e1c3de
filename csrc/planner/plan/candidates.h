// What the planner chooses among, and how long each takes at the very least.

#pragma once

#include "planner/plan/device_mapping.h"
#include "planner/plan/problem.h"

#include <vector>

namespace pd2 {

struct Candidate {
  PipelineShape shape;
  int width = 1;
  int size = 0;  // of microbatches, an index into the model's
  int rows = 1;  // of a microbatch
  Recompute recompute = Recompute::kNone;
  int mapping = 0;
  // Of each replica, of which the shape has the most; empty: all have as many.
  std::vector<int> microbatches{};

  int batch() const;
};

// Numbers of microbatches for replicas whose devices take `slowness` for each: multiples of a
// number, at least `least`, `total` together, or more where these rules leave no such numbers. The
// replica that takes longest takes as little as may be, if one takes slowness (m + more).
std::vector<int> microbatches_by_speed(const std::vector<double>& slowness, int least,
                                       int multiple_of, int total, int more);

// Whether two candidates differ in their device mapping alone: the planner offers the better one.
bool same_but_mapping(const Candidate& a, const Candidate& b);

// "2bw, w = 2, d = 4, b = 8, m = 16, recompute none"
std::string to_string(const Candidate& candidate);

// Algorithm 1's space (arXiv 2006.09503, section 4): every width w and number of ranks p with w p
// <= devices, every profiled microbatch size b, schedule and way to recompute, stages_per_rank
// where the schedule has chunks, and mappings. m is the least number of microbatches that the
// schedule allows with w b m >= batch; a candidate with w b m > largest_batch is none. With p = 1
// (replicated and unpipelined) one drained schedule and one that is not are enough, as they are all
// the same. pipedream is one by itself: it has m = 1.
//
// Where a mapping gives replicas devices of different slowness there is, with unequal_replicas,
// another candidate, in which they have microbatches by their speed: of the slowest of each's
// devices. Not with two pipelines, and not under pipedream.
std::vector<Candidate> candidates(const PlanProblem& problem, const DeviceMappings& mappings);

// The most stages that the model can be cut into.
int most_stages(const ProfiledModel& model);

// The least bytes of a microbatch that any stage but the first receives: what its first layer
// reads.
double least_received(const ProfiledModel& model, int size);

// The least bytes of a microbatch that a stage sends to the next one: what the next layer reads of
// its last one. Other values go directly to the stages that read them.
double least_sent(const ProfiledModel& model, int size);

// Lower bounds on the seconds per batch, in closed form from sums over the layers. With totals over
// the model F, I, W (R = F where stages are recomputed), of the slowest layer s, the shortest hop
// c, S = sum over ranks of 1 / slowness (p on the profiled device), each of these is one:
//
//   all        m (F + I + W + R) / S: the ranks' work, however it is cut. Where batches drain their
//              all-reduce comes on top; where not, it fits beside, but into no less than a batch
//   all        m s, m s / 2 for chimera, whose stage is on two ranks
//   2bw        m (F + I + W + 2 (p - 1) c) / p: the cycle over all stages (planner/plan/period.h)
//   2bw, in a V  m (F + I + 4 (p - 1) c) / n, n microbatches at once between F and I of stage 0
//   1f1b       for each stage j, what comes before and after it, and m times its own. The weights
//              lambda that make the mean of these d bounds the same for every cut give
//              (F + I + W) / (1 - (1 - 1/m)^p), and 2 c for each stage before j on average
//   draining   one microbatch's way through all stages and back, F + I + 2 (p - 1) c
class Bounds {
 public:
  explicit Bounds(const PlanProblem& problem);

  // `speed` is S, of DeviceMappings::speed(): the same for many candidates.
  double seconds(const Candidate& candidate, double speed) const;

 private:
  struct Totals {
    double forward = 0;
    double input_grad = 0;
    double weight_grad = 0;
    double slowest_layer = 0;       // F + I + W
    double slowest_recomputed = 0;  // and F again
    double hop = 0;
  };

  double by_way(const Candidate& candidate, const Totals& totals) const;

  const PlanProblem& problem_;
  std::vector<Totals> totals_;  // by size
  double least_slowness_;
  double most_slowness_;
  double trained_bytes_ = 0;
  Link best_link_;
};

}  // namespace pd2
