// y = x W^T + b and its gradients on the products of this folder, whose rate on some processors is
// twice that of torch's library.
//
// What limits it: for many rows the multiply-add units, for few rows reading W. Hence three ways of
// computing y, by the number of rows M:
//   - dot_products.h, at most MAX_DOT_ROWS rows: W is read where it is.
//   - the transposed product W x^T, for one to four vectors' worth of rows: W is read where it is,
//     too, and x^T is packed in one panel.
//   - gemm.h, all others. For at most CHUNK rows each panel of W is used as soon as it is packed,
//     while it is in the L2 cache, and the next panel is prefetched meanwhile.
//
// E is the type of the products' elements and S the type in memory; see simd/bf16_pair.h. Pairs are
// read where they are if S is bfloat16 and the number K of a row's elements is even.
#pragma once
#include "cpu/buffer.h"
#include "cpu/gemm/column_sums.h"
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/transposed.h"
#include "cpu/gemm/unpacked.h"
#include "cpu/simd/row_arithmetic.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// C (M, width) = a block of sums, in the type in memory.
template <class S, class T>
HD void store_block(int64_t M, int64_t width, const T* block, int64_t ld, S* C, int64_t ldc) {
  for (int64_t m = 0; m < M; ++m)
    for (int64_t j = 0; j < width; j += LANES<T>)
      store_up_to(C + m * ldc + j, Vec<T>::load(block + m * ld + j), width - j);
}

// C (M, columns) = A (M, K) times packed columns + bias, as `gemm`. If S is not the type of the
// sums, they go through a block of one panel.
template <class E, class S>
void gemm_to(int64_t M, int64_t K, int64_t columns, Matrix<const S> A, const E* packed, Matrix<S> C,
             E* scratch, const Sum<E>* bias = nullptr, const E* next = nullptr) {
  if constexpr (std::is_same<S, Sum<E>>::value) {
    gemm<E, S>(M, K, columns, A, packed, {C.p, C.ld, false, false}, scratch, bias, next);
  } else {
    alignas(64) Sum<E> block[CHUNK * PANEL<E>];
    each_chunk(M, K, A, scratch, [&](int64_t m, int64_t rows, LeftOperand<E> left) {
      for (int64_t n = 0; n < columns; n += PANEL<E>) {
        const int64_t width = columns - n < PANEL<E> ? columns - n : PANEL<E>;
        gemm_chunk<E>(rows, depth<E>(K), width, left, packed + depth<E>(K) * n,
                      {block, PANEL<E>, true, false}, bias ? bias + n : nullptr, next);
        store_block(rows, width, (const Sum<E>*)block, PANEL<E>, C.p + m * C.ld + n, C.ld);
      }
    });
  }
}

// Whether rows of K numbers are rows of elements E where they are.
template <class E, class S>
HD bool are_elements(int64_t K) {
  return std::is_same<E, S>::value || (std::is_same<S, bfloat16>::value && K % 2 == 0);
}
template <class E, class S>
HD const E* as_elements(const S* p) {
  return reinterpret_cast<const E*>(p);
}

// Returns whether rows of K numbers suit dot products, which read them where they are.
template <class E, class S>
HD bool suits_dot_products(int64_t K) {
  return are_elements<E, S>(K) && fills_vectors<E>(K);
}

// Returns the number of last rows of x that the transposed product leaves to dot products, because
// they are few and do not fill a vector.
template <class E, class S>
int64_t rows_left_to_dot_products(int64_t M, int64_t K) {
  const int64_t rest = M % LANES<E>;
  return suits_dot_products<E, S>(K) && rest <= MAX_DOT_ROWS && rest < M ? rest : 0;
}

