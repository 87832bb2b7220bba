// mma.sync.m16n8k16 with the fragment layout that PTX documents. Products are exact in fp32. Sums
// are rounded after each addition in ascending k, an order that no GPU guarantees.
#include <cstring>

#include "machine.h"

namespace simt {
namespace {

struct Fragments {
  float* d;
  const uint32_t *a, *b;
  bool half;
};

float number(uint32_t bits, bool half) {
  const uint32_t wide = bits << 16;
  const uint16_t narrow = uint16_t(bits);
  float f;
  std::memcpy(&f, &wide, 4);
  _Float16 h;
  std::memcpy(&h, &narrow, 2);
  return half ? float(h) : f;
}

// The product of a warp: arguments holds the fragments of each lane.
void mma_all(void** arguments, unsigned lanes) {
  if (lanes != ~0u)
    fault_in_kernel("line %d: mma by the lanes %08x of a warp, must be all", current().line, lanes);
  float a[16][16], b[16][8], d[16][8];  // (row, k), (k, column), (row, column)
  for (int l = 0; l < 32; ++l) {
    const Fragments& f = *static_cast<Fragments*>(arguments[l]);
    if (f.half != static_cast<Fragments*>(arguments[0])->half)
      fault_in_kernel("line %d: mma of bf16 with f16", current().line);
    const int g = l / 4, t = l % 4;  // PTX: groupID, threadID_in_group
    for (int half = 0; half < 2; ++half)
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8][t * 2 + r / 2 * 8 + half] = number(f.a[r] >> 16 * half & 0xffff, f.half);
        if (r < 2) b[t * 2 + r * 8 + half][g] = number(f.b[r] >> 16 * half & 0xffff, f.half);
        if (half == 0) d[g + r / 2 * 8][t * 2 + r % 2] = f.d[r];
      }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column)
        d[row][column] += a[row][k] * b[k][column];
  for (int l = 0; l < 32; ++l)
    for (int r = 0; r < 4; ++r)
      static_cast<Fragments*>(arguments[l])->d[r] = d[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2];
}

}  // namespace

void mma(float* d, const uint32_t* a, const uint32_t* b, bool half, int line) {
  Fragments f{d, a, b, half};
  together(~0u, &f, mma_all, line);
}

}  // namespace simt
