// The Python module fusedseq._C: what only C++ knows. It sees no torch header and needs no torch; the operators are in
// _ops.so, which unlike this module is not for one version of Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "philox.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("philox", &philox, py::arg("seed"), py::arg("counter_low"), py::arg("counter_high") = 0,
        "The four words of the Philox4x32-10 block with this 64-bit key and 128-bit counter.");
  m.def("cpu_features", &cpu_features, "The instruction sets of this machine that the kernels could use: {name: found}.");
  m.attr("compiler") = __VERSION__;
}
