// mma of a warp: gathers the fragments of all lanes, multiplies, and spreads the result. Products
// are exact in double, and the sum over k is rounded to fp32 once; no GPU guarantees an order.
#include "memory.h"

namespace ptx {

void mma_of_warp(void** arguments, unsigned lanes) {
  const MmaArguments& first = *static_cast<MmaArguments*>(arguments[0]);
  if (lanes != ~0u) simt::fault_in_kernel("mma by the lanes %08x of a warp, must be all", lanes);
  const MmaLayout& layout = *first.layout;
  double a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    const MmaArguments& lane = *static_cast<MmaArguments*>(arguments[l]);
    if (lane.layout != first.layout || lane.number != first.number)
      simt::fault_in_kernel("the lanes of a warp execute different mma");
    for (int v = 0; v < layout.a; ++v) {
      const int at = layout.of_a[l * layout.a + v];
      a[at / layout.k][at % layout.k] = double(lane.number(lane.a, v));
    }
    for (int v = 0; v < layout.b; ++v) {
      const int at = layout.of_b[l * layout.b + v];
      b[at / 8][at % 8] = double(lane.number(lane.b, v));
    }
    for (int v = 0; v < 4; ++v)
      d[layout.of_d[l * 4 + v] / 8][layout.of_d[l * 4 + v] % 8] = double(lane.d[v]);
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < layout.k; ++k)
      for (int column = 0; column < 8; ++column)
        d[row][column] += a[row][k] * b[k][column];
  for (int l = 0; l < 32; ++l)
    for (int v = 0; v < 4; ++v)
      static_cast<MmaArguments*>(arguments[l])->d[v] =
          float(d[layout.of_d[l * 4 + v] / 8][layout.of_d[l * 4 + v] % 8]);
}

}  // namespace ptx
