// Matrix products for few rows and weights that are packed once and used at every time step, and the transposed
// product of the weight gradients. One thread computes a range of columns; nothing here knows of other threads, and a
// result does not depend on how the columns are split.
//
// Measured (2 cores of a Zen 5 EPYC, AVX-512, 70 or 20 rows, 1300 x 2600): 510 GFLOP/s, where MKL's packed GEMM does
// 125 and 80, and its GEMM of 2048^3, which takes its AVX2 path there, 188.
#pragma once
#include "vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The register tile, MR rows by NV vectors: 24 accumulators of 32 registers, or 12 of 16.
constexpr int MR = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int NV = 4;
#else
constexpr int NV = 2;
#endif
template <class T> constexpr int64_t PANEL = NV * LANES<T>;  // columns

template <class T> HD int64_t round_up(int64_t n) { return (n + LANES<T> - 1) / LANES<T> * LANES<T>; }

// Elements that `columns` packed columns of K rows take.
template <class T> HD int64_t packed_size(int64_t K, int64_t columns) { return K * round_up<T>(columns); }

// Rows a_i of a square of LANES x LANES elements become its columns: log2(LANES) times, row 2i is the first and row
// 2i + 1 the second half of rows i and i + LANES/2 interleaved.
template <class T> HD void transpose(Vec<T> (&a)[LANES<T>]) {
  constexpr int L = LANES<T>;
  static constexpr Lanes<T> lows([](int i) { return i / 2 + i % 2 * L; }), highs([](int i) { return i / 2 + i % 2 * L + L / 2; });
  const typename Vec<T>::Mask low = lows, high = highs;
  for (int stage = 1; stage < L; stage *= 2) {
    Vec<T> b[L];
#pragma GCC unroll 8
    for (int i = 0; i < L / 2; ++i) {
      b[2 * i].v = __builtin_shuffle(a[i].v, a[i + L / 2].v, low);
      b[2 * i + 1].v = __builtin_shuffle(a[i].v, a[i + L / 2].v, high);
    }
    for (int i = 0; i < L; ++i) a[i] = b[i];
  }
}

// Lane i of horizontal_sums(a) is the sum of the lanes of a[i]: `transpose`, with the pairs that it would make added at
// once. This is the sum that stands in place i after the stages down to N vectors.
template <int N, class T> HD Vec<T> pairwise_sums(const Vec<T> (&a)[LANES<T>], int i) {
  constexpr int L = LANES<T>;
  if constexpr (N == L) return a[i];
  else {
    static constexpr Lanes<T> low([](int i) { return i / 2 + i % 2 * L; }), high([](int i) { return i / 2 + i % 2 * L + L / 2; });
    const Vec<T> x = pairwise_sums<2 * N>(a, i), y = pairwise_sums<2 * N>(a, i + N);
    return Vec<T>(__builtin_shuffle(x.v, y.v, typename Vec<T>::Mask(low))) + Vec<T>(__builtin_shuffle(x.v, y.v, typename Vec<T>::Mask(high)));
  }
}
template <class T> HD Vec<T> horizontal_sums(const Vec<T> (&a)[LANES<T>]) { return pairwise_sums<1>(a, 0); }

