// Products with weights in 8 bits by vpdpbusd of AVX-512 VNNI, which multiplies 64 bytes without a
// sign by 64 bytes with one and adds each four neighbouring products to a sum of 32 bits.
//
// A row of A is rounded to multiples of its unit, a power of two: the numbers x / unit are whole
// and have three digits of base 256, each from -128 to 127,
//   x = unit (65536 d2 + 256 d1 + d0)    x . w = unit (65536 d2 . w + 256 d1 . w + d0 . w)
// where the products of digits are exact. The unit is so small that x is rounded by at most 2^-23
// of the largest magnitude of its row, about as much as fp32 rounds one sum of the dot product.
//
// The instruction takes w + 128, which is not negative, so the sums begin with -128 times those of
// the digits. Zeros follow a row of digits up to whole vectors.
//
// What limits it: from two rows on vpdpbusd itself, three for 64 numbers in place of four
// multiply-adds and four conversions. For one row it also is reading W.
#pragma once
#include <new>

#include "cpu/buffer.h"
#include "cpu/gemm/int8_rows.h"
#include "cpu/simd/transpose.h"

#ifdef __AVX512VNNI__
namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int DIGITS = 3;
constexpr int64_t BYTES = VECTOR_BYTES;  // the numbers whose digits of one place fill a vector

// Up to this many rows of A it is faster than the product of fp32 with converted weights.
constexpr int64_t MAX_DIGIT_ROWS = 48;
// The longest row whose sums of digits stay far below 2^31.
constexpr int64_t MAX_DIGIT_DEPTH = int64_t(1) << 18;

using Integers = Vec<float>::Mask;

// A row of A as digits: for each 64 numbers the first digits, the second ones and the third ones.
struct DigitRow {
  int8_t* digits;   // (blocks, DIGITS, BYTES)
  Integers* start;  // (DIGITS,)  what the sums begin with
  float unit;
};

// Returns the unit of a row: the power of two with which the largest magnitude is at most
// 127 (65536 + 256 + 1) units. 0 for a row that is not finite, or whose unit would be a subnormal
// number.
HD float unit_of(const float* x, int64_t K) {
  Integers most{};
  for (int64_t k = 0; k < K; k += LANES<float>) {
    const Integers bits = (Integers)Vec<float>::load(x + k, K - k).v & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  const uint32_t largest = uint32_t(_mm512_reduce_max_epi32((__m512i)most));
  // Adding this leads to the next exponent if the mantissa is above 127 (65536 + 256 + 1) / 2^22.
  constexpr uint32_t CARRY = (1u << 23) - 2 * (127 * (65536 + 256 + 1) - (1u << 22));
  const uint32_t exponent = (largest + CARRY) >> 23;
  if (exponent >= 255 || (largest && exponent < 23)) return 0;
  const uint32_t bits = ((exponent < 23 ? 23 : exponent) - 22) << 23;  // below 23: a row of zeros
  float unit;
  memcpy(&unit, &bits, sizeof unit);
  return unit;
}

// Writes the digits of a row x (K,) and what its sums begin with.
HD void write_digits(const float* x, int64_t K, const DigitRow& row) {
  const Vec<float> per_unit(1 / row.unit);
  Integers sums[DIGITS] = {};
  const __m512i offset = _mm512_set1_epi8(-128);  // 128 without a sign
  int8_t* to = row.digits;
  for (int64_t k = 0; k < K; k += BYTES, to += DIGITS * BYTES) {
    for (int64_t i = 0; i < BYTES; i += LANES<float>) {
      const Vec<float> numbers =
          k + i < K ? Vec<float>::load(x + k + i, K - k - i) * per_unit : Vec<float>(0.f);
      Integers rest = (Integers)_mm512_cvtps_epi32(__m512(numbers.v));
      for (int digit = 0; digit < DIGITS; ++digit) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + digit * BYTES + i),
                         _mm512_cvtepi32_epi8((__m512i)rest));
        rest = (rest + 128) >> 8;
      }
    }
    for (int digit = 0; digit < DIGITS; ++digit)
      sums[digit] = (Integers)_mm512_dpbusd_epi32((__m512i)sums[digit], offset,
                                                  _mm512_loadu_si512(to + digit * BYTES));
  }
  for (int digit = 0; digit < DIGITS; ++digit)
    row.start[digit] = -sums[digit];
}

// The dot products of M rows of A and N rows of W in units of the rows of A, not yet summed over
// the lanes: sums[m * stride + n]. (With loads under a mask everywhere GCC 12 has one copy of the
// loop's body, and holds all sums in registers.)
template <int ROWS, int COLUMNS>
HD void digit_tile(int64_t K, const DigitRow* A, const int8_t* const* W, Vec<float>* sums,
                   int stride) {
  Integers c[ROWS][COLUMNS][DIGITS];
#pragma GCC unroll 2
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
#pragma GCC unroll 3
      for (int digit = 0; digit < DIGITS; ++digit)
        c[m][n][digit] = A[m].start[digit];

  const __m512i offset = _mm512_set1_epi8(-128);
  const int8_t* digits[ROWS];
  for (int m = 0; m < ROWS; ++m)
    digits[m] = A[m].digits;
  const int8_t* next = W[0] + 3 * COLUMNS * K;  // rows of a later tile, most often
  for (int64_t k = 0; k < K; k += BYTES) {
    const __mmask64 mask = K - k >= BYTES ? ~uint64_t(0) : (uint64_t(1) << (K - k)) - 1;
    Integers a[ROWS][DIGITS];
#pragma GCC unroll 2
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 3
      for (int digit = 0; digit < DIGITS; ++digit)
        a[m][digit] = (Integers)_mm512_loadu_si512(digits[m] + k * DIGITS + digit * BYTES);
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n) {
      __builtin_prefetch(next + COLUMNS * k + n * BYTES);
      const __m512i w = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, W[n] + k), offset);
