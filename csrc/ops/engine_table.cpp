#include "ops/engine_table.h"

#include <algorithm>
#include <map>

namespace fusedseq {
namespace {

// Filled before the first call, and only read afterwards.
std::map<MeasuredSize, Engine>& table() {
  static std::map<MeasuredSize, Engine> entries;
  return entries;
}

}  // namespace

Engine measured_engine(const MeasuredSize& size) {
  const auto found = table().find(size);
  return found == table().end() ? Engine::by_plan : found->second;
}
bool has_measured_engines() {
  return !table().empty();
}

}  // namespace fusedseq

#define EXPORT extern "C" __attribute__((visibility("default")))

// size: (9,), as MeasuredSize    engine: by_plan removes the entry
EXPORT void fusedseq_set_engine(const int64_t* size, int64_t engine) {
  fusedseq::MeasuredSize key;
  std::copy(size, size + key.size(), key.begin());
  if (fusedseq::Engine(engine) == fusedseq::Engine::by_plan)
    fusedseq::table().erase(key);
  else
    fusedseq::table()[key] = fusedseq::Engine(engine);
}
EXPORT int64_t fusedseq_measured_engine(const int64_t* size) {
  fusedseq::MeasuredSize key;
  std::copy(size, size + key.size(), key.begin());
  return int64_t(fusedseq::measured_engine(key));
}