// Packs B (K, columns), element (k, n) at B[k * sk + n * sn] with one of the strides 1, into panels of PANEL columns, the
// last one narrower: dst is (panels)(K, panel's columns), zero-padded to whole vectors.
template <class T>
void pack(const T* B, int64_t sk, int64_t sn, int64_t K, int64_t columns, T* dst) {
  constexpr int L = LANES<T>;
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<T>) {
    const int64_t width = columns - n0 < PANEL<T> ? columns - n0 : PANEL<T>, padded = round_up<T>(width);
    if (sn == 1)
      for (int64_t k = 0; k < K; ++k)
        for (int64_t j = 0; j < padded; j += L) Vec<T>::load(B + k * sk + n0 + j, width - j).store(dst + k * padded + j);
    for (int64_t j = 0; j < padded && sn != 1; j += L) {
      const int64_t n = width - j < L ? width - j : L;
      const T* column = B + (n0 + j) * sn;
      for (int64_t k = 0; k < K; k += L) {
        const int64_t rows = K - k < L ? K - k : L;
        Vec<T> square[L];
        for (int i = 0; i < n; ++i) __builtin_prefetch(column + i * sn + k + 4 * L);
        for (int i = 0; i < L; ++i) square[i] = i < n ? Vec<T>::load(column + i * sn + k, rows) : Vec<T>(T(0));
        transpose(square);
        for (int64_t i = 0; i < rows; ++i) square[i].store(dst + (k + i) * padded + j);
      }
    }
    dst += K * padded;
  }
}

// What a tile fetches into the second cache while it multiplies: a line for each k, `step` elements apart.
template <class T> struct Ahead {
  const T* first = nullptr;
  int64_t step = 0;
};

// C (M, nv vectors) (+)= A (M, K) times a panel of nv vectors; A's element (m, k) at A[m * sm + k * sk]. A packed panel's
// rows follow each other; others are ldb apart.
template <int M, int nv, bool AHEAD, class T>
void tile(int64_t K, const T* A, int64_t sm, int64_t sk, const T* panel, T* C, int64_t ldc, bool accumulate, int64_t ldb,
          Ahead<T> ahead) {
  // Few rows would wait on the latency of one chain of additions: then even and odd k have their own.
  constexpr int CHAINS = M * nv < 8 ? 2 : 1;
  Vec<T> c[CHAINS][M][nv];
#pragma GCC unroll 2
  for (int u = 0; u < CHAINS; ++u)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < nv; ++n) c[u][m][n] = Vec<T>(T(0));
  if (accumulate)
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < nv; ++n) __builtin_prefetch(C + m * ldc + n * LANES<T>, 1);
  int64_t k = 0;
  for (; k + CHAINS <= K; k += CHAINS) {
#pragma GCC unroll 2
    for (int u = 0; u < CHAINS; ++u) {
      if constexpr (AHEAD) __builtin_prefetch(ahead.first + (k + u) * ahead.step, 0, 2);
      Vec<T> b[nv];
#pragma GCC unroll 4
      for (int n = 0; n < nv; ++n) b[n] = Vec<T>::load(panel + (k + u) * ldb + n * LANES<T>);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec<T> a(A[m * sm + (k + u) * sk]);
#pragma GCC unroll 4
        for (int n = 0; n < nv; ++n) c[u][m][n] = c[u][m][n] + a * b[n];
      }
    }
  }
  if (k < K)
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < nv; ++n)
        c[0][m][n] = c[0][m][n] + Vec<T>(A[m * sm + k * sk]) * Vec<T>::load(panel + k * ldb + n * LANES<T>);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < nv; ++n) {
      Vec<T> r = c[0][m][n];
      if constexpr (CHAINS == 2) r = r + c[1][m][n];
      T* out = C + m * ldc + n * LANES<T>;
      if (accumulate) r = r + Vec<T>::load(out);
      r.store(out);
    }
}

template <int nv, bool AHEAD = false, class T>
void tile_rows(int M, int64_t K, const T* A, int64_t sm, int64_t sk, const T* panel, T* C, int64_t ldc, bool acc,
               int64_t ldb = nv * LANES<T>, Ahead<T> ahead = {}) {
  switch (M) {
    case 1: return tile<1, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
    case 2: return tile<2, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
    case 3: return tile<3, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
    case 4: return tile<4, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
    case 5: return tile<5, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
    default: return tile<6, nv, AHEAD>(K, A, sm, sk, panel, C, ldc, acc, ldb, ahead);
  }
}

