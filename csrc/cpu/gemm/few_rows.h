// y = x W^T + b for few rows of x, with the rows of W where they are: packing W, as gemm.h does,
// takes as long as the product itself or longer. There are two ways, by the number of rows M:
//   - dot_products.h, for at most MAX_DOT_ROWS rows.
//   - the transposed product W x^T, for one to four vectors' worth of rows: x^T is packed in one
//     panel.
//
// Pairs of bfloat16 numbers (simd/bf16_pair.h) are read where they are if the tensor in memory is
// bfloat16 and its rows have an even number K of numbers.
//
// What limits it: reading W.
#pragma once
#include "cpu/buffer.h"
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/simd/row_arithmetic.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Whether rows of K numbers are rows of the product's elements where they are in memory. An Element
// is a Stored, or a pair of them.
template <class Element, class Stored>
HD bool are_elements(int64_t K) {
  static_assert(std::is_same<Element, Stored>::value || !std::is_same<Stored, bfloat16>::value ||
                NUMBERS<Element> == 2);
  return std::is_same<Element, Stored>::value ||
         (std::is_same<Stored, bfloat16>::value && K % 2 == 0);
}
template <class Element, class Stored>
HD const Element* as_elements(const Stored* p) {
  return reinterpret_cast<const Element*>(p);
}

// C (M, width) = a block of sums, in the type in memory. STREAMED: whole vectors of C, which are
// aligned then, are written past the caches.
template <bool STREAMED = false, class Stored, class Real>
HD void store_block(int64_t M, int64_t width, const Real* block, int64_t ld, Stored* C,
                    int64_t ldc) {
  for (int64_t m = 0; m < M; ++m)
    for (int64_t j = 0; j < width; j += LANES<Real>) {
      const Vec<Real> x = Vec<Real>::load(block + m * ld + j);
      if (STREAMED && width - j >= LANES<Real>)
        stream_as(C + m * ldc + j, x);
      else
        store_up_to(C + m * ldc + j, x, width - j);
    }
}

// Chooses the way for x (M, K), and multiplies any rows of W by it, from any thread.
template <class Element, class Stored>
class FewRows {
 public:
  // x (M, K). Packs x^T if the product is the transposed one.
  FewRows(int64_t M, int64_t K, const Stored* x)
      : M(M),
        K(K),
        x(x),
        way(choose(M, K)),
        dot_rows(way == Way::dots         ? M
                 : way == Way::transposed ? rows_left_to_dot_products(M, K)
                                          : 0),
        panel(way == Way::transposed ? packed_size<Element>(K, M - dot_rows) : 0) {
    if (panel) pack(x, 1, K, K, M - dot_rows, (Element*)panel);
  }

  // Whether x has so few rows, and rows of W such a length, that `multiply` is faster than packing.
  explicit operator bool() const { return way != Way::none; }

  // y (M, N) = x W (N, K)^T + b (N,), which may be null. StoredY is the type of y in memory: Real,
  // the type of the sums, or Stored.
  template <class StoredY>
  void multiply(int64_t N, const Stored* W, const RealOf<Element>* b, StoredY* y,
                int64_t ldy) const {
    if (way == Way::dots)
      dots(N, W, b, y, ldy);
    else
      transposed(N, W, b, y, ldy);
  }

 private:
  using Real = RealOf<Element>;
  enum class Way { none, dots, transposed };

  const int64_t M, K;
  const Stored* const x;
  const Way way;
  const int64_t dot_rows;       // the last rows of x, whose products are dot products
  const Buffer<Element> panel;  // x^T (K, M - dot_rows), packed, for the transposed product

  // Whether rows of K numbers suit dot products.
  static bool suits_dot_products(int64_t K) {
    return are_elements<Element, Stored>(K) && fills_vectors<Element>(K);
  }

  // Returns the number of last rows of x that the transposed product leaves to dot products,
  // because they are few and do not fill a vector.
  static int64_t rows_left_to_dot_products(int64_t M, int64_t K) {
    const int64_t rest = M % LANES<Element>;
    return suits_dot_products(K) && rest <= MAX_DOT_ROWS && rest < M ? rest : 0;
  }