#pragma GCC unroll 2
      for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 3
        for (int digit = 0; digit < DIGITS; ++digit)
          c[m][n][digit] =
              (Integers)_mm512_dpbusd_epi32((__m512i)c[m][n][digit], w, (__m512i)a[m][digit]);
    }
  }

#pragma GCC unroll 2
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n) {
      Vec<float> parts[DIGITS];
#pragma GCC unroll 3
      for (int digit = 0; digit < DIGITS; ++digit)
        parts[digit] = as_numbers<float>(c[m][n][digit]);
      sums[m * stride + n] = (parts[2] * 256.f + parts[1]) * 256.f + parts[0];
    }
}

// Elements [n, n + columns) of the rows [row, row + M) of C: as many dot products as a vector has
// lanes.
template <int ROWS>
HD void multiply_digits(const cpu::Int8Product& p, const DigitRow* rows, int64_t row, int64_t n,
                        int64_t columns) {
  // If fewer rows of W are left than a tile has, the first one takes the empty places.
  constexpr int COLUMNS = LANES<float> / ROWS, HALF = COLUMNS / 2;
  const int8_t* W[COLUMNS];
  for (int i = 0; i < COLUMNS; ++i)
    W[i] = p.W + (n + (i < columns ? i : 0)) * p.K;
  Vec<float> sums[LANES<float>];
  digit_tile<ROWS, HALF>(p.K, rows + row, W, sums, COLUMNS);
  digit_tile<ROWS, HALF>(p.K, rows + row, W + HALF, sums + HALF, COLUMNS);
  float dots[2 * LANES<float>];  // twice, since a compiler warns of loads beyond the columns
  horizontal_sums(sums).store(dots);
  for (int m = 0; m < ROWS; ++m) {
    float* const c = p.C + (row + m) * p.ldc + n;
    const Vec<float> scale = Vec<float>::load(p.scale + n, columns);
    const Vec<float> added = p.accumulate ? Vec<float>::load(c, columns)
                             : p.bias     ? Vec<float>::load(p.bias + n, columns)
                                          : Vec<float>(0.f);
    const Vec<float> dot = Vec<float>::load(dots + m * COLUMNS, columns), unit(rows[row + m].unit);
    // Of a large unit and a small scale the scale is first, so that nothing overflows on the way.
    const Vec<float> first = rows[row + m].unit > 1 ? min_(unit, scale) : unit;
    const Vec<float> second = rows[row + m].unit > 1 ? max_(unit, scale) : scale;
    (dot * first * second + added).store(c, columns);
  }
}

// Computes what product_of_int8_rows does. A row of A that has no unit is multiplied in fp32. So
// are all rows if there is no memory for the digits: an exception would end one thread of a team,
// for which the others wait.
void product_of_digits(const cpu::Int8Product& p) try {
  if (p.K > MAX_DIGIT_DEPTH) return product_of_int8_rows(p);
  const int64_t blocks = (p.K + BYTES - 1) / BYTES, size = (blocks + 1) * DIGITS * BYTES;
  Buffer<int8_t> memory(p.M * size);
  Buffer<DigitRow> rows(p.M);
  for (int64_t m = 0; m < p.M; ++m) {
    const float* x = p.A + m * p.lda;
    int8_t* const digits = memory + m * size;
    rows[m] = {digits, reinterpret_cast<Integers*>(digits + blocks * DIGITS * BYTES),
               unit_of(x, p.K)};
    if (rows[m].unit == 0)
      memset(digits, 0, size);
    else
      write_digits(x, p.K, rows[m]);
  }
  // All rows of A pass while a few rows of W are in the L1 cache.
  const int64_t step = p.M == 1 ? LANES<float> : LANES<float> / 2;
  for (int64_t n = 0; n < p.N; n += step) {
    const int64_t columns = p.N - n < step ? p.N - n : step;
    int64_t m = 0;
    for (; m + 2 <= p.M; m += 2)
      multiply_digits<2>(p, rows, m, n, columns);
    if (m < p.M) multiply_digits<1>(p, rows, m, n, columns);
  }
  fill_last_vectors(p);
  for (int64_t m = 0; m < p.M; ++m)
    if (rows[m].unit == 0) {
      cpu::Int8Product row = p;
      row.M = 1;
      row.A += m * p.lda;
      row.C += m * p.ldc;
      product_of_int8_rows(row);
    }
} catch (const std::bad_alloc&) {
  product_of_int8_rows(p);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
#endif
