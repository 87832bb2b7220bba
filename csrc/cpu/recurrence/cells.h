// The parameters of a cell (math/cells.h) as vectors of hidden units.
#pragma once
#include "cpu/recurrence/layer_norm_gru_row.h"
#include "cpu/recurrence/layer_norm_lstm_row.h"
#include "cpu/recurrence/sizes.h"
#include "math/cells.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The cell's own parameters (vectors, H) for the hidden units from j on.
template <class Real>
struct VectorsAt {
  const Real* p;
  int64_t H, j;
  HD Vec<Real> operator[](int v) const { return Vec<Real>::load(p + v * H + j, H - j); }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
