// What both directions of the kernels of persistent_cells.cu have in common: the arithmetic of the
// cells. Cells with as many gates share a kernel, which branches on the cell, the same way in every
// thread, as each cell in a kernel of its own would double the kernels to compile.
#pragma once
#include "cuda/recurrence/persistent_launch.cuh"
#include "cuda/recurrence/persistent_layer_link.cuh"
#include "cuda/recurrence/persistent_masks.cuh"
#include "cuda/recurrence/persistent_products.cuh"
#include "cuda/recurrence/persistent_weights.cuh"
#include "math/cells.h"

namespace fusedseq::cuda {

constexpr int CELL_SLOTS = 4;  // SLOTS as in math/cells.h, of all of these cells

// The cells with GATES gates. TERMS as in math/cells.h, the largest of these cells.
// AnyCell: one of them; the slots of W_hh's gates are the same in all.
// with(r, f): calls f(cell) with the cell of r
template <int GATES>
struct CellsOf;

template <>
struct CellsOf<4> {
  static constexpr int TERMS = PeepholeLstmCell::TERMS;
  using AnyCell = LstmCell<false>;
  template <class F>
  __device__ __forceinline__ static void with(const Recurrence& r, F f) {
    if (r.cell == CellKind::peephole_lstm)
      f(PeepholeLstmCell());
    else if (r.cap_input_gate)
      f(LstmCell<true>());
    else
      f(LstmCell<false>());
  }
};
template <>
struct CellsOf<3> {
  static constexpr int TERMS = GruCell::TERMS;
  using AnyCell = GruCell;
  template <class F>
  __device__ __forceinline__ static void with(const Recurrence&, F f) {
    f(GruCell());
  }
};

// The cell's own parameters of a unit, loaded where a cell reads them.
template <class S>
struct UnitParameters {
  const S* of_unit;  // of V H elements: the first of the unit
  int H;
  __device__ __forceinline__ float operator[](int v) const { return float(of_unit[v * H]); }
};

// Returns the row of W_hh that belongs to gate n % GATES of unit first_unit + n / GATES.
template <int GATES>
__device__ __forceinline__ int64_t row_of_column(int n, int first_unit, int64_t H) {
  return int64_t(n % GATES) * H + first_unit + n / GATES;
}

}  // namespace fusedseq::cuda
