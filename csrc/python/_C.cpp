// The Python module fusedseq._C: functions of the C++ code for tests and for fused.explain. It
// includes no torch header and does not need torch. The operators are in _ops.so, which, unlike
// this module, does not depend on the version of Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>

#include "cuda/recurrence/plan.h"
#include "math/philox.h"

namespace py = pybind11;

namespace {

std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> philox(uint64_t seed, uint64_t counter_low,
                                                          uint64_t counter_high) {
  uint32_t c[4] = {uint32_t(counter_low), uint32_t(counter_low >> 32), uint32_t(counter_high),
                   uint32_t(counter_high >> 32)};
  fusedseq::philox(seed, c, fusedseq::Multiply{});
  return {c[0], c[1], c[2], c[3]};
}

std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // A macro, because __builtin_cpu_supports takes a literal only.
#define FEATURE(name)                        \
  {                                          \
    name, bool(__builtin_cpu_supports(name)) \
  }
  return {FEATURE("sse2"),     FEATURE("avx"),     FEATURE("avx2"),     FEATURE("fma"),
          FEATURE("bmi2"),     FEATURE("avx512f"), FEATURE("avx512vl"), FEATURE("avx512bw"),
          FEATURE("avx512dq"), FEATURE("avx512cd")};
#undef FEATURE
#else
  return {};
#endif
}

// A layout of csrc/cuda/recurrence/plan.h as a dict.
py::dict layout(const fusedseq::cuda::Layout& l) {
  py::dict d;
  d["slices"] = l.slices;
  d["replicas"] = l.replicas;
  d["blocks"] = l.blocks;
  d["columns_h"] = l.columns_h;
  d["columns_x"] = l.columns_x;
  d["groups"] = l.groups;
  d["tiles"] = l.tiles;
  d["wide"] = l.wide;
  d["resident"] = l.resident;
  d["plain"] = l.plain;
  d["words"] = l.words;
  d["slice_rows"] = l.slice_rows;
  d["rows"] = l.rows;
  d["shared"] = l.shared;
  return d;
}

// The protocol of a name; `function` is for the message.
fusedseq::cuda::Protocol protocol_of(const std::string& name, const char* function) {
  using fusedseq::cuda::Protocol;
  static const std::map<std::string, Protocol> KNOWN{
      {"estimate", Protocol::by_estimate}, {"flags", Protocol::flags}, {"words", Protocol::words}};
  const auto found = KNOWN.find(name);
  if (found != KNOWN.end()) return found->second;
  throw py::value_error(std::string(function) +
                        ": protocol must be estimate, flags or words, got " + name);
}

int exchange_cycles(const std::string& protocol) {
  return fusedseq::cuda::plan::exchange_cycles(protocol_of(protocol, "exchange_cycles"));
}

py::dict recurrence_plan(int64_t steps, int64_t B, int64_t X, int64_t H, int64_t rounds,
                         int64_t on_x, int64_t on_h, int element, int sms, int64_t shared,
                         bool cooperative, int64_t shortest, const std::string& protocol,
                         int64_t gates, bool cells) {
  const auto plan = fusedseq::cuda::recurrence_plan(
      {steps, B, X, H, rounds, on_x, on_h, element, gates, cells}, {sms, shared, cooperative},
      shortest, protocol_of(protocol, "recurrence_plan"));
  py::dict d;
  d["persistent"] = plan.persistent;
  d["why"] = plan.why;
  d["forward"] = layout(plan.forward);
  d["backward"] = layout(plan.backward);
  return d;
}

using Size = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // X, H, rounds, on_x, on_h

py::dict wavefront_plan(int64_t steps, int64_t B, const Size& first, const Size& second,
                        int element, int sms, int64_t shared, bool cooperative, int64_t shortest) {
  const auto size = [&](const Size& s) {
    const auto [X, H, rounds, on_x, on_h] = s;
    return fusedseq::cuda::RecurrenceSize{steps, B, X, H, rounds, on_x, on_h, element};
  };
  const auto w = fusedseq::cuda::wavefront_plan(size(first), size(second),
                                                {sms, shared, cooperative}, shortest);
  py::dict d;
  d["persistent"] = w.persistent;
  d["why"] = w.why;
  d["forward"] = py::make_tuple(layout(w.forward[0]), layout(w.forward[1]));
  d["backward"] = py::make_tuple(layout(w.backward[0]), layout(w.backward[1]));
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("philox", &philox, py::arg("seed"), py::arg("counter_low"), py::arg("counter_high") = 0,
        "The four words of the Philox4x32-10 block with this 64-bit key and 128-bit counter.");
  m.def(
      "cpu_features", &cpu_features,
      "Which instruction sets this machine has, of those that the kernels can use: {name: bool}.");
  m.def("recurrence_plan", &recurrence_plan, py::arg("steps"), py::arg("B"), py::arg("X"),
        py::arg("H"), py::arg("rounds"), py::arg("on_x"), py::arg("on_h"), py::arg("element"),
        py::arg("sms"), py::arg("shared"), py::arg("cooperative"),
        py::arg("shortest") = fusedseq::cuda::SHORTEST, py::arg("protocol") = "estimate",
        py::arg("gates") = 4, py::arg("cells") = false,
        "Whether the persistent kernels run a recurrence on a GPU, why, and their layouts: "
        "csrc/cuda/recurrence/plan.h.\n"
        "on_x, on_h: number of distinct weights of the rounds on x and on h; element: bytes of the "
        "tensors' dtype;\n"
        "sms, shared, cooperative: the GPU's multiprocessors, its bytes of shared memory for a "
        "block, and whether it has cooperative launches;\n"
        "protocol: \"words\" where words that carry their own validity fit, \"flags\", or what the "
        "\"estimate\" favours;\n"
        "gates: of the cell, whose W_hh has so many rows for each unit; cells: whether the cell is "
        "not the LSTM's, or the call has `starts` or `reverse`.");
  m.def("exchange_cycles", &exchange_cycles, py::arg("protocol"),
        "The estimate of the cycles of one exchange between blocks on an H100; not measured.");
  m.def(
      "wavefront_plan", &wavefront_plan, py::arg("steps"), py::arg("B"), py::arg("first"),
      py::arg("second"), py::arg("element"), py::arg("sms"), py::arg("shared"),
      py::arg("cooperative"), py::arg("shortest") = fusedseq::cuda::SHORTEST,
      "Whether two layers run in one launch, each on half of the SMs, why, and the layouts of the "
      "first and the second layer,\n"
      "as in recurrence_plan. first, second: (X, H, rounds, on_x, on_h).");
#ifdef __clang__
  m.attr("compiler") = __VERSION__;  // which names Clang
#else
  m.attr("compiler") = "GCC " __VERSION__;
#endif
}
