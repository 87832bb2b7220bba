// The operators without a recurrence: dropouts, embedding, activation regularization. Each goes over its memory once;
// masks are made on the way and never stored.
//
// What limits them: memory, and Philox, at about a third of a nanosecond an element and core with AVX-512.
#pragma once
#include "team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class F> void parallel(cpu::Parallel run, int64_t n, F body) {
  run(n, [](void* f, int64_t begin, int64_t end) { (*static_cast<F*>(f))(begin, end); }, &body);
}

inline void keep_mask(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end, uint8_t* keep) {
  mask_values<uint8_t>(mask, row, S, begin, end, 1, 0, keep);
}

template <class S> HD void store_scalar(S* p, typename Compute<S>::type x) { *p = x; }
HD void store_scalar(bfloat16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = uint16_t(x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40);
}
template <class S> HD typename Compute<S>::type load_scalar(const S* p) { return *p; }
HD float load_scalar(const bfloat16* p) {
  const uint32_t u = uint32_t(p->bits) << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// y = kept ? x * scale : 0 for n elements whose mask is `keep`; a select, so that an infinity is dropped too.
template <class S, class O>
HD void drop(const S* x, O* y, const uint32_t* keep, int64_t n, typename Compute<S>::type scale) {
  using C = typename Compute<S>::type;
  int64_t i = 0;
  if constexpr (sizeof(C) == 4)
    for (; i + WORDS <= n; i += WORDS) {
      Word k;
      memcpy(&k, keep + i, sizeof k);
      const Vec<float> v = load_as(x + i) * Vec<float>(scale);
      store_as(y + i, Vec<float>(Vec<float>::Raw(Word(v.v) & k)));
    }
  for (; i < n; ++i) store_scalar(y + i, keep[i] ? load_scalar(x + i) * scale : C(0));
}

constexpr int64_t DROPOUT_SEGMENT = 4096;  // of a row: a unit of work

template <class S> void dropout_row(const cpu::Dropout& d, int64_t b, int64_t begin, int64_t end) {
  const S* x = static_cast<const S*>(d.x) + b * d.D;
  S* const wanted = static_cast<S*>(d.y) + b * d.D;
  const bool past = past_caches<S>(d.B * d.D);
  alignas(64) S staged[DROPOUT_SEGMENT];
  S* y = past ? staged - begin : wanted;
  const auto scale = typename Compute<S>::type(d.mask.scale);
  each_mask_block(d.mask, b, d.D, begin, end, [&](int64_t j, const Word* keep, auto vectors) {
    const int64_t n = end - j < vectors * WORDS ? end - j : vectors * WORDS;
    drop(x + j, y + j, reinterpret_cast<const uint32_t*>(keep), n, scale);
  });
  if (past) stream_row((const S*)staged, wanted + begin, end - begin);
}

template <class S> void dropout_type(const cpu::Dropout& d, cpu::Parallel run) {
  if (d.T > 1) {  // one mask for all steps: made once, then the steps stream by in order
    Buffer<uint32_t> keep(d.B * d.D);
    parallel(run, d.B, [&](int64_t b0, int64_t b1) {
      for (int64_t b = b0; b < b1; ++b) mask_values<uint32_t>(d.mask, b, d.D, 0, d.D, ~0u, 0u, keep + b * d.D);
    });
    const int64_t n = d.B * d.D;
    parallel(run, d.T, [&](int64_t t0, int64_t t1) {
      for (int64_t t = t0; t < t1; ++t)
        drop(static_cast<const S*>(d.x) + t * n, static_cast<S*>(d.y) + t * n, (const uint32_t*)keep, n,
             typename Compute<S>::type(d.mask.scale));
    });
    return;
  }
  const int64_t segments = (d.D + DROPOUT_SEGMENT - 1) / DROPOUT_SEGMENT;
  parallel(run, d.B * segments, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t j = i % segments * DROPOUT_SEGMENT;
      dropout_row<S>(d, i / segments, j, j + DROPOUT_SEGMENT < d.D ? j + DROPOUT_SEGMENT : d.D);
    }
    stream_fence();
  });
}

