// Random numbers that depend on a key and on the draws before, whatever other threads draw.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace pd2 {

class RecordedDraws;

// A number from torch's default generator, which torch.manual_seed sets.
std::uint64_t draw_seed();

// A seed for each value; seeds of different values look independent.
std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value);

// Which random numbers come next. A draw is a call of an operator that draws, of any size; each
// has a number, in the order in which the unsplit model calls them.
struct RandomPlace {
  static constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t key = 0;       // of a microbatch
  std::uint64_t number = 0;    // of the next draw
  std::uint64_t left = kAll;   // how many numbers there are from here on
  std::uint64_t num_more = 0;  // draws after the last of them, which are counted apart

  // The seed of the next draw, which this makes the last one.
  std::uint64_t take();
};

// While it lives, operators that this thread calls and that would draw from a default generator of
// torch draw as the place says. That generator is shared by all threads: a forward that runs again
// would find other numbers in it, and so would the same forward under another schedule.
class KeyedRandom {
 public:
  struct Options {
    bool repeats = false;         // drawing from a generator of the caller's is an error
    bool counts_fakes = false;    // draws on fake tensors count: see num_draws of a captured layer
    bool is_of_backward = false;  // autograd's threads draw there, too, counted together
    bool is_recorded = false;     // such a draw is an error: a graph would draw the same ones again
  };
  explicit KeyedRandom(const std::optional<RandomPlace>& place) : KeyedRandom(place, Options{}) {}
  // Without a place it changes nothing.
  KeyedRandom(const std::optional<RandomPlace>& place, Options options);
  ~KeyedRandom();
  KeyedRandom(const KeyedRandom&) = delete;
  KeyedRandom& operator=(const KeyedRandom&) = delete;

 private:
  const std::optional<RandomPlace> outer_;
  const Options outer_options_;
  std::optional<c10::impl::IncludeDispatchKeyGuard> guard_;
  std::optional<c10::DebugInfoGuard> shared_;
};

// Whether this thread is inside of a KeyedRandom; also true of autograd's threads for what runs
// inside of one.
bool is_keyed();
// The thread's place, if it is its own: in a backward there is none until it is set.
std::optional<RandomPlace> random_place();
// How many draws this thread has made in places.
std::int64_t num_draws();
// Sets the place until the innermost KeyedRandom ends. The thread must be keyed.
void set_random_place(const std::optional<RandomPlace>& place);
// Until it is null again, this thread's draws are recorded: see RecordedDraws::Scope.
void set_recorded_draws(RecordedDraws* draws);
// The next `count` draws have the numbers from `number` on. Does nothing where no place is known.
void number_draws(std::uint64_t number, std::uint64_t count);

}  // namespace pd2
