// The register tile of all matrix products: up to TILE_ROWS rows times TILE_VECTORS vectors of C,
// accumulated in registers over the whole depth K.
//
// K counts elements: pairs of numbers, if Element is bf16_pair (simd/bf16_pair.h).
#pragma once
#include "cpu/gemm/operands.h"
#include "cpu/gemm/tile_registers.h"
#include "cpu/simd/bf16_pair.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The tile's rows and vectors: 24 accumulators where there are 32 vector registers, 12 where there
// are 16.
template <class Element>
constexpr int TILE_ROWS = IN_TILE_REGISTERS<Element> ? 32 : 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_VECTORS = 2;
#endif
// The columns of a panel, which is as wide as a tile.
template <class T>
constexpr int64_t PANEL_COLUMNS = (IN_TILE_REGISTERS<T> ? 2 : TILE_VECTORS) * LANES<T>;

// Software prefetch into the L2 cache while a tile is computed: one cache line for each k, at
// first + k * step.
template <class T>
struct Prefetch {
  const T* first = nullptr;
  int64_t step = 0;  // elements; 0 means no prefetch
};

// What a product's caller may split among threads: columns of C or rows of C. A result must not
// depend on such a split, and therefore neither may the order in which a tile adds.
enum class Split { columns, rows };

// The chains of additions for each element of a tile of ROWS rows and VECTORS vectors: with two,
// the even and the odd k have accumulators of their own, because a tile of few accumulators would
// wait for the latency of its additions. The number follows only the side of the tile that the
// split leaves alone: a split of the columns changes VECTORS, and a split of the rows changes ROWS.
// Both choices need at most as many accumulators as a full tile.
template <int ROWS, int VECTORS, Split SPLIT>
constexpr int CHAINS =
    (SPLIT == Split::columns ? 2 * ROWS <= TILE_ROWS<float> : 2 * VECTORS <= TILE_VECTORS) ? 2 : 1;

// A vector of elements, from elements or from numbers of another type in memory.
template <class Element, class Stored>
HD Vec<Element> load_elements(const Stored* p) {
  if constexpr (std::is_same<Element, Stored>::value)
    return Vec<Element>::load(p);
  else
    return load_as(p);
}

// C (ROWS, VECTORS vectors) (+)= A (ROWS, K) B (K, VECTORS vectors).
template <int ROWS, int VECTORS, Split SPLIT, bool PREFETCH, class Element, class StoredB = Element,
          class StoredC = RealOf<Element>>
void tile(int64_t K, LeftOperand<Element> A, Matrix<const StoredB> B, Matrix<StoredC> C,
          bool accumulate, Prefetch<StoredB> prefetch) {
  using Real = RealOf<Element>;
  constexpr int chains = CHAINS<ROWS, VECTORS, SPLIT>;
  Vec<Real> c[chains][ROWS][VECTORS];
#pragma GCC unroll 2
  for (int u = 0; u < chains; ++u)
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; ++n)
        c[u][m][n] = Vec<Real>(Real(0));

  // C is read and written at the end only: fetch its cache lines meanwhile.
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n)
      __builtin_prefetch(C.p + m * C.ld + n * LANES<Real>, 1);

  // For each k, VECTORS vectors of B are loaded once and multiplied by ROWS elements of A, each
  // broadcast.
  int64_t k = 0;
  for (; k + chains <= K; k += chains) {
#pragma GCC unroll 2
    for (int u = 0; u < chains; ++u) {
      if constexpr (PREFETCH) __builtin_prefetch(prefetch.first + (k + u) * prefetch.step, 0, 2);
      Vec<Element> b[VECTORS];
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; ++n)
        b[n] = load_elements<Element>(B.p + (k + u) * B.ld + n * LANES<Real>);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const Vec<Element> a(A.p[m * A.stride_m + (k + u) * A.stride_k]);
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; ++n)
          c[u][m][n] = multiply_add(c[u][m][n], a, b[n]);
      }
    }
  }

  // The last k, if K is odd and there are two chains.
  if (k < K)
    for (int m = 0; m < ROWS; ++m)
      for (int n = 0; n < VECTORS; ++n)
        c[0][m][n] = multiply_add(c[0][m][n], Vec<Element>(A.p[m * A.stride_m + k * A.stride_k]),
                                  load_elements<Element>(B.p + k * B.ld + n * LANES<Element>));

  // Add the chains, and C if its old value counts, and store.
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; ++n) {
      Vec<Real> r = c[0][m][n];
      if constexpr (chains == 2) r = r + c[1][m][n];
      StoredC* out = C.p + m * C.ld + n * LANES<Real>;
      if (accumulate) r = r + load_as(out);
      store_as(out, r);
    }
}

