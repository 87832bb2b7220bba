// Products of bfloat16 pairs by Intel's AMX: tile registers of 16 rows of 64 bytes, and an
// instruction that multiplies two of them. Where the compiler is told of AMX, these replace the
// vectors' tile in tile.h for elements bf16_pair; elsewhere nothing here is used.
//
// The operands are those that tile.h has: a tile register holds 16 pairs of 16 rows of A, or 16
// rows of B with 16 pairs each. A product has four registers of sums, two of A and two of B:
//
//             B left   B right
//   A upper    sum 0    sum 1
//   A lower    sum 2    sum 3
//
// Both parts of A have the same number of rows, the half of the tile's, rounded up: one row of an
// odd number is computed twice, with the same result. Changing the number of rows takes about as
// long as ten products of full registers, therefore a whole matrix product keeps one number.
//
// What limits it: where another thread runs on the same core, as on most virtual machines, tile
// instructions do not overlap. Measured on a core of an Emerald Rapids Xeon: the products alone
// reach 2,860 GFLOP/s, but 1,200 beside another thread; with loads from the L1 cache 2,860, but
// 720. Beside another thread a product of 1024 x 512 x 1024 reaches 390, and 530 if it reads the
// same few lines of A and B again and again and does not write C. Intel's manual gives the
// semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and
// LDTILECFG.
#pragma once
#include "cpu/gemm/operands.h"
#include "cpu/simd/bf16_pair.h"
#include "cpu/simd/transpose.h"
#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Whether products of these elements are computed in tile registers.
template <class Element>
constexpr bool IN_TILE_REGISTERS = false;

#if !defined(__AMX_BF16__)
// What tile.h passes on where there are no tile registers.
struct TileRegisters {};
#else
template <>
constexpr bool IN_TILE_REGISTERS<bf16_pair> = true;

constexpr int REGISTER_SIDE = 16;  // the rows of a tile register, and the floats or pairs of a row

// The configuration of this thread's tile registers, which is given up at the end of the scope: a
// thread with tiles in use takes longer to switch to.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (rows_) _tile_release();
  }

  // Returns the rows of each part of A for tiles of M <= 2 * REGISTER_SIDE rows, and configures the
  // registers for them. Tiles of one row less can use the configuration, too.
  int configure(int M) {
    if (rows_ == (M + 1) / 2 || (rows_ == (M + 2) / 2 && rows_ <= M)) return rows_;
    rows_ = (M + 1) / 2;
    Configuration c;
    for (int i = 0; i < 8; ++i) {
      c.bytes_of_row[i] = 64;
      c.rows[i] = uint8_t(i < 6 ? rows_ : REGISTER_SIDE);  // registers of B have all rows
    }
    // As assembly, because GCC thinks that _tile_loadconfig reads 8 bytes.
    asm volatile("ldtilecfg %0" : : "m"(c));
    return rows_;
  }

 private:
  struct alignas(64) Configuration {  // as LDTILECFG reads it
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {};
    uint8_t rows[16] = {};
  };
  int rows_ = 0;
};

