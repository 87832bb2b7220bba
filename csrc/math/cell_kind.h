// The cells of the recurrences, and the sizes that follow from them. Their arithmetic:
// math/cells.h.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

// The cell of a recurrence.
enum class CellKind : int64_t {
  lstm,
  gru,
  rnn_tanh,
  rnn_relu,
  peephole_lstm,
  layer_norm_lstm,
  layer_norm_gru
};
// Whether a cell is a GRU, whose new gate has a bias of each product.
HD bool is_gru(CellKind cell) {
  return cell == CellKind::gru || cell == CellKind::layer_norm_gru;
}
// Whether a cell has the cell state c beside h.
HD bool has_c(CellKind cell) {
  return cell == CellKind::lstm || cell == CellKind::peephole_lstm ||
         cell == CellKind::layer_norm_lstm;
}
// The gates of a cell: W_ih and W_hh have so many rows for each hidden unit.
HD int64_t gates_of(CellKind cell) {
  return has_c(cell) ? 4 : is_gru(cell) ? 3 : 1;
}
// The values that a cell saves for each hidden unit, in the place of its pre-activations. The new
// gate of the GRU has two, one from x and one from h, and so has every gate with layer
// normalization.
HD int64_t slots_of(CellKind cell) {
  if (cell == CellKind::layer_norm_lstm || cell == CellKind::layer_norm_gru)
    return 2 * gates_of(cell);
  return cell == CellKind::gru ? 4 : gates_of(cell);
}
// The biases of a cell for each hidden unit.
HD int64_t biases_of(CellKind cell) {
  return is_gru(cell) ? 4 : gates_of(cell);
}
// The elements of a cell's own parameter vector for each hidden unit: the peepholes of i, f and o;
// or gamma_ih and gamma_hh of every gate, and of an LSTM gamma_c and beta_c.
HD int64_t vectors_of(CellKind cell) {
  return cell == CellKind::peephole_lstm     ? 3
         : cell == CellKind::layer_norm_lstm ? 10
         : cell == CellKind::layer_norm_gru  ? 6
                                             : 0;
}
// The statistics that a cell saves for each row of the batch and step: of layer normalization, the
// reciprocal standard deviations of both products, then of an LSTM the mean and that of c.
HD int64_t statistics_of(CellKind cell) {
  return cell == CellKind::layer_norm_lstm ? 4 : cell == CellKind::layer_norm_gru ? 2 : 0;
}

}  // namespace fusedseq
