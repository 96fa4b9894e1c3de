// Float32 as bfloat16 and float16, bit by bit, and in two parts of 16 bits.
//
// The two parts: master_bits = (bits(weight) << 16) + remainder, where the weight is the bfloat16
// nearest to the master and the remainder a signed 16-bit number. Of two bfloat16 that are equally
// near the one of larger magnitude is taken: the remainder -32768 has to lead back, and rounding
// to even could not be told from it. In all other cases the weight is what rounding to nearest even
// gives. Every number, infinities included, is got back bit for bit; NaN as some NaN.
#pragma once

#include "kernels/host_device.h"

#include <cstdint>
#include <cstring>

namespace pd2::kernels {
namespace {  // every instruction set's translation unit compiles its own

PD2_HOST_DEVICE inline std::uint32_t bits_of(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

PD2_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

PD2_HOST_DEVICE inline float float_of_bfloat16(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint32_t kInfinityBits = 0x7F800000;

PD2_HOST_DEVICE inline bool is_nan(std::uint32_t bits) {
  return (bits & 0x7FFFFFFF) > kInfinityBits;
}

// To nearest even.
PD2_HOST_DEVICE inline std::uint16_t bfloat16_bits(float number) {
  const std::uint32_t bits = bits_of(number);
  if (is_nan(bits)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

PD2_HOST_DEVICE inline std::uint16_t float16_bits(float number) {
  const std::uint32_t bits = bits_of(number);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  std::uint32_t half = 0;
  if (is_nan(bits)) {
    half = 0x7E00 | (magnitude >> 13 & 0x3FF);
  } else if (magnitude >= 0x477FF000) {  // 65520, half way from the largest number
    half = 0x7C00;
  } else if (magnitude < 0x38800000) {  // 2^-14: multiples of 2^-24, as the last bit of 0.5f is
    half = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
  } else {
    constexpr std::uint32_t kOtherBias = (127 - 15) << 23;
    half = (magnitude - kOtherBias + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

struct SplitFloat {
  std::uint16_t high;
  std::int16_t remainder;
};

PD2_HOST_DEVICE inline SplitFloat split(float number) {
  const std::uint32_t given = bits_of(number);
  const std::uint32_t bits = is_nan(given) ? 0x7FC00000 : given;
  return {static_cast<std::uint16_t>((bits + 0x8000) >> 16), static_cast<std::int16_t>(bits)};
}

PD2_HOST_DEVICE inline float join(SplitFloat parts) {
  return float_of((static_cast<std::uint32_t>(parts.high) << 16) +
                  static_cast<std::uint32_t>(std::int32_t{parts.remainder}));
}

}  // namespace
}  // namespace pd2::kernels
