// Random numbers that can be drawn again, whatever other threads draw.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace pd2 {

// A number from torch's default generator, which torch.manual_seed sets.
std::uint64_t draw_seed();

// A seed for each value; seeds of different values look independent.
std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value);

// While it lives, next_seed() in this thread gives the seeds that follow from `seed`, one after
// another.
class ForwardSeeds {
 public:
  explicit ForwardSeeds(std::uint64_t seed);
  ~ForwardSeeds();
  ForwardSeeds(const ForwardSeeds&) = delete;
  ForwardSeeds& operator=(const ForwardSeeds&) = delete;

 private:
  const std::optional<std::uint64_t> outer_;
};

// Throws ValueError outside of a ForwardSeeds.
std::uint64_t next_seed();

// While it lives, operators on CPU tensors that this thread calls and that would draw from torch's
// default generator draw from one that was seeded with `seed`. That generator is shared by all
// threads, so a forward that is run again would find other numbers in it. Without a seed drawing is
// an error, and so is drawing from a generator of the caller's.
class PrivateGenerator {
 public:
  explicit PrivateGenerator(std::optional<std::uint64_t> seed);
  ~PrivateGenerator();
  PrivateGenerator(const PrivateGenerator&) = delete;
  PrivateGenerator& operator=(const PrivateGenerator&) = delete;

 private:
  std::unique_ptr<at::Generator> generator_;
  at::Generator* const outer_;
  c10::impl::IncludeDispatchKeyGuard guard_;
};

}  // namespace pd2
