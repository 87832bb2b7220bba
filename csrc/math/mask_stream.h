// The streams of random masks. All masks of an operator have one Philox key, the operator's seed;
// each has its own stream, a word of the Philox counter (math/philox.h). So no two masks of an
// operator come from the same pair of key and counter, whatever their seeds are. The oracle has the
// same table, in pyext/fusedseq/reference/dropout_mask.py.
#pragma once
#include <cstdint>

namespace fusedseq {

enum class MaskStream : uint32_t {
  single = 0,      // the mask of an operator that has one mask
  input = single,  // of a recurrence's x, by the operator dropout or locked_dropout
  state = 1,       // of a recurrence's h
  zoneout_h = 2,
  zoneout_c = 3,
  weight = 4,  // weight drop of a recurrence's W_hh
};

}  // namespace fusedseq
