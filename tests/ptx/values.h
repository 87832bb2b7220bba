// The functions that the expressions of arithmetic.py use. Each does what the instruction of the
// PTX ISA does that arithmetic.py gives it to; "approx" instructions return the correctly rounded
// value, which is within the error that the ISA allows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ptx {

template <class To, class From>
inline To bits(From value) {
  return __builtin_bit_cast(To, value);
}

// ---- integers. The ISA leaves a division by zero unspecified; here it gives all ones.

template <class T>
inline T divided(T a, T b) {
  if (b == 0) return T(-1);
  if constexpr (T(-1) < T(0))
    if (b == T(-1)) return T(0 - uint64_t(a));
  return T(a / b);
}
template <class T>
inline T remainder_of(T a, T b) {
  if (b == 0) return a;
  if constexpr (T(-1) < T(0))
    if (b == T(-1)) return 0;
  return T(a % b);
}
template <class T>
inline T shifted_left(T a, uint32_t n) {
  return n >= sizeof(T) * 8 ? T(0) : T(a << n);
}
template <class T>
inline T shifted_right(T a, uint32_t n) {
  constexpr uint32_t LAST = sizeof(T) * 8 - 1;
  if (n > LAST) return T(-1) < T(0) ? T(a >> LAST) : T(0);
  return T(a >> n);
}
template <class T>
inline T bit_field(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t BITS = sizeof(T) * 8;
  constexpr bool SIGNED = T(-1) < T(0);
  if (length == 0) return 0;
  const uint32_t last = position + length - 1 < BITS - 1 ? position + length - 1 : BITS - 1;
  const bool sign = SIGNED && (uint64_t(a) >> last & 1);
  T result = 0;
  for (uint32_t i = 0; i < BITS; ++i) {
    const bool bit = i < length && position + i < BITS ? uint64_t(a) >> (position + i) & 1 : sign;
    result = T(uint64_t(result) | uint64_t(bit) << i);
  }
  return result;
}
template <class T>
inline T with_bit_field(T a, T b, uint32_t position, uint32_t length) {
  T mask = length >= sizeof(T) * 8 ? T(-1) : T((T(1) << length) - 1);
  mask = shifted_left(mask, position);
  return T((b & ~mask) | (shifted_left(a, position) & mask));
}
inline uint32_t by_truth_table(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
// Each nibble of `selector` selects one of the eight bytes of b:a; its highest bit replicates the
// byte's sign.
inline uint32_t permuted_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15;
    uint32_t byte = both >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

// ---- floating point

template <class T>
inline bool unordered(T a, T b) {
  return a != a || b != b;
}
inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
// The product is exact in double, and `rest` is what the sum's rounding to double lost.
inline float fused_rounded_down(float a, float b, float c) {
  const double product = double(a) * double(b), sum = product + double(c);
  const double part = sum - product, rest = (product - (sum - part)) + (double(c) - part);
  const float rounded = float(sum);
  const bool above = double(rounded) > sum || (double(rounded) == sum && rest < 0);
  return above ? __builtin_nextafterf(rounded, -__builtin_inff()) : rounded;
}
// .ftz: a subnormal number becomes zero with its sign.
inline float flushed(float a) {
  return __builtin_fabsf(a) < 0x1p-126f ? __builtin_copysignf(0, a) : a;
}
// Only the upper half of the argument is used, and the lower half of the result is zero.
inline double gross_reciprocal(double a) {
  constexpr uint64_t UPPER = 0xffffffff00000000;
  const auto with_normal = [](double x) {
    return __builtin_fabs(x) < 0x1p-1022 ? __builtin_copysign(0., x) : x;
  };
  const double upper = with_normal(bits<double>(bits<uint64_t>(a) & UPPER));
  return with_normal(bits<double>(bits<uint64_t>(1 / upper) & UPPER));
}
inline float square_root(float a) {
  return __builtin_sqrtf(a);
}
inline double square_root(double a) {
  return __builtin_sqrt(a);
}
inline float power_of_2(float a) {
  return __builtin_exp2f(a);
}
inline float log_of_2(float a) {
  return __builtin_log2f(a);
}
inline float magnitude(float a) {
  return __builtin_fabsf(a);
}
inline double magnitude(double a) {
  return __builtin_fabs(a);
}
// -0 is smaller than +0, and a NaN loses against a number.
template <class T>
inline T smaller(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __builtin_signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
inline T larger(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __builtin_signbit(a) ? b : a;
  return a > b ? a : b;
}
// The value of b with the sign of a.
inline float with_sign_of(float a, float b) {
  return __builtin_copysignf(b, a);
}
inline double with_sign_of(double a, double b) {
  return __builtin_copysign(b, a);
}
inline float saturated(float a) {
  return a > 0 ? (a < 1 ? a : 1.f) : 0.f;
}

// ---- conversions

inline float of_bf16(uint16_t x) {
  return bits<float>(uint32_t(x) << 16);
}
inline float of_f16(uint16_t x) {
  return float(bits<_Float16>(x));
}
// To nearest, ties to even; the NaN of a conversion is 0x7fff.
inline uint32_t to_bf16(float f) {
  const uint32_t u = bits<uint32_t>(f);
  return f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline uint32_t to_f16(float f) {
  return f != f ? 0x7fff : uint32_t(bits<uint16_t>(_Float16(f)));
}
// The integral value a, clamped to the range of I; NaN becomes 0.
template <class I, class T>
inline I to_integer(T a) {
  constexpr I MOST = I(-1) < I(0) ? I((uint64_t(1) << (sizeof(I) * 8 - 1)) - 1) : I(-1);
  constexpr I LEAST = I(-1) < I(0) ? I(-MOST - 1) : I(0);
  if (a != a) return 0;
  if (a <= T(LEAST)) return LEAST;
  if (a >= T(MOST)) return MOST;
  return I(a);
}

}  // namespace ptx