// Returns whether the transposed product is faster: it needs whole vectors of rows, or nearly.
// Measured on 2 cores of a Zen 5 EPYC with AVX-512, weights of 4 MB: 1.2 to 1.3 times as fast as
// the packed product for 16, 32 or 48 rows, 1.1 times for 20, 40 or 64.
template <class E, class S>
bool is_transposed(int64_t M, int64_t K) {
  constexpr int L = LANES<E>;
  return are_elements<E, S>(K) && M <= PANEL<E> &&
         (M % L == 0 || M % L >= L - L / 4 || rows_left_to_dot_products<E, S>(M, K));
}

// Stores a block (rows, M) of W x^T, with rows `padded` apart, as y (M, rows) + b (rows,).
template <class T, class S>
HD void store_transposed(const T* block, int64_t rows, int64_t M, int64_t padded, const T* b, S* y,
                         int64_t ldy) {
  constexpr int L = LANES<T>;
  for (int64_t n = 0; n < rows; n += L)
    for (int64_t m = 0; m < M; m += L) {
      const int64_t width = rows - n < L ? rows - n : L;
      Vec<T> square[L];
      for (int i = 0; i < L; ++i)
        square[i] = Vec<T>::load(block + (n + (n + i < rows ? i : 0)) * padded + m);
      transpose(square);
      const Vec<T> bias = b ? Vec<T>::load(b + n, width) : Vec<T>(T(0));
      for (int i = 0; i < L && m + i < M; ++i)
        store_up_to(y + (m + i) * ldy + n, square[i] + bias, width);
    }
}

// y (M, rows) = x W^T + b by dot products, of at most MAX_DOT_ROWS rows of x.
template <class E, class S>
void linear_dots(int64_t M, int64_t K, int64_t rows, const S* x, const S* W, const Sum<E>* b, S* y,
                 int64_t ldy) {
  using T = Sum<E>;
  const int64_t k = depth<E>(K);
  const Matrix<const E> A{as_elements<E>(x), k}, B{as_elements<E>(W), k};
  if constexpr (std::is_same<S, T>::value) {
    product_of_rows<E>(M, k, rows, A, B, b, {y, ldy, false, false});
  } else {
    constexpr int64_t AT_ONCE = 8 * LANES<E>;
    alignas(64) T block[MAX_DOT_ROWS * AT_ONCE];
    for (int64_t n = 0; n < rows; n += AT_ONCE) {
      const int64_t width = rows - n < AT_ONCE ? rows - n : AT_ONCE;
      product_of_rows<E>(M, k, width, A, {B.p + n * k, k}, b ? b + n : nullptr,
                         {block, AT_ONCE, false, false});
      store_block(M, width, (const T*)block, AT_ONCE, y + n, ldy);
    }
  }
}

// Columns [begin, end) of y by the transposed product: rows of W, where they are, times the panel
// of packed x^T (K, M), where M does not count rows_left_to_dot_products.
template <class E, class S>
void linear_transposed(const cpu::Linear<S>& l, const Sum<E>* b, const E* panel, int64_t begin,
                       int64_t end) {
  using T = Sum<E>;
  // Rows of W at a time: whole vectors of y, and whole tiles.
  constexpr int64_t ROWS = (IN_TILE_REGISTERS<E> ? 4 : 3) * LANES<E>;
  const int64_t rest = rows_left_to_dot_products<E, S>(l.M, l.K), M = l.M - rest;
  const int64_t padded = round_up<E>(M), K = depth<E>(l.K);
  T block[ROWS * PANEL<E>];  // (rows, padded)
  TileRegisters registers;
  for (int64_t n0 = begin; n0 < end; n0 += ROWS) {
    // Each tile of MR rows of W prefetches the MR rows that follow.
    const int64_t rows = end - n0 < ROWS ? end - n0 : ROWS;
    for (int64_t n = 0; n < rows; n += MR<E>) {
      const E* W = as_elements<E>(l.W + (n0 + n) * l.K);
      any_tile<E, Split::rows>(registers, int(rows - n < MR<E> ? rows - n : MR<E>), padded, K,
                               {W, K, 1}, panel, {block + n * padded, padded, true, false},
                               {W + MR<E> * K, MR<E>});
    }
    store_transposed((const T*)block, rows, M, padded, b ? b + n0 : nullptr, l.y + n0, l.N);
    if (rest)
      linear_dots<E, S>(rest, l.K, rows, l.x + M * l.K, l.W + n0 * l.K, b ? b + n0 : nullptr,
                        l.y + M * l.N + n0, l.N);
  }
}

