#pragma once

struct __half {
  _Float16 value;
  __half() = default;
  __half(float f) : value(_Float16(f)) {}
  operator float() const { return float(value); }
};
