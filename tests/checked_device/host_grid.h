// Runs the kernels' bodies on the host, thread by thread: for tests, and for devices of tests.
#pragma once

#include "kernels/grid/norm.h"
#include "kernels/grid/step.h"

#include <array>
#include <cstdint>

namespace pd2::kernels {
namespace {

inline void step_on_host(const StepLaunch& launch, std::int64_t num_blocks) {
  visit_step(launch,
             [&]<typename Arrays, typename Step>(const Arrays& arrays, std::type_identity<Step>) {
               for (std::int64_t block = 0; block < num_blocks; ++block) {
                 for (int thread = 0; thread < kThreads; ++thread) {
                   step_thread<Step>(arrays, {block, num_blocks, thread});
                 }
               }
             });
}

template <NormKind kKind, typename T>
void norms_on_host(const NormLaunch& launch, std::int64_t num_blocks) {
  std::array<double, kThreads> of_threads{};
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    sum_chunks<kKind, T>(launch, block, num_blocks, of_threads.data());
  }
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    finish_norms<kKind, T>(launch, block, num_blocks, of_threads.data());
  }
}

inline void norms_on_host(const NormLaunch& launch, std::int64_t num_blocks) {
  visit_norm(launch, [&]<NormKind kKind, typename T>(std::integral_constant<NormKind, kKind>,
                                                     std::type_identity<T>) {
    norms_on_host<kKind, T>(launch, num_blocks);
  });
}

}  // namespace
}  // namespace pd2::kernels
