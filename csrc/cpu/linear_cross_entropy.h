// The cross-entropy of a linear map's rows, by blocks of the vocabulary: a block of logits is made by the product of
// gemm.h and used while it is in the second cache, for the statistics first and, once they are known, for the gradients.
//
// Two schedules. Where some hundreds of rows of logits fit into KEPT bytes, rows go by in chunks, whose logits wait between
// the two uses: three products, and a chunk reads W twice and adds to dW. Otherwise all rows go by at once, and the second
// use makes each block anew: four products, but W is read twice and dW written once, whatever the number of rows.
#pragma once
#include "linear.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Below every logit: not an infinity, of which differences would be NaN.
template <class T> constexpr T LOWEST = T(-1e30);

// Of a row's logits so far.
template <class T> struct Statistics {
  T top;            // the largest
  int64_t argmax;   // its first place
  double sum;       // of exp(z - top)
  double weighted;  // of class_weights * z
};

template <class T> void add(const Statistics<T>& from, Statistics<T>& to) {
  if (from.top > to.top) {
    to.sum = to.sum * ::exp(double(to.top - from.top)) + from.sum;
    to.top = from.top, to.argmax = from.argmax;
  } else {
    to.sum += from.sum * ::exp(double(from.top - to.top));
  }
  to.weighted += from.weighted;
}

