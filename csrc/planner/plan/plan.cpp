#include "planner/plan/plan.h"

#include "core/infinity.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <tuple>
#include <utility>

namespace pd2 {
namespace {

// The best so far, one of each kind of candidate, and all that are as good as the best one.
class Best {
 public:
  explicit Best(const PlanProblem& problem) : most_(1 + problem.options.num_alternatives) {}

  bool is_empty() const { return kept_.empty(); }

  // There must be one.
  double least() const { return kept_.front().score; }

  // The score that a plan must be below to be among them.
  double worth() const {
    return kept_.size() < most_ ? kInfinity
                                : std::max(kept_[most_ - 1].score, kEquallyGood * least());
  }

  void consider(Evaluation evaluation) {
    const auto same = std::ranges::find_if(kept_, [&](const Evaluation& kept) {
      return same_but_mapping(kept.candidate, evaluation.candidate);
    });
    if (same != kept_.end()) {
      if (same->score <= evaluation.score) return;
      kept_.erase(same);
    }
    const auto place = std::ranges::upper_bound(kept_, evaluation.score, {}, &Evaluation::score);
    kept_.insert(place, std::move(evaluation));
    while (kept_.size() > most_ && kept_.back().score >= worth()) kept_.pop_back();
  }

  std::vector<Evaluation> take() && {
    const auto end =
        std::ranges::lower_bound(kept_, kEquallyGood * least(), {}, &Evaluation::score);
    std::ranges::stable_sort(kept_.begin(), end, {}, [](const Evaluation& plan) {
      return std::pair(plan.candidate.shape.mean_delay(), plan.peak_bytes);
    });
    if (kept_.size() > most_) kept_.resize(most_);
    return std::move(kept_);
  }

 private:
  std::size_t most_;
  std::vector<Evaluation> kept_;  // by score
};

// All candidates of a problem with their bounds, the least bound first. Those that recompute blocks
// come after all others: their bound is low, and when something else is known most can be dropped
// before their blocks are chosen.
class Queue {
 public:
  Queue(const PlanProblem& problem, const DeviceMappings& mappings, const Evaluator& evaluator)
      : list_(candidates(problem, mappings)) {
    PD2_CHECK(!list_.empty(), "batch: ", problem.options.batch,
              ", largest_batch: ", problem.options.largest_batch,
              ": no width, microbatch size and schedule make a batch between them: batches must be "
              "w * b * m rows, and m must suit the schedule");
    const bool is_priced = problem.options.objective == Objective::kCost;
    double speed = 0;
    for (std::size_t i = 0; i < list_.size(); ++i) {
      const Candidate& candidate = list_[i];
      if (i == 0 || !has_same_grid(candidate, list_[i - 1])) {
        speed = mappings.speed(candidate.mapping, candidate.shape.ranks, candidate.width,
                               candidate.microbatches);
      }
      const double seconds = evaluator.bounds().seconds(candidate, speed);
      const double score =
          is_priced ? evaluator.score(
                          candidate,
                          mappings.grid(candidate.mapping, candidate.shape.ranks, candidate.width),
                          seconds)
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
    return a.mapping == b.mapping && a.shape.ranks == b.shape.ranks && a.width == b.width &&
           a.microbatches == b.microbatches;
  }

  std::vector<Candidate> list_;
  std::vector<std::pair<double, int>> bounds_;  // a heap
  std::vector<std::pair<double, int>> late_;
};

// A candidate and the memory of every device that it fits.
struct Nearest {
  Candidate candidate;
  double bytes = kInfinity;
};

// Candidates of different shapes, those first that probably need little: deep pipelines of small
// microbatches. A few hundred are enough to look at. Of one shape all widths need the same.
std::vector<Candidate> different_shapes(const std::vector<Candidate>& candidates) {
  std::vector<Candidate> shapes;
  std::set<std::tuple<const ScheduleMethod*, int, int, int, int, Recompute>> seen;
  for (const Candidate& candidate : candidates) {
    const PipelineShape& shape = candidate.shape;
    if (seen.emplace(shape.method, shape.ranks, shape.stages_per_rank, shape.num_microbatches,
                     candidate.size, candidate.recompute)
            .second) {
      shapes.push_back(candidate);
    }
  }
  constexpr std::size_t kMostTried = 300;
  std::ranges::stable_sort(shapes, [](const Candidate& a, const Candidate& b) {
    return std::pair(-a.shape.depth(), a.rows) < std::pair(-b.shape.depth(), b.rows);
  });
  if (shapes.size() > kMostTried) shapes.resize(kMostTried);
  return shapes;
}

// The least memory of every device with which the planner finds a plan, to a ten-thousandth, and
// that plan's candidate. With the least memory of any type none is found.
Nearest nearest(const PlanProblem& problem, const std::vector<Candidate>& all) {
  const std::vector<Candidate> shapes = different_shapes(all);
  const auto fitting = [&](double limit) -> std::optional<Nearest> {
    PlanProblem changed = problem;
    for (DeviceType& type : changed.cluster.types) type.memory_bytes = limit;
    const DeviceMappings mappings(changed.cluster);
    Evaluator evaluator(changed, mappings);
    for (const Candidate& candidate : shapes) {
      if (evaluator.evaluate(candidate)) return Nearest{candidate, limit};
    }
    return std::nullopt;
  };
  const std::vector<DeviceType>& types = problem.cluster.types;
  double low = std::ranges::min_element(types, {}, &DeviceType::memory_bytes)->memory_bytes;
  std::optional<Nearest> found;
  for (double high = 2 * low; !(found = fitting(high)); high *= 2) low = high;
  while (found->bytes - low > found->bytes / 10'000) {
    const double middle = low + (found->bytes - low) / 2;
    if (auto nearer = fitting(middle)) {
      found = std::move(nearer);
    } else {
      low = middle;
    }
  }
  return *found;
}

// With four digits, rounded up: enough for the rounding of the number, too.
double rounded_up(double number) {
  const double last = std::pow(10.0, std::floor(std::log10(number)) - 3);
  return std::ceil(number / last) * last;
}

[[noreturn]] void throw_does_not_fit(const PlanProblem& problem,
                                     const std::vector<Candidate>& candidates) {
  double least = kInfinity;
  double most = 0;
  for (const DeviceType& type : problem.cluster.types) {
    least = std::min(least, type.memory_bytes + problem.options.reserved);
    most = std::max(most, type.memory_bytes + problem.options.reserved);
  }
  const Nearest found = nearest(problem, candidates);
  const double needed = found.bytes + problem.options.reserved;
  const auto [unit, name] = needed < kBytesPerGiB ? std::pair(kBytesPerGiB / 1024, "MiB")
                                                  : std::pair(kBytesPerGiB, "GiB");
  const double enough = rounded_up(needed / unit);
  const std::string given = detail::concat(least / unit, least < most ? " to " : "",
                                           least < most ? detail::concat(most / unit) : "");
  const std::string text = detail::concat(
      "memory: ", given, " ", name, ": the model fits on no plan. The nearest one, ",
      to_string(found.candidate), ", lacks ", enough - least / unit, " ", name, ": memory=\"",
      enough, name, "\"", least < most ? " for every device" : "", " would do",
      problem.options.reserved > 0
          ? detail::concat(" (with the calibration's offset, ", problem.options.reserved / unit,
                           " ", name, " of each device)")
          : "");
  throw DoesNotFit(text, enough * unit);
}

// Plans by rising bound.
class Search {
 public:
  explicit Search(const PlanProblem& problem)
      : mappings_(problem.cluster),
        evaluator_(problem, mappings_),
        queue_(problem, mappings_, evaluator_) {}

