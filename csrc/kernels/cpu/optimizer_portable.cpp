// For machines without a path of their own. A vector has 16 bytes: compilers use the machine's
// vectors where it has them (NEON), else scalar code.
#include "kernels/cpu/optimizer_passes.h"

#include <cmath>
#include <cstdint>

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "kernels/half.h"

namespace pd2::kernels {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kUnrolled = 1;  // scalar code of a whole line would take the compiler long
constexpr bool kStreams = false;
template <typename Register>
inline Register fused(Register a, Register b, Register c) {
  for (unsigned i = 0; i < sizeof(a) / sizeof(a[0]); ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
}
template <typename Register>
inline Register root(Register a) {
  for (unsigned i = 0; i < sizeof(a) / sizeof(a[0]); ++i) a[i] = std::sqrt(a[i]);
  return a;
}
typedef std::uint16_t Float16s __attribute__((vector_size(kVectorBytes / 2)));
template <typename Register>
inline Float16s float16_of(const Register& a) {
  return Float16s{float16_bits(a[0]), float16_bits(a[1]), float16_bits(a[2]), float16_bits(a[3])};
}
inline void finish_streaming() {}

}  // namespace
}  // namespace pd2::kernels

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {

const AllPasses& portable_passes() { return kAllPasses; }

}  // namespace pd2::kernels