template <class T> class CrossEntropy {
 public:
  CrossEntropy(const cpu::LinearCrossEntropy<T>& l, int parts)
      : l(l), parts(parts), gradients(l.dx || l.dW || l.db), scale(T(1 / l.temperature)), barrier(parts) {
    const int64_t fitting = KEPT / int64_t(sizeof(T)) / stride<T>(l.V) / SUB * SUB;
    keep = gradients && l.statistics && fitting >= FEWEST;
    rows = keep ? (fitting < MOST ? fitting : MOST) : l.N;
    if (keep) {  // chunks of the same size
      const int64_t chunks = (l.N + rows - 1) / rows;
      rows = ((l.N + chunks - 1) / chunks + SUB - 1) / SUB * SUB;
    }
    if (rows > l.N) rows = l.N;
    const int64_t padded = round_up<T>(COLUMNS);
    ld = stride<T>(keep ? l.V : COLUMNS);
    logits = Buffer<T>(keep ? rows * ld : parts * SUB * ld);
    packed = Buffer<T>(parts * l.E * padded);
    if (l.dx) packed_rows = Buffer<T>(parts * packed_size<T>(COLUMNS, l.E)), partial = Buffer<T>((parts - 1) * rows * l.E);
    if (l.dW) scratch = Buffer<T>(parts * scratch_size);
    if (l.db) sums = Buffer<T>(parts * 2 * ld_sums);
    if (l.statistics) statistics = Buffer<Statistics<T>>(parts * rows), target_logit = Buffer<T>(rows);
    if (gradients) coefficients = Buffer<Coefficients>(rows);
    active = Buffer<char>(parts);
    memset(active, 0, parts);
  }

  // Parts [begin, end) of the team: they own columns of the vocabulary, and share the rows where all columns come together.
  void run(int64_t begin, int64_t end) {
    active[begin] = 1;
    const Range own = own_columns<T>(l.V, begin, end, parts);
    for (int64_t r0 = 0; r0 < l.N; r0 += rows) {
      const int64_t r1 = r0 + rows < l.N ? r0 + rows : l.N;
      if (l.statistics) {
        for (int64_t i = 0; i < r1 - r0; ++i) statistics[begin * rows + i] = {LOWEST<T>, 0, 0, 0};
        each_block(own, [&](Range block) { first_use(begin, block, r0, r1); });
        barrier.wait(int(end - begin));
      }
      const int64_t n = r1 - r0;
      for (int64_t i = n * begin / parts; i < n * end / parts; ++i) {
        if (l.statistics) finish_row(r0 + i, i);
        if (gradients) coefficients[i] = row_coefficients(r0 + i);
      }
      if (!gradients && r1 == l.N) return;
      barrier.wait(int(end - begin));
      if (!gradients) continue;
      each_block(own, [&](Range block) { second_use(begin, block, own, r0, r1); });
      if (!l.dx) continue;
      barrier.wait(int(end - begin));
      for (int64_t p = 1; p < parts; ++p)
        for (int64_t i = n * begin / parts; active[p] && i < n * end / parts; ++i)
          add_row((const T*)partial + ((p - 1) * rows + i) * l.E, l.dx + (r0 + i) * l.E, l.E, T(1));
    }
  }

 private:
  static constexpr int64_t COLUMNS = 512, SUB = 288;  // a block of logits, which stays in the second cache
  static constexpr int64_t KEPT = int64_t(160) << 20, FEWEST = 256, MOST = 3 * SUB;
  static constexpr int64_t ld_sums = COLUMNS + 16;
  static constexpr int64_t scratch_size = (TRANSPOSED_SCRATCH<T> + LANES<T> - 1) / LANES<T> * LANES<T>;

  // A row's gradient with respect to its logits before the temperature is
  // p * softmax - target at the target - classes * class_weights.
  struct Coefficients {
    T p, target, classes;
  };

  const cpu::LinearCrossEntropy<T>& l;
  int parts;
  bool gradients, keep;
  T scale;  // of the logits
  int64_t rows, ld;
  Buffer<T> logits;                   // keep: (rows, ld); else (parts, SUB, ld)
  Buffer<T> packed, packed_rows;      // of each part, a block's columns of W^T, and of W
  Buffer<T> partial;                  // (parts - 1, rows, E)  of dx; the first part's is dx itself
  Buffer<T> scratch, sums, target_logit;
  Buffer<Statistics<T>> statistics;   // (parts, rows)
  Buffer<Coefficients> coefficients;  // (rows,)
  Buffer<char> active;                // parts that run; the others' columns are theirs
  Barrier barrier;

  template <class F> void each_block(Range own, F block) {
    for (int64_t c = own.begin; c < own.end; c += COLUMNS) block(Range{c, c + COLUMNS < own.end ? c + COLUMNS : own.end});
  }

  T* logits_of(int64_t part, Range block, int64_t row) {
    return keep ? logits + row * ld + block.begin : logits + part * SUB * ld;
  }

  void pack_block(int64_t part, Range block) {
    pack(l.W + block.begin * l.E, 1, l.E, l.E, block.size(), packed + part * l.E * round_up<T>(COLUMNS));
  }
  void make_logits(int64_t part, Range block, int64_t s0, int64_t s1, T* z) {
    gemm(s1 - s0, l.E, l.x + s0 * l.E, l.E, (const T*)packed + part * l.E * round_up<T>(COLUMNS), block.size(), z, ld, true,
         false, l.b ? l.b + block.begin : nullptr);
    for (int64_t i = 0; i < s1 - s0; ++i) {
      T* const row = z + i * ld;
      if (l.temperature != 1)
        for (int64_t j = 0; j < block.size(); j += LANES<T>) (Vec<T>::load(row + j) * Vec<T>(scale)).store(row + j);
      for (int64_t j = block.size(); j % LANES<T>; ++j) row[j] = LOWEST<T>;  // so that rows are whole vectors
    }
  }

  void first_use(int64_t part, Range block, int64_t r0, int64_t r1) {
    pack_block(part, block);
    for (int64_t s0 = r0; s0 < r1; s0 += SUB) {
      const int64_t s1 = s0 + SUB < r1 ? s0 + SUB : r1;
      T* z = logits_of(part, block, s0 - r0);
      make_logits(part, block, s0, s1, z);
      for (int64_t s = s0; s < s1; ++s, z += ld) {
        take(z, block, statistics[part * rows + s - r0]);
        const int64_t y = l.target[s];
        if (block.begin <= y && y < block.end) target_logit[s - r0] = z[y - block.begin];
      }
    }
  }

  void take(const T* z, Range block, Statistics<T>& s) {
    using V = Vec<T>;
    constexpr int L = LANES<T>;
    const int64_t n = block.size();
    V high(LOWEST<T>), total(T(0));
    for (int64_t j = 0; j < n; j += L) high = max_(high, V::load(z + j));
    Statistics<T> here{largest(high), 0, 0, 0};
    if (here.top > s.top)
      for (int64_t j = 0; j < n; ++j)
        if (z[j] == here.top) {
          here.argmax = block.begin + j;
          break;
        }
    const V top(here.top > s.top ? here.top : s.top);
    for (int64_t j = 0; j < n; j += L) total = total + exp_(V::load(z + j) - top);
    here.sum = sum(total);
    if (l.label_smoothing != 0) here.weighted = weighted_sum(z, block);
    if (here.top <= s.top) here.top = s.top;
    add(here, s);
  }

  double weighted_sum(const T* z, Range block) {
    Vec<T> total(T(0));
    for (int64_t j = 0, n = block.size(); j < n; j += LANES<T>) {
      const Vec<T> x = Vec<T>::load(z + j, n - j);
      total = total + (l.class_weights ? x * Vec<T>::load(l.class_weights + block.begin + j, n - j) : x);
    }
    return sum(total);
  }

  T weight(int64_t row) { return l.class_weights ? l.class_weights[l.target[row]] : T(1); }

  // Row n, the i-th of its chunk: brings the parts together.
  void finish_row(int64_t n, int64_t i) {
    Statistics<T> s = statistics[i];
    for (int64_t p = 1; p < parts; ++p)
      if (active[p]) add(statistics[p * rows + i], s);
    const double lse = s.top + ::log(s.sum), log_prob = target_logit[i] - lse, w = weight(n);
    l.lse[n] = T(lse), l.log_prob[n] = T(log_prob), l.argmax[n] = s.argmax;
    l.loss[n] = T(-(1 - l.label_smoothing) * w * log_prob + l.label_smoothing / double(l.V) * (l.weights_sum * lse - s.weighted) +
                  l.z_loss * w * lse * lse);
  }

  Coefficients row_coefficients(int64_t n) {
    const double w = weight(n), dloss = l.dloss ? l.dloss[n] : l.dloss_of_all, dlog_prob = l.dlog_prob ? l.dlog_prob[n] : 0.;
    const double target = (1 - l.label_smoothing) * w * dloss - dlog_prob, classes = l.label_smoothing / double(l.V) * dloss;
    const double p = target + classes * l.weights_sum + 2 * l.z_loss * w * l.lse[n] * dloss + (l.dlse ? l.dlse[n] : 0.);
    return {T(p / l.temperature), T(target / l.temperature), T(classes / l.temperature)};
  }

  void second_use(int64_t part, Range block, Range own, int64_t r0, int64_t r1) {
    const int64_t n = block.size(), E = l.E;
    T* const rows_of_W = packed_rows + part * packed_size<T>(COLUMNS, E);
    T* const dx = part ? partial + (part - 1) * rows * E : l.dx + r0 * E;
    if (!keep) pack_block(part, block);
    if (l.dx) pack(l.W + block.begin * E, E, 1, n, E, rows_of_W);
    for (int64_t s0 = r0; s0 < r1; s0 += SUB) {
      const int64_t s1 = s0 + SUB < r1 ? s0 + SUB : r1;
      T* const z = logits_of(part, block, s0 - r0);
      if (!keep) make_logits(part, block, s0, s1, z);
      for (int64_t s = s0; s < s1; ++s) differentiate(z + (s - s0) * ld, block, s, coefficients[s - r0]);
      if (l.dx) gemm(s1 - s0, n, z, ld, (const T*)rows_of_W, E, dx + (s0 - r0) * E, E, false, block.begin > own.begin);
      if (l.dW)
        gemm_transposed(s1 - s0, z, ld, 0, n, l.x + s0 * E, E, E, l.dW + block.begin * E, E, s0 > 0,
                        scratch + part * scratch_size);
      if (l.db) {
        T* const total = sums + part * 2 * ld_sums;
        column_sums(s1 - s0, (const T*)z, ld, n, total, total + ld_sums);
        if (s0 == 0) memset(l.db + block.begin, 0, n * sizeof(T));
        add_row((const T*)total, l.db + block.begin, n, T(1));
      }
    }
  }

  // A block of row n's logits becomes their gradient.
  void differentiate(T* z, Range block, int64_t n, Coefficients c) {
    using V = Vec<T>;
    constexpr int L = LANES<T>;
    const int64_t columns = block.size();
    const V lse(l.lse[n]), p(c.p), classes(c.classes);
    if (l.class_weights && c.classes != 0)
      for (int64_t j = 0; j < columns; j += L)
        (p * exp_(V::load(z + j) - lse) - classes * V::load(l.class_weights + block.begin + j, columns - j)).store(z + j);
    else
      for (int64_t j = 0; j < columns; j += L) (p * exp_(V::load(z + j) - lse) - classes).store(z + j);
    const int64_t y = l.target[n];
    if (block.begin <= y && y < block.end) z[y - block.begin] -= c.target;
  }
};

template <class T> void linear_cross_entropy(const cpu::LinearCrossEntropy<T>& l, cpu::Parallel run, int threads) {
  CrossEntropy<T> team(l, threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) { team.run(begin, end); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