// One tile of any size; where C has not whole vectors, by way of a buffer.
template <class T, bool AHEAD = false>
void any_tile(int M, int64_t width, int64_t K, const T* A, int64_t sm, int64_t sk, const T* panel, T* C, int64_t ldc,
              bool whole_vectors, bool accumulate, Ahead<T> ahead = {}) {
  T buffer[MR * PANEL<T>];
  const int64_t padded = round_up<T>(width);
  const bool direct = whole_vectors || padded == width;
  T* out = direct ? C : buffer;
  const int64_t ldo = direct ? ldc : padded;
  const bool acc = direct && accumulate;
  switch (padded / LANES<T>) {
    case 1: tile_rows<1, AHEAD>(M, K, A, sm, sk, panel, out, ldo, acc, LANES<T>, ahead); break;
    case 2: tile_rows<2, AHEAD>(M, K, A, sm, sk, panel, out, ldo, acc, 2 * LANES<T>, ahead); break;
    case 3: tile_rows<NV < 3 ? NV : 3, AHEAD>(M, K, A, sm, sk, panel, out, ldo, acc, (NV < 3 ? NV : 3) * LANES<T>, ahead); break;
    default:
      if (ahead.step) tile_rows<NV, true>(M, K, A, sm, sk, panel, out, ldo, acc, NV * LANES<T>, ahead);
      else tile_rows<NV>(M, K, A, sm, sk, panel, out, ldo, acc);
  }
  if (direct) return;
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < width; ++n)
      C[m * ldc + n] = buffer[m * padded + n] + (accumulate ? C[m * ldc + n] : T(0));
}

// C (M, N) (+)= A (M, K) B (K, N) with nothing packed, for small matrices, and for few rows, where packing B takes about as long
// as the product: N and the row lengths ldb, ldc are whole vectors.
template <class T>
void product(int64_t M, int64_t K, const T* A, int64_t sm, int64_t sk, const T* B, int64_t ldb, int64_t N, T* C,
             int64_t ldc, bool accumulate) {
  constexpr int64_t DEPTH = 128;  // of B, whose panel stays in the first cache while the rows pass
  const int64_t blocks = (M + MR - 1) / MR;
  for (int64_t m = 0; K == 0 && !accumulate && m < M; ++m) memset(C + m * ldc, 0, N * sizeof(T));
  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
    const bool acc = accumulate || k0 > 0;
    for (int64_t n = 0; n < N; n += PANEL<T>) {
      const int64_t vectors = (N - n < PANEL<T> ? N - n : PANEL<T>) / LANES<T>;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t m = M * i / blocks;
        const int rows = int(M * (i + 1) / blocks - m);
        const T *a = A + m * sm + k0 * sk, *b = B + k0 * ldb + n;
        T* c = C + m * ldc + n;
        switch (vectors) {
          case 1: tile_rows<1>(rows, depth, a, sm, sk, b, c, ldc, acc, ldb); break;
          case 2: tile_rows<2>(rows, depth, a, sm, sk, b, c, ldc, acc, ldb); break;
          case 3: tile_rows<NV < 3 ? NV : 3>(rows, depth, a, sm, sk, b, c, ldc, acc, ldb); break;
          default:  // of the panel to come, each block of rows fetches a vector's column
            tile_rows<NV, true>(rows, depth, a, sm, sk, b, c, ldc, acc, ldb,
                                {b + (n + PANEL<T> < N ? PANEL<T> : depth * ldb - n) + i % NV * LANES<T>, ldb});
        }
      }
    }
  }
}

constexpr int64_t CHUNK = 24 * MR;  // rows of A that stay in the second cache while the panels of B pass