  // The transposed product needs whole vectors of rows, or nearly. Measured on 2 cores of a Zen 5
  // EPYC with AVX-512, weights of 4 MB: 1.2 to 1.3 times as fast as the packed product for 16, 32
  // or 48 rows, 1.1 times for 20, 40 or 64.
  static Way choose(int64_t M, int64_t K) {
    constexpr int lanes = LANES<Element>;
    if (M <= MAX_DOT_ROWS && suits_dot_products(K)) return Way::dots;
    if (!are_elements<Element, Stored>(K) || M > PANEL_COLUMNS<Element>) return Way::none;
    const bool fills =
        M % lanes == 0 || M % lanes >= lanes - lanes / 4 || rows_left_to_dot_products(M, K);
    return fills ? Way::transposed : Way::none;
  }

  // The last dot_rows rows of y.
  template <class StoredY>
  void dots(int64_t N, const Stored* W, const Real* b, StoredY* y, int64_t ldy) const {
    const int64_t k = depth<Element>(K), first = M - dot_rows;
    const Matrix<const Element> A{as_elements<Element>(x + first * K), k},
        B{as_elements<Element>(W), k};
    y += first * ldy;
    if constexpr (std::is_same<StoredY, Real>::value) {
      product_of_rows<Element>(dot_rows, k, N, A, B, b, {y, ldy, false, false});
    } else {
      constexpr int64_t AT_ONCE = 8 * LANES<Element>;
      alignas(64) Real block[MAX_DOT_ROWS * AT_ONCE];
      for (int64_t n = 0; n < N; n += AT_ONCE) {
        const int64_t width = N - n < AT_ONCE ? N - n : AT_ONCE;
        product_of_rows<Element>(dot_rows, k, width, A, {B.p + n * k, k}, b ? b + n : nullptr,
                                 {block, AT_ONCE, false, false});
        store_block(dot_rows, width, (const Real*)block, AT_ONCE, y + n, ldy);
      }
    }
  }

  // All rows of y: of the first ones, rows of W times the panel, stored transposed.
  template <class StoredY>
  void transposed(int64_t N, const Stored* W, const Real* b, StoredY* y, int64_t ldy) const {
    // Rows of W at a time: whole vectors of y, and whole tiles.
    constexpr int64_t ROWS = (IN_TILE_REGISTERS<Element> ? 4 : 3) * LANES<Element>;
    const int64_t m = M - dot_rows, padded = round_up<Element>(m), k = depth<Element>(K);
    Real block[ROWS * PANEL_COLUMNS<Element>];  // (rows, padded)
    TileRegisters registers;
    for (int64_t n0 = 0; n0 < N; n0 += ROWS) {
      // Each tile of TILE_ROWS rows of W prefetches the TILE_ROWS rows that follow.
      const int64_t rows = N - n0 < ROWS ? N - n0 : ROWS;
      const Real* const bias = b ? b + n0 : nullptr;
      for (int64_t n = 0; n < rows; n += TILE_ROWS<Element>) {
        const Element* w = as_elements<Element>(W + (n0 + n) * K);
        any_tile<Element, Split::rows>(
            registers, int(rows - n < TILE_ROWS<Element> ? rows - n : TILE_ROWS<Element>), padded,
            k, {w, k, 1}, panel, {block + n * padded, padded, true, false},
            {w + TILE_ROWS<Element> * k, TILE_ROWS<Element>});
      }
      store_transposed(block, rows, m, padded, bias, y + n0, ldy);
      if (dot_rows) dots(rows, W + n0 * K, bias, y + n0, ldy);
    }
  }

  // Stores a block (rows, m) of W x^T, with rows `padded` apart, as y (m, rows) + b (rows,).
  template <class StoredY>
  static void store_transposed(const Real* block, int64_t rows, int64_t m, int64_t padded,
                               const Real* b, StoredY* y, int64_t ldy) {
    constexpr int lanes = LANES<Real>;
    for (int64_t n = 0; n < rows; n += lanes)
      for (int64_t j = 0; j < m; j += lanes) {
        const int64_t width = rows - n < lanes ? rows - n : lanes;
        Vec<Real> square[lanes];
        for (int i = 0; i < lanes; ++i)
          square[i] = Vec<Real>::load(block + (n + (n + i < rows ? i : 0)) * padded + j);
        transpose(square);
        const Vec<Real> bias = b ? Vec<Real>::load(b + n, width) : Vec<Real>(Real(0));
        for (int i = 0; i < lanes && j + i < m; ++i)
          store_up_to(y + (j + i) * ldy + n, square[i] + bias, width);
      }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
