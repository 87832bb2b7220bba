// The instructions of a warp that Triton's kernels use besides those of memory.h. None of them
// orders memory.
#pragma once
#include <cuda_runtime.h>

#include "memory.h"

namespace ptx {

enum class Shuffle { up, down, bfly, idx };

// shfl.sync, as the pseudocode of its section computes the source lane. `bounds` has the clamp
// value in bits 0 to 4 and the segment mask in bits 8 to 12.
inline uint32_t shuffle(Shuffle mode, uint32_t value, uint32_t by, uint32_t bounds, uint32_t lanes,
                        int line) {
  const uint32_t lane = simt::globals.current->lane, segment = bounds >> 8 & 31;
  const uint32_t last = (lane & segment) | (bounds & 31 & ~segment);
  const uint32_t first = lane & segment;
  by &= 31;
  uint32_t from = 0;
  bool inside = false;
  switch (mode) {
    case Shuffle::up:
      from = lane - by;
      inside = int(from) >= int(last);
      break;
    case Shuffle::down:
      from = lane + by;
      inside = from <= last;
      break;
    case Shuffle::bfly:
      from = lane ^ by;
      inside = from <= last;
      break;
    case Shuffle::idx:
      from = first | (by & ~segment);
      inside = from <= last;
      break;
  }
  return simt::shuffle(lanes, value, inside ? from : lane, line);
}

// ldmatrix: lane 8 i + r holds the address of row r of matrix i, and lane l receives two elements
// of each matrix: row l / 4, columns 2 (l % 4) and the next; with .trans column l / 4 and those
// rows.
template <int N>
struct Matrices {
  uint16_t row[8];
  uint32_t out[N];
  bool transposed;
};
template <int N>
void exchange_matrices(void** arguments, unsigned lanes) {
  if (lanes != ~0u) simt::fault_in_kernel("ldmatrix by the lanes %08x, must be all", lanes);
  const auto lane = [arguments](int l) {
    return static_cast<Matrices<N>*>(arguments[l]);
  };
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < N; ++i) {
      const int own = l / 4, pair = l % 4 * 2;
      const bool t = lane(l)->transposed;
      const uint32_t low = t ? lane(8 * i + pair)->row[own] : lane(8 * i + own)->row[pair];
      const uint32_t high = t ? lane(8 * i + pair + 1)->row[own] : lane(8 * i + own)->row[pair + 1];
      lane(l)->out[i] = high << 16 | low;
    }
}
template <int N>
inline void load_matrices(const char* p, uint32_t (&out)[N], bool transposed, int line) {
  Matrices<N> m{{}, {}, transposed};
  if (simt::globals.current->lane < 8 * N) load(p, m.row);
  simt::together(~0u, &m, exchange_matrices<N>, line);
  std::memcpy(out, m.out, sizeof out);
}

// stmatrix, the reverse: lane 8 i + r holds the address of row r of matrix i, and lane l holds two
// elements of each matrix, those that ldmatrix gives it.
template <int N>
void gather_matrices(void** arguments, unsigned lanes) {
  if (lanes != ~0u) simt::fault_in_kernel("stmatrix by the lanes %08x, must be all", lanes);
  const auto lane = [arguments](int l) {
    return static_cast<Matrices<N>*>(arguments[l]);
  };
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < N; ++i)
      for (int e = 0; e < 2; ++e) {
        const int own = l / 4, pair = l % 4 * 2 + e;
        const bool t = lane(l)->transposed;
        const uint16_t value = uint16_t(lane(l)->out[i] >> 16 * e);
        lane(8 * i + (t ? pair : own))->row[t ? own : pair] = value;
      }
}
template <int N>
inline void store_matrices(char* p, const uint32_t (&values)[N], bool transposed, int line) {
  Matrices<N> m{{}, {}, transposed};
  std::memcpy(m.out, values, sizeof values);
  simt::together(~0u, &m, gather_matrices<N>, line);
  if (simt::globals.current->lane < 8 * N) store(p, m.row);
}

// cp.async of one thread: what it copies arrives when the thread waits for it, and not before, so
// that a missing wait shows. Bytes beyond those of the source are zero.
class AsyncCopies {
 public:
  void copy(char* to, const char* from, size_t bytes, size_t from_bytes) {
    pending_.push_back({to, from, bytes, from_bytes < bytes ? from_bytes : bytes, group_});
  }
  void commit() { ++group_; }
  // Waits until only the newest `groups` groups are under way.
  void wait(unsigned groups) {
    size_t done = 0;
    for (; done < pending_.size() && pending_[done].group + groups < group_; ++done) {
      const Copy& c = pending_[done];
      std::memset(c.to, 0, c.bytes);
      std::memcpy(c.to, c.from, c.from_bytes);
    }
    pending_.erase(pending_.begin(), pending_.begin() + long(done));
  }

 private:
  struct Copy {
    char* to;
    const char* from;
    size_t bytes, from_bytes;
    unsigned group;
  };
  std::vector<Copy> pending_;
  unsigned group_ = 0;
};

}  // namespace ptx
