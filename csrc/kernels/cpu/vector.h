// The vector of optimizer_loops.h, by the compiler's own vectors; included as that header is. What
// differs from one instruction set to another an includer says before: kVectorBytes, kUnrolled,
// kStreams, and functions of registers: fused (a * b + c, rounded once), root and float16_of. Where
// kStreams says so they are stored past the caches, too: stream and finish_streaming.
#pragma once

#include "kernels/half.h"
#include "kernels/optimizer.h"

#include <cstdint>

namespace pd2::kernels {
namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
// A float's bits, and halves of as many floats.
typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t SignedBits __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef std::int16_t SignedHalves __attribute__((vector_size(kVectorBytes / 2)));

template <typename T>
struct RegisterOf {
  using Type = Floats;
};
template <>
struct RegisterOf<double> {
  using Type = Doubles;
};

// How many numbers of a vector are read or written, where this is known to the compiler: all.
struct Whole {};

// Of an array's last numbers there are fewer than a vector has: the others are zeros.
template <typename Register>
inline Register read(const void* p, Whole) {
  Register value;
  __builtin_memcpy(&value, p, sizeof(value));
  return value;
}
template <typename Register>
inline Register read(const void* p, std::int64_t count) {
  Register value{};
  __builtin_memcpy(&value, p, count * sizeof(value[0]));
  return value;
}
template <bool kStream, typename Register>
inline void write(void* p, Register value, Whole) {
  if constexpr (kStream) {
    stream(p, value);
  } else {
    __builtin_memcpy(p, &value, sizeof(value));
  }
}
template <bool kStream, typename Register>
inline void write(void* p, Register value, std::int64_t count) {
  __builtin_memcpy(p, &value, count * sizeof(value[0]));
}

template <typename Count>
inline Bits shifted_up(const std::uint16_t* halves, Count count) {
  return __builtin_convertvector(read<Halves>(halves, count), Bits) << 16;
}
inline Halves lower_halves(Bits bits) { return __builtin_convertvector(bits, Halves); }

template <typename T>
struct Vector {
  using Scalar = T;
  static constexpr std::int64_t kWidth = kVectorBytes / static_cast<std::int64_t>(sizeof(T));
  using Register = typename RegisterOf<T>::Type;
  Register v;

  template <typename Count>
  static Vector load(const T* p, Count count) {
    return {read<Register>(p, count)};
  }
  static Vector broadcast(T x) { return {x - Register{}}; }
  template <bool kStream, typename Count>
  void store(T* p, Count count) const {
    write<kStream>(p, v, count);
  }

  // The following are of floats, with the bits of half.h.
  template <typename Count>
  static Vector load(const std::uint16_t* p, Count count) {
    return {(Floats)shifted_up(p, count)};
  }
  template <HalfFormat kFormat, bool kStream, typename Count>
  void store_half(std::uint16_t* p, Count count) const {
    if constexpr (kFormat == HalfFormat::kFloat16) {
      write<kStream>(p, (Halves)float16_of(v), count);
    } else {
      const Bits bits = (Bits)v;
      const Bits rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
      write<kStream>(p, lower_halves(v != v ? bits >> 16 | 0x40 : rounded), count);
    }
  }
  template <typename Count>
  static Vector join(const std::uint16_t* high, const std::int16_t* remainder, Count count) {
    const SignedHalves rest = read<SignedHalves>(remainder, count);
    const Bits bits = (Bits) __builtin_convertvector(rest, SignedBits);
    return {(Floats)(shifted_up(high, count) + bits)};
  }
  template <bool kStream, typename Count>
  void split(std::uint16_t* high, std::int16_t* remainder, Count count) const {
    const Bits bits = v != v ? Bits{} + 0x7FC00000 : (Bits)v;
    write<kStream>(high, lower_halves((bits + 0x8000) >> 16), count);
    write<false>(remainder, lower_halves(bits), count);
  }
};

template <typename T>
inline Vector<T> add(Vector<T> a, Vector<T> b) {
  return {a.v + b.v};
}
template <typename T>
inline Vector<T> subtract(Vector<T> a, Vector<T> b) {
  return {a.v - b.v};
}
template <typename T>
inline Vector<T> multiply(Vector<T> a, Vector<T> b) {
  return {a.v * b.v};
}
template <typename T>
inline Vector<T> divide(Vector<T> a, Vector<T> b) {
  return {a.v / b.v};
}
template <typename T>
inline Vector<T> fma(Vector<T> a, Vector<T> b, Vector<T> c) {
  return {fused(a.v, b.v, c.v)};
}
template <typename T>
inline Vector<T> sqrt(Vector<T> a) {
  return {root(a.v)};
}
template <typename T>
inline Vector<T> negate(Vector<T> a) {
  return {-a.v};
}
template <typename T>
inline Vector<T> max(Vector<T> a, Vector<T> b) {
  return {(a.v > b.v) | (a.v != a.v) ? a.v : b.v};
}

}  // namespace
}  // namespace pd2::kernels
