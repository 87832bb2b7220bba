// The Python module fusedseq._C: what only C++ knows. It sees no torch header and needs no torch; the operators are in
// _ops.so, which unlike this module is not for one version of Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "philox.h"
#include "recurrence_plan.h"

namespace py = pybind11;

namespace {

std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> philox(uint64_t seed, uint64_t counter_low, uint64_t counter_high) {
  uint32_t c[4] = {uint32_t(counter_low), uint32_t(counter_low >> 32), uint32_t(counter_high), uint32_t(counter_high >> 32)};
  fusedseq::philox(seed, c, fusedseq::Multiply{});
  return {c[0], c[1], c[2], c[3]};
}

std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define FEATURE(name) {name, bool(__builtin_cpu_supports(name))}
  return {FEATURE("sse2"),     FEATURE("avx"),      FEATURE("avx2"),     FEATURE("fma"),      FEATURE("bmi2"),
          FEATURE("avx512f"),  FEATURE("avx512vl"), FEATURE("avx512bw"), FEATURE("avx512dq"), FEATURE("avx512cd")};
#undef FEATURE
#else
  return {};
#endif
}

py::dict layout(const fusedseq::cuda::Layout& l) {
  py::dict d;
#define ENTRY(name) d[#name] = l.name;
  ENTRY(replicas) ENTRY(blocks) ENTRY(columns_h) ENTRY(columns_x) ENTRY(groups) ENTRY(tiles) ENTRY(wide) ENTRY(kept) ENTRY(rows) ENTRY(shared)
#undef ENTRY
  return d;
}

py::dict recurrence_plan(int64_t steps, int64_t B, int64_t X, int64_t H, int64_t rounds, int64_t on_x, int64_t on_h, int element, int sms,
                         int64_t shared, bool cooperative, int64_t shortest) {
  const auto plan = fusedseq::cuda::recurrence_plan({steps, B, X, H, rounds, on_x, on_h, element}, {sms, shared, cooperative}, shortest);
  py::dict d;
  d["persistent"] = plan.persistent, d["why"] = plan.why;
  d["forward"] = layout(plan.forward), d["backward"] = layout(plan.backward);
  return d;
}

using Size = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // X, H, rounds, on_x, on_h

py::dict wavefront_plan(int64_t steps, int64_t B, const Size& first, const Size& second, int element, int sms, int64_t shared,
                        bool cooperative, int64_t shortest) {
  const auto size = [&](const Size& s) {
    const auto [X, H, rounds, on_x, on_h] = s;
    return fusedseq::cuda::RecurrenceSize{steps, B, X, H, rounds, on_x, on_h, element};
  };
  const auto w = fusedseq::cuda::wavefront_plan(size(first), size(second), {sms, shared, cooperative}, shortest);
  py::dict d;
  d["persistent"] = w.persistent, d["why"] = w.why;
  d["forward"] = py::make_tuple(layout(w.forward[0]), layout(w.forward[1]));
  d["backward"] = py::make_tuple(layout(w.backward[0]), layout(w.backward[1]));
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("philox", &philox, py::arg("seed"), py::arg("counter_low"), py::arg("counter_high") = 0,
        "The four words of the Philox4x32-10 block with this 64-bit key and 128-bit counter.");
  m.def("cpu_features", &cpu_features, "The instruction sets of this machine that the kernels could use: {name: found}.");
  m.def("recurrence_plan", &recurrence_plan, py::arg("steps"), py::arg("B"), py::arg("X"), py::arg("H"), py::arg("rounds"),
        py::arg("on_x"), py::arg("on_h"), py::arg("element"), py::arg("sms"), py::arg("shared"), py::arg("cooperative"),
        py::arg("shortest") = fusedseq::cuda::SHORTEST,
        "Which engine runs a recurrence on a GPU with this many SMs and bytes of shared memory for a block, why, and the layout of the\n"
        "persistent one: csrc/recurrence_plan.h. on_x, on_h: different weights of the rounds on x, on h;\n"
        "element: bytes of the tensors' dtype.");
  m.def("wavefront_plan", &wavefront_plan, py::arg("steps"), py::arg("B"), py::arg("first"), py::arg("second"), py::arg("element"),
        py::arg("sms"), py::arg("shared"), py::arg("cooperative"), py::arg("shortest") = fusedseq::cuda::SHORTEST,
        "Whether two layers run at once, each on half of the SMs, why, and the layouts of the first and the second, as of\n"
        "recurrence_plan. first, second: (X, H, rounds, on_x, on_h).");
  m.attr("compiler") = __VERSION__;
}