template <class E, class S>
void linear(const cpu::Linear<S>& l, cpu::Parallel run, int threads) {
  using T = Sum<E>;
  const bool few = l.M <= CHUNK, dots = l.M <= MAX_DOT_ROWS && suits_dot_products<E, S>(l.K);
  Buffer<T> converted;
  const T* b;
  if constexpr (std::is_same<S, T>::value) {
    b = l.b;
  } else {
    if (l.b) converted = Buffer<T>(round_up<T>(l.N));
    for (int64_t n = 0; l.b && n < l.N; n += LANES<T>)
      load_up_to(l.b + n, l.N - n).store(converted + n);
    b = converted;
  }

  if (!dots && is_transposed<E, S>(l.M, l.K)) {
    const int64_t M = l.M - rows_left_to_dot_products<E, S>(l.M, l.K);
    Buffer<E> panel(packed_size<E>(l.K, M));
    pack(l.x, 1, l.K, l.K, M, (E*)panel);
    return parallel(run, threads, [&](int64_t begin, int64_t end) {
      const Range own = own_columns<E>(l.N, begin, end, threads);
      linear_transposed<E, S>(l, b, (const E*)panel, own.begin, own.end);
    });
  }

  // The workspace: none for dot products, one panel for each part if there are few rows, else W.
  const int64_t panel = packed_size<E>(l.K, PANEL<E>);
  const int64_t left = stays_in_place<E, S>(l.K, l.K) ? 0 : left_size<E, S>(l.K);
  Buffer<E> packed(dots ? 0 : few ? panel * threads : packed_size<E>(l.K, l.N));
  Buffer<E> scratch(left * threads);
  // Columns [n, n_end) of y: packs these rows of W and multiplies. `next` is that of `gemm`.
  const auto columns = [&](int64_t n, int64_t n_end, E* to, E* own_scratch, const E* next) {
    pack(l.W + n * l.K, 1, l.K, l.K, n_end - n, to);
    gemm_to<E, S>(l.M, l.K, n_end - n, {l.x, l.K}, to, {l.y + n, l.N}, own_scratch,
                  b ? b + n : nullptr, next);
  };
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<E>(l.N, begin, end, threads);
    if (dots)
      return linear_dots<E, S>(l.M, l.K, own.size(), l.x, l.W + own.begin * l.K,
                               b ? b + own.begin : nullptr, l.y + own.begin, l.N);
    E* const own_scratch = scratch + left * begin;
    if (!few)
      return columns(own.begin, own.end, packed + depth<E>(l.K) * own.begin, own_scratch, nullptr);
    for (int64_t n = own.begin; n < own.end; n += PANEL<E>) {
      const int64_t next = n + PANEL<E>, n_end = next < own.end ? next : own.end;
      columns(n, n_end, packed + panel * begin, own_scratch, as_elements<E>(l.W + next * l.K));
    }
  });
}

template <class E, class S>
class LinearBackward {
 public:
  LinearBackward(const cpu::Linear<S>& l, int parts)
      : l(l),
        parts(parts),
        few(l.M <= CHUNK && (!SAME || l.K % LANES<E> == 0)),
        panel(packed_size<E>(l.N, PANEL<E>)),
        left(stays_in_place<E, S>(l.N, l.N) ? 0 : left_size<E, S>(l.N)),
        packed(!l.dx  ? 0
               : !few ? packed_size<E>(l.N, l.K)
               : SAME ? 0
                      : panel * parts),
        lefts(l.dx ? left * parts : 0),
        sums(l.db ? 2 * round_up<T>(l.N) : 0),
        scratch(l.dW ? scratch_size * parts : 0),
        dW(l.dW && !IN_PLACE && l.M > ONE_PASS<E> ? l.N * l.K : 0) {}