// C (M, columns) (+)= A (M, K) times packed columns, + bias. `whole_vectors`: C's rows may be written up to a whole vector.
// next: K x PANEL elements that are fetched meanwhile, where there are no more columns and rows than a panel and a chunk
template <class T>
void gemm(int64_t M, int64_t K, const T* A, int64_t lda, const T* packed, int64_t columns, T* C, int64_t ldc,
          bool whole_vectors, bool accumulate, const T* bias = nullptr, const T* next = nullptr) {
  constexpr int64_t DEPTH = 3072 / sizeof(T);  // of a panel, which stays there while the rows pass
  for (int64_t m0 = 0; m0 < M; m0 += CHUNK) {
    const int64_t rows = M - m0 < CHUNK ? M - m0 : CHUNK, blocks = (rows + MR - 1) / MR;
    for (int64_t n0 = 0; n0 < columns; n0 += PANEL<T>) {
      const int64_t width = columns - n0 < PANEL<T> ? columns - n0 : PANEL<T>, padded = round_up<T>(width);
      for (int64_t m = m0; bias && m < m0 + rows; ++m) memcpy(C + m * ldc + n0, bias + n0, width * sizeof(T));
      for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
        const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t m = m0 + rows * i / blocks, n = m0 + rows * (i + 1) / blocks;
          const Ahead<T> ahead = next ? Ahead<T>{next + (k0 + depth * i / blocks) * PANEL<T>, (PANEL<T> + blocks - 1) / blocks} : Ahead<T>{};
          any_tile(int(n - m), width, depth, A + m * lda + k0, lda, 1, packed + K * n0 + k0 * padded, C + m * ldc + n0, ldc,
                   whole_vectors, accumulate || bias || k0 > 0, ahead);
        }
      }
    }
  }
}

// C rows [r0, r1) of A^T B (+= C): A (K, .), whose column for row r of C is A[k * lda + r], B (K, columns).
// `scratch` holds TRANSPOSED_SCRATCH elements.
constexpr int64_t KC = 256, NC_PANELS = 12, A_TILES = 8;
template <class T> constexpr int64_t TRANSPOSED_SCRATCH = KC * (NC_PANELS * PANEL<T> + A_TILES * MR);
template <class T>
void gemm_transposed(int64_t K, const T* A, int64_t lda, int64_t r0, int64_t r1, const T* B, int64_t ldb,
                     int64_t columns, T* C, int64_t ldc, bool accumulate, T* scratch) {
  const int64_t panels = (columns + PANEL<T> - 1) / PANEL<T>, blocks = (panels + NC_PANELS - 1) / NC_PANELS;
  T *B_block = scratch, *A_tiles = scratch + KC * NC_PANELS * PANEL<T>;
  for (int64_t k0 = 0; k0 < K || k0 == 0; k0 += KC) {
    const int64_t kc = K - k0 < KC ? K - k0 : KC;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t n0 = panels * block / blocks * PANEL<T>, n1 = panels * (block + 1) / blocks * PANEL<T>;
      const int64_t nc = (n1 < columns ? n1 : columns) - n0;
      pack(B + k0 * ldb + n0, ldb, 1, kc, nc, B_block);
      for (int64_t r = r0; r < r1; r += A_TILES * MR) {
        // Some tiles of A at once, so that a cache line of a row is read once.
        const int64_t rows = r1 - r < A_TILES * MR ? r1 - r : A_TILES * MR;
        for (int64_t k = 0; k < kc; ++k) {
          const T* row = A + (k0 + k) * lda + r;
          int64_t i = 0;
          for (; i + MR <= rows; i += MR) memcpy(A_tiles + i * kc + k * MR, row + i, MR * sizeof(T));
          for (int64_t m = 0; i + m < rows; ++m) A_tiles[i * kc + k * MR + m] = row[i + m];
        }
        for (int64_t i = 0; i < rows; i += MR)
          for (int64_t j = 0; j < nc; j += PANEL<T>)
            any_tile(int(rows - i < MR ? rows - i : MR), nc - j < PANEL<T> ? nc - j : PANEL<T>, kc, A_tiles + i * kc, 1, MR,
                     B_block + kc * j, C + (r + i) * ldc + n0 + j, ldc, false, accumulate || k0 > 0);
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
