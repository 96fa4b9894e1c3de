#include "core/plan.h"

#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

namespace pd2 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kBytesPerGiB = 1024.0 * 1024 * 1024;

// The best so far, one of each kind of candidate.
class Best {
 public:
  explicit Best(std::size_t most) : most_(most) {}

  // What a score must be below to be among them.
  double worth() const { return kept_.size() < most_ ? kInfinity : kept_.back().score; }

  void consider(Evaluation evaluation) {
    const auto same = std::ranges::find_if(kept_, [&](const Evaluation& kept) {
      return same_but_layout(kept.candidate, evaluation.candidate);
    });
    if (same != kept_.end()) {
      if (same->score <= evaluation.score) return;
      kept_.erase(same);
    }
    const auto place = std::ranges::upper_bound(kept_, evaluation.score, {}, &Evaluation::score);
    kept_.insert(place, std::move(evaluation));
    if (kept_.size() > most_) kept_.pop_back();
  }

  std::vector<Evaluation> take() && { return std::move(kept_); }

 private:
  std::size_t most_;
  std::vector<Evaluation> kept_;
};

// All candidates of a problem with their bounds, the least bound first. Those that recompute blocks
// come after all others: their bound is low, and when something else is known most can be dropped
// before their blocks are chosen.
class Queue {
 public:
  Queue(const PlanProblem& problem, const Layouts& layouts, const Evaluator& evaluator)
      : list_(candidates(problem, layouts)) {
    PD2_CHECK(!list_.empty(), "batch: ", problem.options.batch,
              ", largest_batch: ", problem.options.largest_batch,
              ": no width, microbatch size and schedule make a batch between them: batches must be "
              "w * b * m rows, and m must suit the schedule");
    const bool is_priced = problem.options.objective == Objective::kCost;
    double speed = 0;
    for (std::size_t i = 0; i < list_.size(); ++i) {
      const Candidate& candidate = list_[i];
      if (i == 0 || !has_same_grid(candidate, list_[i - 1])) {
        speed = layouts.speed(candidate.layout, candidate.shape.ranks, candidate.width);
      }
      const double seconds = evaluator.bounds().seconds(candidate, speed);
      const double score =
          is_priced
              ? evaluator.score(
                    candidate,
                    layouts.grid(candidate.layout, candidate.shape.ranks, candidate.width), seconds)
              : seconds / candidate.batch();
      const bool is_late = candidate.recompute == Recompute::kBlocks;
      (is_late ? late_ : bounds_).emplace_back(score, static_cast<int>(i));
    }
    std::ranges::make_heap(bounds_, std::greater{});
  }

  // The next one whose bound is below `worth`.
  const Candidate* next(double worth) {
    if (bounds_.empty() || !(bounds_.front().first < worth)) {
      if (late_.empty()) return nullptr;
      bounds_ = std::exchange(late_, {});
      std::ranges::make_heap(bounds_, std::greater{});
      return next(worth);
    }
    std::ranges::pop_heap(bounds_, std::greater{});
    const int index = bounds_.back().second;
    bounds_.pop_back();
    return &list_[index];
  }

  const std::vector<Candidate>& all() const { return list_; }

 private:
  static bool has_same_grid(const Candidate& a, const Candidate& b) {
    return a.layout == b.layout && a.shape.ranks == b.shape.ranks && a.width == b.width;
  }

  std::vector<Candidate> list_;
  std::vector<std::pair<double, int>> bounds_;  // a heap
  std::vector<std::pair<double, int>> late_;
};

struct Nearest {
  const Candidate* candidate = nullptr;
  double bytes = kInfinity;  // that each device needs
};

// The candidate that needs the least memory; blocks apart, which need more than whole stages
// recomputed. Candidates of one shape need the same whatever the width.
Nearest nearest(const Evaluator& evaluator, const std::vector<Candidate>& candidates) {
  std::vector<const Candidate*> shapes;
  std::set<std::tuple<const ScheduleRule*, int, int, int, int, Recompute>> seen;
  for (const Candidate& candidate : candidates) {
    const PipelineShape& shape = candidate.shape;
    const auto key = std::tuple(shape.rule, shape.ranks, shape.stages_per_rank,
                                shape.num_microbatches, candidate.size, candidate.recompute);
    if (candidate.recompute != Recompute::kBlocks && seen.insert(key).second) {
      shapes.push_back(&candidate);
    }
  }
  // Deep pipelines of small microbatches need the least: a few hundred are enough to look at.
  constexpr std::size_t kMostTried = 300;
  std::ranges::stable_sort(shapes, [](const Candidate* a, const Candidate* b) {
    return std::pair(-a->shape.depth(), a->rows) < std::pair(-b->shape.depth(), b->rows);
  });
  if (shapes.size() > kMostTried) shapes.resize(kMostTried);
  Nearest nearest;
  for (const Candidate* candidate : shapes) {
    const double bytes = evaluator.least_memory(*candidate);
    if (bytes < nearest.bytes) nearest = {candidate, bytes};
  }
  return nearest;
}

