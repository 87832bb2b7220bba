#pragma once
#include <cstring>

struct __half {
  _Float16 value;
  __half() = default;
  __half(float f) : value(_Float16(f)) {}
  operator float() const { return float(value); }
};

inline __half __float2half(float f) {
  return f;
}
inline __half __float2half_rn(float f) {
  return f;
}
inline float __half2float(__half x) {
  return x;
}
inline unsigned short __half_as_ushort(__half x) {
  unsigned short bits;
  std::memcpy(&bits, &x, 2);
  return bits;
}
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  std::memcpy(&x, &bits, 2);
  return x;
}