  // Parts [begin, end) of the team.
  void run(int64_t begin, int64_t end) {
    if (l.dx) gradient_of_x(begin, own_columns<E>(l.K, begin, end, parts));
    if (l.dW) gradient_of_W(begin, {l.N * begin / parts, l.N * end / parts});
    if (l.db) gradient_of_b(own_columns<E>(l.N, begin, end, parts));
  }

 private:
  using T = Sum<E>;
  static constexpr bool SAME = std::is_same<E, S>::value;  // the products' elements are in memory
  static constexpr bool IN_PLACE = std::is_same<S, T>::value;  // sums can be written to the results
  static constexpr int64_t scratch_size =
      (TRANSPOSED_SCRATCH<E> + LANES<E> - 1) / LANES<E> * LANES<E>;

  const cpu::Linear<S>& l;
  const int parts;
  const bool few;
  const int64_t panel, left;  // elements of a panel of W, and of a converted chunk of dy
  Buffer<E> packed;           // W, or (parts, panel) for few rows that need packing
  Buffer<E> lefts;            // (parts, left)
  Buffer<T> sums;             // (2, N)
  Buffer<E> scratch;          // (parts, scratch_size)  of gemm_transposed
  Buffer<T> dW;               // (N, K)  its sums, if they are not complete after one pass

  // dx = dy W: each part computes columns of dx. For few rows W is not packed, or panel by panel.
  void gradient_of_x(int64_t part, Range own) {
    if constexpr (SAME)
      if (few)
        return product<T>(l.M, l.N, own.size(), {l.dy, l.N, 1}, {l.W + own.begin, l.K},
                          {l.dx + own.begin, l.K}, false);
    const int64_t step = few ? PANEL<E> : own.size();
    for (int64_t k = own.begin; k < own.end; k += step) {
      const int64_t width = own.end - k < step ? own.end - k : step;
      E* const columns = few ? packed + panel * part : packed + depth<E>(l.N) * k;
      pack(l.W + k, l.K, 1, l.N, width, columns);
      gemm_to<E, S>(l.M, l.N, width, {l.dy, l.N}, columns, {l.dx + k, l.K}, lefts + left * part);
    }
  }

  // dW = dy^T x: each part computes rows of dW.
  void gradient_of_W(int64_t part, Range own) {
    E* const own_scratch = scratch + scratch_size * part;
    const Matrix<const S> dy{l.dy, l.N}, x{l.x, l.K};
    if (dW) {
      gemm_transposed<E>(l.M, l.K, own, dy, x, Matrix<T>{dW, l.K}, false, own_scratch);
      store_block(own.size(), l.K, dW + own.begin * l.K, l.K, l.dW + own.begin * l.K, l.K);
    } else {
      gemm_transposed<E>(l.M, l.K, own, dy, x, Matrix<S>{l.dW, l.K}, false, own_scratch);
    }
  }

  // db: the column sums of dy.
  void gradient_of_b(Range own) {
    T* const block = sums + round_up<T>(l.N) + own.begin;
    T* to = sums + own.begin;
    if constexpr (IN_PLACE) to = l.db + own.begin;
    column_sums(l.M, l.dy + own.begin, l.N, own.size(), to, block);
    if constexpr (!IN_PLACE)
      store_block(1, own.size(), (const T*)to, own.size(), l.db + own.begin, l.N);
  }
};

template <class E, class S>
void linear_backward(const cpu::Linear<S>& l, cpu::Parallel run, int threads) {
  LinearBackward<E, S> team(l, threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) { team.run(begin, end); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