[[noreturn]] void throw_does_not_fit(const PlanProblem& problem, const Evaluator& evaluator,
                                     const std::vector<Candidate>& candidates) {
  double limit = 0;
  for (const DeviceType& type : problem.cluster.types) limit = std::max(limit, type.memory_bytes);
  const Nearest found = nearest(evaluator, candidates);
  if (found.candidate == nullptr) {
    detail::throw_value_error(detail::concat(
        "memory: ", limit / kBytesPerGiB,
        " GiB: the model fits on no plan with recompute of blocks alone; allow 'stages'"));
  }
  // Enough for the rounding of this number, too.
  const double enough = std::ceil(found.bytes / kBytesPerGiB * 1000) / 1000;
  detail::throw_value_error(detail::concat(
      "memory: ", limit / kBytesPerGiB, " GiB: the model fits on no plan; nearest comes ",
      to_string(*found.candidate), ", which lacks ", enough - limit / kBytesPerGiB,
      " GiB: memory = ", enough, " GiB would do"));
}

// Of those within the slack of the fastest one, the smallest peaks.
std::vector<Evaluation> smallest_plans(const PlanProblem& problem) {
  PlanProblem timed = problem;
  timed.options.objective = Objective::kThroughput;
  timed.options.num_alternatives = 0;
  const double fastest = best_plans(timed).front().score;
  const double worth = fastest * (1 + problem.options.slack) * (1 + 1e-12);
  const Layouts layouts(problem.cluster);
  Evaluator evaluator(timed, layouts);
  Queue queue(timed, layouts, evaluator);
  Best best(1 + problem.options.num_alternatives);
  while (const Candidate* candidate = queue.next(worth)) {
    std::optional<Evaluation> evaluation = evaluator.evaluate(*candidate, worth);
    if (!evaluation || evaluation->score >= worth) continue;
    evaluation->score = evaluation->peak_bytes;
    best.consider(*std::move(evaluation));
  }
  return std::move(best).take();
}

}  // namespace

std::vector<Evaluation> best_plans(const PlanProblem& problem) {
  check(problem);
  if (problem.options.objective == Objective::kMemory) return smallest_plans(problem);
  const Layouts layouts(problem.cluster);
  Evaluator evaluator(problem, layouts);
  Queue queue(problem, layouts, evaluator);
  Best best(1 + problem.options.num_alternatives);
  while (const Candidate* candidate = queue.next(best.worth())) {
    std::optional<Evaluation> evaluation = evaluator.evaluate(*candidate, best.worth());
    if (evaluation) best.consider(*std::move(evaluation));
  }
  std::vector<Evaluation> plans = std::move(best).take();
  if (plans.empty()) throw_does_not_fit(problem, evaluator, queue.all());
  return plans;
}

std::vector<Evaluation> best_plans_exhaustively(const PlanProblem& problem) {
  check(problem);
  const Layouts layouts(problem.cluster);
  Evaluator evaluator(problem, layouts);
  std::vector<Evaluation> all;
  double fastest = kInfinity;
  for (const Candidate& candidate : candidates(problem, layouts)) {
    std::optional<Evaluation> evaluation = evaluator.evaluate(candidate);
    if (!evaluation) continue;
    fastest = std::min(fastest, evaluation->score);
    all.push_back(*std::move(evaluation));
  }
  Best best(1 + problem.options.num_alternatives);
  for (Evaluation& evaluation : all) {
    if (problem.options.objective == Objective::kMemory) {
      if (evaluation.score > fastest * (1 + problem.options.slack)) continue;
      evaluation.score = evaluation.peak_bytes;
    }
    best.consider(std::move(evaluation));
  }
  return std::move(best).take();
}

std::optional<Evaluation> better_plan(const PlanProblem& problem, double worth) {
  const Layouts layouts(problem.cluster);
  Evaluator evaluator(problem, layouts);
  Queue queue(problem, layouts, evaluator);
  std::optional<Evaluation> best;
  while (const Candidate* candidate = queue.next(worth)) {
    std::optional<Evaluation> evaluation = evaluator.evaluate(*candidate, worth);
    if (!evaluation || evaluation->score >= worth) continue;
    worth = evaluation->score;
    best = std::move(evaluation);
  }
  return best;
}

}  // namespace pd2
