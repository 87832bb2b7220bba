// y = x W^T + b for few rows of x, with the rows of W where they are: packing W, as gemm.h does,
// takes as long as the product itself or longer. There are two ways, by the number of rows M:
//   - dot_products.h, for at most MAX_DOT_ROWS rows.
//   - the transposed product W x^T, for one to four vectors' worth of rows: x^T is packed in one
//     panel.
//
// E is the type of the products' elements and S the type in memory; see simd/bf16_pair.h. Pairs are
// read where they are if S is bfloat16 and the number K of a row's elements is even.
//
// What limits it: reading W.
#pragma once
#include "cpu/buffer.h"
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/simd/row_arithmetic.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Whether rows of K numbers are rows of elements E where they are. E is S, or a pair of it.
template <class E, class S>
HD bool are_elements(int64_t K) {
  static_assert(std::is_same<E, S>::value || !std::is_same<S, bfloat16>::value || NUMBERS<E> == 2);
  return std::is_same<E, S>::value || (std::is_same<S, bfloat16>::value && K % 2 == 0);
}
template <class E, class S>
HD const E* as_elements(const S* p) {
  return reinterpret_cast<const E*>(p);
}

// C (M, width) = a block of sums, in the type in memory. STREAMED: whole vectors of C, which are
// aligned then, are written past the caches.
template <bool STREAMED = false, class S, class T>
HD void store_block(int64_t M, int64_t width, const T* block, int64_t ld, S* C, int64_t ldc) {
  for (int64_t m = 0; m < M; ++m)
    for (int64_t j = 0; j < width; j += LANES<T>) {
      const Vec<T> x = Vec<T>::load(block + m * ld + j);
      if (STREAMED && width - j >= LANES<T>)
        stream_as(C + m * ldc + j, x);
      else
        store_up_to(C + m * ldc + j, x, width - j);
    }
}

// Chooses the way for x (M, K), and multiplies any rows of W by it, from any thread.
template <class E, class S>
class FewRows {
 public:
  // x (M, K). Packs x^T if the product is the transposed one.
  FewRows(int64_t M, int64_t K, const S* x)
      : M(M),
        K(K),
        x(x),
        way(choose(M, K)),
        dot_rows(way == Way::dots         ? M
                 : way == Way::transposed ? rows_left_to_dot_products(M, K)
                                          : 0),
        panel(way == Way::transposed ? packed_size<E>(K, M - dot_rows) : 0) {
    if (panel) pack(x, 1, K, K, M - dot_rows, (E*)panel);
  }

  // Whether x has so few rows, and rows of W such a length, that `multiply` is faster than packing.
  explicit operator bool() const { return way != Way::none; }

  // y (M, N) = x W (N, K)^T + b (N,), which may be null. Y is the type of y in memory: the type of
  // the sums, or S.
  template <class Y>
  void multiply(int64_t N, const S* W, const RealOf<E>* b, Y* y, int64_t ldy) const {
    if (way == Way::dots)
      dots(N, W, b, y, ldy);
    else
      transposed(N, W, b, y, ldy);
  }

 private:
  using T = RealOf<E>;
  enum class Way { none, dots, transposed };

  const int64_t M, K;
  const S* const x;
  const Way way;
  const int64_t dot_rows;  // the last rows of x, whose products are dot products
  const Buffer<E> panel;   // x^T (K, M - dot_rows), packed, for the transposed product

  // Whether rows of K numbers suit dot products.
  static bool suits_dot_products(int64_t K) { return are_elements<E, S>(K) && fills_vectors<E>(K); }

  // Returns the number of last rows of x that the transposed product leaves to dot products,
  // because they are few and do not fill a vector.
  static int64_t rows_left_to_dot_products(int64_t M, int64_t K) {
    const int64_t rest = M % LANES<E>;
    return suits_dot_products(K) && rest <= MAX_DOT_ROWS && rest < M ? rest : 0;
  }