inline void dropout(const cpu::Dropout& d, cpu::Parallel run, int) {
  switch (d.type) {
    case cpu::Type::f32: return dropout_type<float>(d, run);
    case cpu::Type::f64: return dropout_type<double>(d, run);
    case cpu::Type::bf16: return dropout_type<bfloat16>(d, run);
  }
}

// Which rows of the table are kept: made for the whole vocabulary by vectors where that costs less than a block of Philox
// for each token, which is up to some 20 words a token.
class KeptRows {
 public:
  explicit KeptRows(const cpu::Embedding& e) : e(e), table(e.masked && !e.keys && e.V <= 20 * e.N ? e.V : 0) {
    if (table) mask_values<uint8_t>(e.mask, 0, e.V, 0, e.V, 1, 0, table);
  }
  HD bool operator()(int64_t row) const {
    if (!e.masked) return true;
    if (table) return table[row];
    const int64_t key = e.keys ? e.keys[row] : row;
    return philox_word(e.mask.seed, uint64_t(key / 4), int(key % 4)) >= e.mask.threshold;
  }

 private:
  const cpu::Embedding& e;
  Buffer<uint8_t> table;
};

template <class S> void scale_row(const S* x, S* y, int64_t n, double scale) {
  using C = typename Compute<S>::type;
  constexpr int64_t step = VECTOR_BYTES / sizeof(C);
  int64_t i = 0;
  for (; i + step <= n; i += step) store_as(y + i, load_as(x + i) * Vec<C>(C(scale)));
  for (; i < n; ++i) store_scalar(y + i, load_scalar(x + i) * C(scale));
}

// out = x * scale, out += x * scale, in the computing type.
template <class S, class C> void scale_row_as(const S* x, C* out, int64_t n, C scale) {
  int64_t i = 0;
  for (; i + LANES<C> <= n; i += LANES<C>) (load_as(x + i) * Vec<C>(scale)).store(out + i);
  for (; i < n; ++i) out[i] = load_scalar(x + i) * scale;
}
template <class S, class C> void add_row(const S* x, C* out, int64_t n, C scale) {
  int64_t i = 0;
  for (; i + LANES<C> <= n; i += LANES<C>) (Vec<C>::load(out + i) + load_as(x + i) * Vec<C>(scale)).store(out + i);
  for (; i < n; ++i) out[i] += load_scalar(x + i) * scale;
}

// Rows stand anywhere: without this, each would begin with the latency of memory.
constexpr int64_t AHEAD = 2;  // rows
HD void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

template <class S> void embedding_type(const cpu::Embedding& e, cpu::Parallel run) {
  const S* W = static_cast<const S*>(e.W);
  S* y = static_cast<S*>(e.y);
  const KeptRows kept(e);
  parallel(run, e.N, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = e.ids ? e.ids[n] : n;
      if (e.ids && n + AHEAD < end) prefetch_row(W + e.ids[n + AHEAD] * e.E, e.E * sizeof(S));
      if (!kept(row)) memset(static_cast<void*>(y + n * e.E), 0, e.E * sizeof(S));
      else if (!e.masked) memcpy(static_cast<void*>(y + n * e.E), W + row * e.E, e.E * sizeof(S));
      else scale_row(W + row * e.E, y + n * e.E, e.E, e.mask.scale);
    }
  });
}

inline void embedding(const cpu::Embedding& e, cpu::Parallel run, int) {
  switch (e.type) {
    case cpu::Type::f32: return embedding_type<float>(e, run);
    case cpu::Type::f64: return embedding_type<double>(e, run);
    case cpu::Type::bf16: return embedding_type<bfloat16>(e, run);
  }
}

// Zeros past the caches, which the writer of a large table does not read again.
inline void fill_zeros(char* p, int64_t bytes) {
#ifdef __SSE2__
  char* const aligned = p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
  if (p + bytes >= aligned + 64) {
    memset(p, 0, aligned - p);
    char* q = aligned;
    for (; q + 64 <= p + bytes; q += 64)
      for (int i = 0; i < 64; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(q + i), _mm_setzero_si128());
    memset(q, 0, p + bytes - q);
    return;
  }
#endif
  memset(p, 0, bytes);
}

