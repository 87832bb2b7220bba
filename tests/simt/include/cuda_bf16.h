#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {  // rounds to nearest, ties to even; every NaN becomes 0x7fff
    uint32_t u;
    std::memcpy(&u, &f, 4);
    bits = f != f ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};

inline __nv_bfloat16 __float2bfloat16(float f) {
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return f;
}
inline float __bfloat162float(__nv_bfloat16 x) {
  return x;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 x;
  x.bits = bits;
  return x;
}

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {x, y};
}
