// What the kernels of loop_forward.cuh and loop_backward.cuh share: their common arguments, and
// zoneout.
#pragma once
#include "cuda/recurrence/thread_elements.cuh"

namespace fusedseq::cuda {

// Arguments of the kernels of the cell and of the state, the same in every step and direction.
struct LoopArguments {
  int64_t steps, B, H, Hp;
  bool reverse, training;
  const int64_t *seed, *lengths;  // (), (B,) or null
  const uint8_t* starts;          // (T, B) or null
  Mask state, zoneout_h, zoneout_c;
  explicit LoopArguments(const Recurrence& r)
      : steps(r.steps),
        B(r.B),
        H(r.H),
        Hp(r.Hp),
        reverse(r.reverse),
        training(r.training),
        seed(r.seed),
        lengths(r.lengths),
        starts(r.starts),
        state(r.state),
        zoneout_h(r.zoneout_h),
        zoneout_c(r.zoneout_c) {}
};

// Zoneout: the weight of each unit's new value, of which the old value has the rest. In training 1
// or 0, drawn at random; else its expectation. Without zoneout 1.
template <class C>
__device__ void zoneout(const LoopArguments& a, const Mask& m, int64_t t, int64_t b, int64_t j,
                        Elements<C>& update) {
  const bool random = m.threshold && a.training;
  const unsigned bits = random ? keep_bits(m, a.seed, mask_row(a, t, b), j, a.H) : ~0u;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i)
    update[i] = m.threshold && !a.training ? C(1 - m.p) : C(bits >> i & 1);
}

// The cell's own parameters of a thread's units, and those of one unit as the cell reads them.
template <class C, int COUNT>
struct UnitVectors {
  Elements<C> all[COUNT];
  int i;
  __device__ C operator[](int v) const { return all[v][i]; }
};

}  // namespace fusedseq::cuda