// The gradient of the table, in the computing type (float for bfloat16): each row is written once, the sum of its tokens
// in their order, by one thread, or zeros. The sum does not depend on the number of threads.
template <class S> void embedding_backward_type(const cpu::Embedding& e, const S* dy, void* out, bool zeroed, cpu::Parallel run, int threads) {
  using C = typename Compute<S>::type;
  C* dW = static_cast<C*>(out);
  // The tokens sorted by row: those of row v are order[start[v]] to order[start[v + 1] - 1].
  Buffer<int64_t> start(e.V + 2), order(e.N);
  memset(start, 0, (e.V + 2) * sizeof(int64_t));
  const KeptRows kept(e);
  for (int64_t n = 0; n < e.N; ++n) start[e.ids[n] + 2] += kept(e.ids[n]);
  for (int64_t v = 0; v < e.V; ++v) start[v + 2] += start[v + 1];
  for (int64_t n = 0; n < e.N; ++n)
    if (kept(e.ids[n])) order[start[e.ids[n] + 1]++] = n;

  const C scale = e.masked ? C(e.mask.scale) : C(1);
  const int64_t empty_row = zeroed ? 0 : 1, work = e.V * empty_row + start[e.V];
  // The first row whose work, and that of those before it, reaches a share.
  const auto row_at = [&](int64_t share) {
    int64_t low = 0, high = e.V;
    while (low < high) {
      const int64_t v = (low + high) / 2;
      v * empty_row + start[v] < share ? low = v + 1 : high = v;
    }
    return low;
  };
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const int64_t first = begin ? row_at(work * begin / threads) : 0, last = end < threads ? row_at(work * end / threads) : e.V;
    for (int64_t v = first; v < last;) {
      int64_t next = v + 1;
      C* row = dW + v * e.E;
      if (start[v] == start[v + 1]) {
        while (next < last && start[next] == start[next + 1]) ++next;
        if (!zeroed) fill_zeros(reinterpret_cast<char*>(row), (next - v) * e.E * sizeof(C));
      } else {
        for (int64_t i = start[v]; i < start[v + 1]; ++i) {
          if (i + AHEAD < start[last]) prefetch_row(dy + order[i + AHEAD] * e.E, e.E * sizeof(S));
          i == start[v] ? scale_row_as(dy + order[i] * e.E, row, e.E, scale) : add_row(dy + order[i] * e.E, row, e.E, scale);
        }
      }
      v = next;
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
  });
}

inline void embedding_backward(const cpu::Embedding& e, const void* dy, void* dW, bool zeroed, cpu::Parallel run, int threads) {
  switch (e.type) {
    case cpu::Type::f32: return embedding_backward_type(e, static_cast<const float*>(dy), dW, zeroed, run, threads);
    case cpu::Type::f64: return embedding_backward_type(e, static_cast<const double*>(dy), dW, zeroed, run, threads);
    case cpu::Type::bf16: return embedding_backward_type(e, static_cast<const bfloat16*>(dy), dW, zeroed, run, threads);
  }
}

// Blocks of fixed size, summed in double precision in order: the same result for any number of threads.
constexpr int64_t AR_BLOCK = 8192;

