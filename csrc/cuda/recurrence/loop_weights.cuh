// The weights of loop.cu as its matrix products read them.
#pragma once
#include "cuda/recurrence/arguments.h"
#include "cuda/recurrence/round.h"
#include "cuda/recurrence/weight_preparation.h"
#include "cuda/recurrence/workspace.h"
#include "math/cells.h"

namespace fusedseq::cuda {

// The weights, with weight drop applied, in padded rows, which matrix products read faster.
template <class S>
struct LoopWeights {
  int64_t ld;             // length of a row of [x | h], or of h alone without rounds
  int64_t h_at;           // where h begins in such a row
  S* gates;               // (G H, ld)
  S* rounds[MAX_ROUNDS];  // (out, in_padded); null if Q has such rows already, or shares a weight

  LoopWeights(const Recurrence& r, Workspace& w)
      : ld(r.rounds ? r.Xp + r.Hp : r.Hp), h_at(r.rounds ? r.Xp : 0) {
    gates = w.take<S>(gates_of(r.cell) * r.H * ld);
    for (int64_t k = 0; k < r.rounds; ++k) {
      const Round round(r, k);
      const bool own = first_use(r.Q, k) == k && round.in != round.in_padded;
      rounds[k] = own ? w.take<S>(round.out * round.in_padded) : nullptr;
    }
  }

  const char* fill(const Recurrence& r, void* stream) const {
    MaskedCopy copy{};
    copy.type = r.type;
    copy.seed = r.seed;
    copy.rows = gates_of(r.cell) * r.H;
    copy.to_stride = ld;
    if (r.rounds) {
      copy.from = r.W_ih;
      copy.to = gates;
      copy.columns = copy.from_stride = r.X;
      copy.padded = r.Xp;
      if (const char* error = masked_copy(copy, stream)) return error;
    }
    copy.from = r.W_hh;
    copy.to = gates + h_at;
    copy.columns = copy.from_stride = r.H;
    copy.padded = r.Hp;
    copy.mask = r.weight;
    copy.mask_rows = r.variational;
    if (const char* error = masked_copy(copy, stream)) return error;

    copy.mask = {};
    for (int64_t k = 0; k < r.rounds; ++k) {
      if (!rounds[k]) continue;
      const Round round(r, k);
      copy.from = r.Q[k];
      copy.to = rounds[k];
      copy.rows = round.out;
      copy.columns = copy.from_stride = round.in;
      copy.padded = copy.to_stride = round.in_padded;
      if (const char* error = masked_copy(copy, stream)) return error;
    }
    return nullptr;
  }

  Matrix of_gates(const Recurrence& r) const {
    return matrix(r.type, gates, gates_of(r.cell) * r.H, ld, ld);
  }
  Matrix of_block(const Recurrence& r, const Block& block) const {
    return matrix(r.type, gates + block.gate * r.H * ld, block.gates * r.H, ld, ld);
  }
  Matrix of_round(const Recurrence& r, int64_t k) const {
    const Round round(r, k);
    const S* own = rounds[first_use(r.Q, k)];
    return matrix(r.type, own ? own : r.Q[k], round.out, round.in_padded, round.in_padded);
  }
};

}  // namespace fusedseq::cuda