// Adds the products of 16 pairs of k to the sums. The rows of A are stride_m elements apart, those
// of B ldb elements. All loads come first: where tile instructions do not overlap, that is faster
// by a tenth than loads between the products.
template <bool RIGHT>
HD void multiply_tiles(const bf16_pair* upper, const bf16_pair* lower, int64_t stride_m,
                       const bf16_pair* B, int64_t ldb) {
  _tile_loadd(4, upper, stride_m * sizeof(bf16_pair));
  _tile_loadd(5, lower, stride_m * sizeof(bf16_pair));
  _tile_loadd(6, B, ldb * sizeof(bf16_pair));
  if constexpr (RIGHT) _tile_loadd(7, B + REGISTER_SIDE, ldb * sizeof(bf16_pair));
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (RIGHT) {
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Sets the sums to zero, or to C (M, 16 or, if RIGHT, 32). The lower part starts at row `lower`.
template <bool RIGHT>
HD void begin_sums(const float* C, int64_t ldc, int64_t lower, bool from_C) {
  asm volatile("" ::: "memory");  // GCC does not know what the loads of tiles read
  if (from_C) {
    _tile_loadd(0, C, ldc * sizeof(float));
    _tile_loadd(2, C + lower * ldc, ldc * sizeof(float));
    if constexpr (RIGHT) {
      _tile_loadd(1, C + REGISTER_SIDE, ldc * sizeof(float));
      _tile_loadd(3, C + lower * ldc + REGISTER_SIDE, ldc * sizeof(float));
    }
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (RIGHT) {
      _tile_zero(1);
      _tile_zero(3);
    }
  }
}

// Stores the sums to C, as begin_sums reads them.
template <bool RIGHT>
HD void store_tiles(float* C, int64_t ldc, int64_t lower) {
  _tile_stored(0, C, ldc * sizeof(float));
  _tile_stored(2, C + lower * ldc, ldc * sizeof(float));
  if constexpr (RIGHT) {
    _tile_stored(1, C + REGISTER_SIDE, ldc * sizeof(float));
    _tile_stored(3, C + lower * ldc + REGISTER_SIDE, ldc * sizeof(float));
  }
}

// C (M, 16 or, if RIGHT, 32) (+)= A (M, K) B (K, .), M at most 32 and a row of A contiguous.
// `prefetch(k)` is called for every 16th k.
template <bool RIGHT, class Function>
void tile_product(TileRegisters& registers, int M, int64_t K, const bf16_pair* A, int64_t stride_m,
                  Matrix<const bf16_pair> B, Matrix<float> C, bool accumulate, Function prefetch) {
  const int rows = registers.configure(M);
  const int lower = M - rows;  // the first row of the lower part
  constexpr int WIDTH = RIGHT ? 2 * REGISTER_SIDE : REGISTER_SIDE;  // of C
  begin_sums<RIGHT>(nullptr, 0, lower, false);

  // C is read and written at the end only: its cache lines are fetched meanwhile, a few in each
  // step, because many at once hold up the loads of tiles.
  constexpr int ROWS_PER_STEP = 2;
  int fetched = 0;
  int64_t k = 0;
  for (; k + REGISTER_SIDE <= K; k += REGISTER_SIDE) {
    prefetch(k);
    for (int i = 0; i < ROWS_PER_STEP && fetched < M; ++i, ++fetched)
      for (int n = 0; n < WIDTH; n += REGISTER_SIDE)
        __builtin_prefetch(C.p + fetched * C.ld + n, 1);
    multiply_tiles<RIGHT>(A + k, A + lower * stride_m + k, stride_m, B.p + k * B.ld, B.ld);
  }

  // The last pairs, fewer than 16, go through buffers that are filled up with zeros.
  if (k < K) {
    alignas(64) bf16_pair left[2 * REGISTER_SIDE * REGISTER_SIDE], right[REGISTER_SIDE * WIDTH];
    for (int m = 0; m < M; ++m)
      Vec<bf16_pair>::load(A + m * stride_m + k, K - k).store(left + m * REGISTER_SIDE);
    for (int64_t i = 0; i < REGISTER_SIDE; ++i)
      for (int n = 0; n < WIDTH; n += REGISTER_SIDE)
        (k + i < K ? Vec<bf16_pair>::load(B.p + (k + i) * B.ld + n) : Vec<bf16_pair>(bf16_pair{}))
            .store(right + i * WIDTH + n);
    asm volatile("" ::: "memory");
    multiply_tiles<RIGHT>(left, left + lower * REGISTER_SIDE, REGISTER_SIDE, right, WIDTH);
  }

  if (!accumulate) return store_tiles<RIGHT>(C.p, C.ld, lower);
  alignas(64) float sums[2 * REGISTER_SIDE * WIDTH];
  store_tiles<RIGHT>(sums, WIDTH, lower);
  asm volatile("" ::: "memory");
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < WIDTH; n += REGISTER_SIDE) {
      float* const c = C.p + m * C.ld + n;
      (Vec<float>::load(c) + Vec<float>::load(sums + m * WIDTH + n)).store(c);
    }
}

// Copies A (M, K), whose columns are contiguous, with its rows contiguous and `ld` apart.
HD void transpose_left(int M, int64_t K, LeftOperand<bf16_pair> A, bf16_pair* rows, int64_t ld) {
  for (int64_t k = 0; k < K; k += REGISTER_SIDE)
    for (int m = 0; m < M; m += REGISTER_SIDE) {
      Vec<bf16_pair> square[REGISTER_SIDE];
      for (int i = 0; i < REGISTER_SIDE; ++i)
        square[i] = Vec<bf16_pair>::load(A.p + m + (k + i < K ? k + i : k) * A.stride_k, M - m);
      transpose(square);
      for (int i = 0; i < REGISTER_SIDE && m + i < M; ++i)
        square[i].store(rows + (m + i) * ld + k, K - k);
    }
}
#endif

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