template <class S> HD Vec<typename Compute<S>::type> load_up_to(const S* p, int64_t n) {
  using C = typename Compute<S>::type;
  if (n >= LANES<C>) return load_as(p);
  C buffer[LANES<C>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = load_scalar(p + i);
  return Vec<C>::load(buffer);
}
template <class S> HD void store_up_to(S* p, Vec<typename Compute<S>::type> x, int64_t n) {
  using C = typename Compute<S>::type;
  if (n >= LANES<C>) return store_as(p, x);
  C buffer[LANES<C>];
  x.store(buffer);
  for (int64_t i = 0; i < n; ++i) store_scalar(p + i, buffer[i]);
}

template <class S> double activation_regularization_type(const cpu::ActivationRegularization& a, cpu::Parallel run) {
  using C = typename Compute<S>::type;
  const int64_t total = a.T * a.N, blocks = (total + AR_BLOCK - 1) / AR_BLOCK;
  const S *dropped = static_cast<const S*>(a.dropped), *raw = static_cast<const S*>(a.raw);
  Buffer<double> sums(2 * blocks);
  parallel(run, blocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t i0 = block * AR_BLOCK, i1 = i0 + AR_BLOCK < total ? i0 + AR_BLOCK : total;
      Vec<C> ar(C(0)), tar(C(0));
      for (int64_t i = i0; i < i1; i += LANES<C>) {
        const Vec<C> d = load_up_to(dropped + i, i1 - i);
        ar = ar + d * d;
        const int64_t n = (i1 < total - a.N ? i1 : total - a.N) - i;  // elements that have a next step
        if (n > 0) {
          const Vec<C> step = load_up_to(raw + i + a.N, n) - load_up_to(raw + i, n);
          tar = tar + step * step;
        }
      }
      double s_ar = 0, s_tar = 0;
      for (int i = 0; i < LANES<C>; ++i) s_ar += ar.v[i], s_tar += tar.v[i];
      sums[2 * block] = s_ar, sums[2 * block + 1] = s_tar;
    }
  });
  double ar = 0, tar = 0;
  for (int64_t block = 0; block < blocks; ++block) ar += sums[2 * block], tar += sums[2 * block + 1];
  return a.alpha * ar + (a.T > 1 ? a.beta * tar : 0.);
}

inline double activation_regularization(const cpu::ActivationRegularization& a, cpu::Parallel run, int) {
  switch (a.type) {
    case cpu::Type::f32: return activation_regularization_type<float>(a, run);
    case cpu::Type::f64: return activation_regularization_type<double>(a, run);
    default: return activation_regularization_type<bfloat16>(a, run);
  }
}

template <class S>
void activation_regularization_backward_type(const cpu::ActivationRegularization& a, double dloss, cpu::Parallel run) {
  using C = typename Compute<S>::type;
  const int64_t total = a.T * a.N, blocks = (total + AR_BLOCK - 1) / AR_BLOCK;
  const S *dropped = static_cast<const S*>(a.dropped), *raw = static_cast<const S*>(a.raw);
  S *ddropped = static_cast<S*>(a.ddropped), *draw = static_cast<S*>(a.draw);
  const Vec<C> ar(C(2 * a.alpha * dloss)), tar(C(2 * a.beta * dloss));
  parallel(run, blocks, [&](int64_t begin, int64_t end) {
    const int64_t i1 = end * AR_BLOCK < total ? end * AR_BLOCK : total;
    for (int64_t i = begin * AR_BLOCK; i < i1;) {
      // A stretch that lies in one step, so that its neighbours in time are there for all of it or for none.
      const int64_t step_end = (i / a.N + 1) * a.N, stop = step_end < i1 ? step_end : i1;
      const bool before = i >= a.N, after = i < total - a.N;
      for (; i < stop; i += LANES<C>) {
        const int64_t n = stop - i;
        store_up_to<S>(ddropped + i, ar * load_up_to(dropped + i, n), n);
        const Vec<C> x = load_up_to(raw + i, n);
        Vec<C> d(C(0));
        if (before) d = d + (x - load_up_to(raw + i - a.N, n));
        if (after) d = d - (load_up_to(raw + i + a.N, n) - x);
        store_up_to<S>(draw + i, tar * d, n);
      }
      i = stop;
    }
  });
}

inline void activation_regularization_backward(const cpu::ActivationRegularization& a, double dloss, cpu::Parallel run, int) {
  switch (a.type) {
    case cpu::Type::f32: return activation_regularization_backward_type<float>(a, dloss, run);
    case cpu::Type::f64: return activation_regularization_backward_type<double>(a, dloss, run);
    case cpu::Type::bf16: return activation_regularization_backward_type<bfloat16>(a, dloss, run);
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