  // The next one whose score is below `worth`, if there is any.
  std::optional<Evaluation> next(double worth) {
    while (const Candidate* candidate = queue_.next(worth)) {
      std::optional<Evaluation> plan = evaluator_.evaluate(*candidate, worth);
      if (plan && plan->score < worth) return plan;
    }
    return std::nullopt;
  }

  const std::vector<Candidate>& candidates() const { return queue_.all(); }

 private:
  const DeviceMappings mappings_;
  Evaluator evaluator_;
  Queue queue_;
};

// Throws DoesNotFit if there is none.
Best best_by_score(const PlanProblem& problem) {
  Search search(problem);
  Best best(problem);
  while (auto plan = search.next(best.worth())) best.consider(*std::move(plan));
  if (best.is_empty()) throw_does_not_fit(problem, search.candidates());
  return best;
}

// Finds the plans with the smallest peaks among those within the slack of the fastest. Splits are
// made for time and keep to the memory that there is; so the least memory that leaves the time
// within the slack is bisected, up to a thousandth. The others are the smallest with all of the
// memory.
std::vector<Evaluation> smallest_plans(const PlanProblem& problem) {
  PlanProblem timed = problem;
  timed.options.objective = Objective::kThroughput;
  timed.options.num_alternatives = 0;
  const double fastest = best_by_score(timed).least();
  const double worth = fastest * (1 + problem.options.slack) * (1 + 1e-12);
  Best best(problem);
  const auto consider = [&](Evaluation plan) {
    plan.score = plan.peak_bytes;
    best.consider(std::move(plan));
  };
  for (Search search(timed); auto plan = search.next(worth);) consider(*std::move(plan));
  double low = 0;
  for (double high = best.least(); high - low > high / 1000; high = best.least()) {
    const double middle = low + (high - low) / 2;
    PlanProblem limited = timed;
    for (DeviceType& type : limited.cluster.types) {
      type.memory_bytes = std::min(type.memory_bytes, middle);
    }
    if (auto plan = Search(limited).next(worth)) {
      consider(*std::move(plan));
    } else {
      low = middle;
    }
  }
  return std::move(best).take();
}

}  // namespace

std::vector<Evaluation> best_plans(const PlanProblem& problem) {
  if (problem.options.objective == Objective::kMemory) return smallest_plans(problem);
  return best_by_score(problem).take();
}

std::optional<Evaluation> better_plan(const PlanProblem& problem, double worth) {
  Search search(problem);
  std::optional<Evaluation> best;
  while (auto plan = search.next(best ? best->score : worth)) best = std::move(plan);
  return best;
}

}  // namespace pd2
