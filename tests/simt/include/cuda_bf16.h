#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {  // to nearest, ties to even; every NaN to one
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