// A tile whose number of rows is known at run time only.
template <int VECTORS, Split SPLIT, bool PREFETCH = false, class Element, class StoredB = Element,
          class StoredC = RealOf<Element>>
void tile_rows(int M, int64_t K, LeftOperand<Element> A, Matrix<const StoredB> B, Matrix<StoredC> C,
               bool accumulate, Prefetch<StoredB> prefetch = {}) {
  switch (M) {
    case 1:
      return tile<1, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
    case 2:
      return tile<2, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
    case 3:
      return tile<3, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
    case 4:
      return tile<4, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
    case 5:
      return tile<5, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
    default:
      return tile<6, VECTORS, SPLIT, PREFETCH>(K, A, B, C, accumulate, prefetch);
  }
}

#if defined(__AMX_BF16__)
// any_tile for a panel of whole tile registers.
inline void panel_in_tiles(TileRegisters& registers, int M, int64_t padded, int64_t K,
                           LeftOperand<bf16_pair> A, const bf16_pair* panel, Matrix<float> C,
                           bool accumulate, Prefetch<bf16_pair> prefetch) {
  constexpr int64_t LINE = 64 / sizeof(bf16_pair);
  const auto fetch = [&](int64_t k) {
    for (int64_t i = k * prefetch.step; i < (k + REGISTER_SIDE) * prefetch.step; i += LINE)
      __builtin_prefetch(prefetch.first + i, 0, 2);
  };
  const Matrix<const bf16_pair> B{panel, padded};
  if (padded > REGISTER_SIDE)
    tile_product<true>(registers, M, K, A.p, A.stride_m, B, C, accumulate, fetch);
  else
    tile_product<false>(registers, M, K, A.p, A.stride_m, B, C, accumulate, fetch);
}
#endif

// C (M, width) (+)= A (M, K) times a packed panel (K, width rounded up to vectors), M <= TILE_ROWS
// and width <= PANEL_COLUMNS. Unless C may be written up to whole vectors, a width that does not
// fill its vectors goes through a buffer.
template <class Element, Split SPLIT>
void any_tile(TileRegisters& registers, int M, int64_t width, int64_t K, LeftOperand<Element> A,
              const Element* panel, Output<RealOf<Element>> C, Prefetch<Element> prefetch = {}) {
  using Real = RealOf<Element>;
  constexpr int64_t lanes = LANES<Element>;
  // Where a panel has two vectors, no product has three.
  constexpr int THREE = TILE_VECTORS < 3 ? TILE_VECTORS : 3;
  Real buffer[TILE_ROWS<Element> * PANEL_COLUMNS<Real>];  // (M, padded)
  const int64_t padded = round_up<Real>(width);
  const bool direct = C.whole_vectors || padded == width;
  const Matrix<Real> out{direct ? C.p : buffer, direct ? C.ld : padded};
  const bool accumulate = C.accumulate && direct;
  const auto in_vectors = [&](auto prefetches) {
    constexpr bool PREFETCH = decltype(prefetches)::value;
    switch (padded / lanes) {
      case 1:
        return tile_rows<1, SPLIT, PREFETCH, Element>(M, K, A, {panel, lanes}, out, accumulate,
                                                      prefetch);
      case 2:
        return tile_rows<2, SPLIT, PREFETCH, Element>(M, K, A, {panel, 2 * lanes}, out, accumulate,
                                                      prefetch);
      case 3:
        return tile_rows<THREE, SPLIT, PREFETCH, Element>(M, K, A, {panel, THREE * lanes}, out,
                                                          accumulate, prefetch);
      default:
        return tile_rows<TILE_VECTORS, SPLIT, PREFETCH, Element>(
            M, K, A, {panel, TILE_VECTORS * lanes}, out, accumulate, prefetch);
    }
  };
  if constexpr (IN_TILE_REGISTERS<Element>)
    panel_in_tiles(registers, M, padded, K, A, panel, out, accumulate, prefetch);
  else if (prefetch.step)
    in_vectors(std::true_type());
  else
    in_vectors(std::false_type());
  if (direct) return;
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < width; ++n)
      C.p[m * C.ld + n] = buffer[m * padded + n] + (C.accumulate ? C.p[m * C.ld + n] : Real(0));
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