  // The transposed product needs whole vectors of rows, or nearly. Measured on 2 cores of a Zen 5
  // EPYC with AVX-512, weights of 4 MB: 1.2 to 1.3 times as fast as the packed product for 16, 32
  // or 48 rows, 1.1 times for 20, 40 or 64.
  static Way choose(int64_t M, int64_t K) {
    constexpr int L = LANES<E>;
    if (M <= MAX_DOT_ROWS && suits_dot_products(K)) return Way::dots;
    if (!are_elements<E, S>(K) || M > PANEL<E>) return Way::none;
    const bool fills = M % L == 0 || M % L >= L - L / 4 || rows_left_to_dot_products(M, K);
    return fills ? Way::transposed : Way::none;
  }

  // The last dot_rows rows of y.
  template <class Y>
  void dots(int64_t N, const S* W, const T* b, Y* y, int64_t ldy) const {
    const int64_t k = depth<E>(K), first = M - dot_rows;
    const Matrix<const E> A{as_elements<E>(x + first * K), k}, B{as_elements<E>(W), k};
    y += first * ldy;
    if constexpr (std::is_same<Y, T>::value) {
      product_of_rows<E>(dot_rows, k, N, A, B, b, {y, ldy, false, false});
    } else {
      constexpr int64_t AT_ONCE = 8 * LANES<E>;
      alignas(64) T block[MAX_DOT_ROWS * AT_ONCE];
      for (int64_t n = 0; n < N; n += AT_ONCE) {
        const int64_t width = N - n < AT_ONCE ? N - n : AT_ONCE;
        product_of_rows<E>(dot_rows, k, width, A, {B.p + n * k, k}, b ? b + n : nullptr,
                           {block, AT_ONCE, false, false});
        store_block(dot_rows, width, (const T*)block, AT_ONCE, y + n, ldy);
      }
    }
  }

  // All rows of y: of the first ones, rows of W times the panel, stored transposed.
  template <class Y>
  void transposed(int64_t N, const S* W, const T* b, Y* y, int64_t ldy) const {
    // Rows of W at a time: whole vectors of y, and whole tiles.
    constexpr int64_t ROWS = (IN_TILE_REGISTERS<E> ? 4 : 3) * LANES<E>;
    const int64_t m = M - dot_rows, padded = round_up<E>(m), k = depth<E>(K);
    T block[ROWS * PANEL<E>];  // (rows, padded)
    TileRegisters registers;
    for (int64_t n0 = 0; n0 < N; n0 += ROWS) {
      // Each tile of MR rows of W prefetches the MR rows that follow.
      const int64_t rows = N - n0 < ROWS ? N - n0 : ROWS;
      const T* const bias = b ? b + n0 : nullptr;
      for (int64_t n = 0; n < rows; n += MR<E>) {
        const E* w = as_elements<E>(W + (n0 + n) * K);
        any_tile<E, Split::rows>(registers, int(rows - n < MR<E> ? rows - n : MR<E>), padded, k,
                                 {w, k, 1}, panel, {block + n * padded, padded, true, false},
                                 {w + MR<E> * k, MR<E>});
      }
      store_transposed(block, rows, m, padded, bias, y + n0, ldy);
      if (dot_rows) dots(rows, W + n0 * K, bias, y + n0, ldy);
    }
  }

  // Stores a block (rows, m) of W x^T, with rows `padded` apart, as y (m, rows) + b (rows,).
  template <class Y>
  static void store_transposed(const T* block, int64_t rows, int64_t m, int64_t padded, const T* b,
                               Y* y, int64_t ldy) {
    constexpr int L = LANES<T>;
    for (int64_t n = 0; n < rows; n += L)
      for (int64_t j = 0; j < m; j += L) {
        const int64_t width = rows - n < L ? rows - n : L;
        Vec<T> square[L];
        for (int i = 0; i < L; ++i)
          square[i] = Vec<T>::load(block + (n + (n + i < rows ? i : 0)) * padded + j);
        transpose(square);
        const Vec<T> bias = b ? Vec<T>::load(b + n, width) : Vec<T>(T(0));
        for (int i = 0; i < L && j + i < m; ++i)
          store_up_to(y + (j + i) * ldy + n, square[i] + bias, width);
      }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
