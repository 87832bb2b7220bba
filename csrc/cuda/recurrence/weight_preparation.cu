// Prepares the weights before the loop over time: copies them to padded rows, applies weight drop,
// and multiplies the factors of a low rank. Each weight is read and written once per call.
#include "cuda/recurrence/weight_preparation.h"

#include "cuda/recurrence/round.h"
#include "cuda/recurrence/thread_elements.cuh"
#include "cuda/recurrence/workspace.h"

namespace fusedseq::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(THREADS) masked_copy_kernel(const MaskedCopy m) {
  using C = typename Computing<S>::type;
  const int64_t row = own_row();
  const int64_t j = own_column();
  if (j >= m.padded) return;
  Elements<C> v;
  load(static_cast<const S*>(m.from) + row * m.from_stride + j, m.columns - j, v);
  if (m.mask.threshold && m.mask_rows) {
    const bool keep = keep_row(m.mask, m.seed, row);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      v[i] = keep ? v[i] * C(m.mask.scale) : C(0);
  } else {
    drop(m.mask, m.seed, row, j, m.columns, v);
  }
  store(static_cast<S*>(m.to) + row * m.to_stride + j, m.padded - j, v);
}

// The first round with the same pair of factors as round k.
int64_t first_pair(const Recurrence& r, int64_t k) {
  int64_t j = 0;
  while (r.A[j] != r.A[k] || r.F[j] != r.F[k])
    ++j;
  return j;
}

// product: null if only the workspace is to be counted
template <class S>
const char* multiply_out(Recurrence& r, const Product* product, Workspace& w) {
  for (int64_t k = 0; k < r.rounds; ++k) {
    const Round round(r, k);
    if (const int64_t j = first_pair(r, k); j < k) {
      r.Q[k] = r.Q[j];
      continue;
    }
    S* out = w.take<S>(round.out * round.in);
    if (!product) continue;
    r.Q[k] = out;
    const char* error = (*product)(matrix(r.type, r.A[k], round.out, r.rank, r.rank),
                                   matrix(r.type, r.F[k], r.rank, round.in, round.in),
                                   matrix(r.type, out, round.out, round.in, round.in));
    if (error) return error;
  }
  return nullptr;
}

}  // namespace

const char* masked_copy(const MaskedCopy& m, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (const char* error = beyond_grid(m.rows, m.padded)) return error;
  by_type(m.type, [&](auto s) {
    using S = decltype(s);
    masked_copy_kernel<S><<<grid(m.rows, m.padded), THREADS, 0, stream>>>(m);
  });
  return failed_launch("masked_copy_kernel");
}

int64_t multiplied_out_bytes(const Recurrence& r) {
  if (!r.rank) return 0;
  Recurrence copy = r;
  Workspace w{nullptr};
  by_type(r.type, [&](auto s) { multiply_out<decltype(s)>(copy, nullptr, w); });
  return w.used;
}

const char* multiply_out(Recurrence& r, const Product& product, void* workspace) {
  if (!r.rank) return nullptr;
  Workspace w{static_cast<char*>(workspace)};
  return by_type(r.type, [&](auto s) { return multiply_out<decltype(s)>(r, &product, w); });
}

}  // namespace fusedseq::cuda
