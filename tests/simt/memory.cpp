// Memory of the simulated machine: guarded buffers, the blocks' shared memory, the fibers' stacks.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace simt {

Range stacks, dynamic, variables;
size_t dynamic_bytes;

namespace {

constexpr size_t GUARD = 4096;

std::vector<Region> regions;
std::vector<unsigned char> variables_before;
Block* shown;         // whose __shared__ variables are in place; null: nobody's
size_t stride;        // from the dynamic shared memory of a block to the next one's
size_t room;          // for stacks

// Poison reads as NaN in every floating-point format, and differs from byte to byte.
unsigned char poison(uintptr_t a) { return a & 1 ? 0xff : 0x81 | (a * 0x9E3779B1u >> 20 & 0x7e); }
void poison(uintptr_t p, size_t bytes) {
  for (uintptr_t a = p; a < p + bytes; ++a) *reinterpret_cast<unsigned char*>(a) = poison(a);
}
void check_guards() {
  for (const Region& r : regions)
    for (uintptr_t a = uintptr_t(r.base); a < uintptr_t(r.base) + r.base_bytes; ++a) {
      if (a == r.p) a += r.bytes;
      if (*reinterpret_cast<unsigned char*>(a) == poison(a)) continue;
      fault("the guard zone of a buffer of %zu bytes was written at its byte %td", r.bytes, ptrdiff_t(a - r.p));
      *reinterpret_cast<unsigned char*>(a) = poison(a);
    }
}

Range find_variables(const void* anchor) {
  struct Query { uintptr_t anchor; Range found; } query{uintptr_t(anchor), {}};
  dl_iterate_phdr([](dl_phdr_info* library, size_t, void* q) {
    Query& query = *static_cast<Query*>(q);
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const Range range{uintptr_t(library->dlpi_tls_data), library->dlpi_phdr[i].p_memsz};
      if (library->dlpi_phdr[i].p_type == PT_TLS && range.p && range.has(query.anchor)) query.found = range;
    }
    return 0;
  }, &query);
  return query.found;
}

void* variable_bytes() { return reinterpret_cast<void*>(variables.p); }

void need_stacks(size_t fibers) {
  stacks.bytes = fibers * STACK;
  if (stacks.bytes <= room) return;
  if (stacks.p) munmap(reinterpret_cast<void*>(stacks.p), room);
  room = stacks.bytes;
  void* p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  stacks.p = p == MAP_FAILED ? 0 : uintptr_t(p);
  if (!stacks.p) room = 0, fault("no room for the stacks of %zu threads", fibers);
}

}  // namespace

void start_memory(const Launch& l, unsigned slots) {
  need_stacks(size_t(slots) * l.block.x * l.block.y * l.block.z);
  variables = find_variables(l.anchor);
  const auto first = static_cast<unsigned char*>(variable_bytes());
  variables_before.assign(first, first + variables.bytes);
  shown = nullptr;
  dynamic_bytes = l.shared;
  stride = (l.shared + 2 * GUARD + 1023) / 1024 * 1024;
  dynamic.bytes = l.shared ? stride * slots : 0;
  dynamic.p = l.shared ? uintptr_t(aligned_alloc(1024, dynamic.bytes)) : 0;
  poison(dynamic.p, dynamic.bytes);
  for (unsigned i = 0; l.shared && i < slots; ++i) {
    const uintptr_t base = dynamic.p + i * stride;
    regions.push_back({base + GUARD, l.shared, reinterpret_cast<void*>(base), stride});
  }
  check_launch(regions);
}

void end_memory() {
  check_guards();
  const auto is_dynamic = [](const Region& r) { return dynamic.has(r.p); };
  regions.erase(std::remove_if(regions.begin(), regions.end(), is_dynamic), regions.end());
  free(reinterpret_cast<void*>(dynamic.p));
  dynamic = {};
  std::copy(variables_before.begin(), variables_before.end(), static_cast<unsigned char*>(variable_bytes()));
}

char* dynamic_shared(const Block& b) { return dynamic.bytes ? reinterpret_cast<char*>(dynamic.p + b.slot * stride + GUARD) : nullptr; }

void start_shared(Block& b) {
  show_variables(b);
  poison(variables.p, variables.bytes);
  poison(uintptr_t(dynamic_shared(b)), dynamic_bytes);
  check_block(b);
}

void show_variables(Block& b) {
  if (shown == &b) return;
  if (shown) std::memcpy(shown->variables.data(), variable_bytes(), variables.bytes);
  b.variables.resize(variables.bytes);
  std::memcpy(variable_bytes(), b.variables.data(), variables.bytes);
  shown = &b;
}

void end_shared(const Block& b) {
  if (shown == &b) shown = nullptr;
}

const Region* region_of(const void* p) {
  const auto has = [p](const Region& r) { return Range{r.p, r.bytes}.has(uintptr_t(p)); };
  const auto r = std::find_if(regions.begin(), regions.end(), has);
  return r == regions.end() ? nullptr : &*r;
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

// Poisoned memory between guard zones, `misaligned` bytes after a multiple of 256.
EXPORT void* simt_allocate(size_t bytes, size_t misaligned) {
  using namespace simt;
  const size_t whole = (2 * GUARD + misaligned + bytes + 255) / 256 * 256;
  void* base = aligned_alloc(256, whole);
  poison(uintptr_t(base), whole);
  regions.push_back({uintptr_t(base) + GUARD + misaligned, bytes, base, whole});
  return reinterpret_cast<void*>(regions.back().p);
}
EXPORT void simt_free(void* p) {
  using namespace simt;
  const auto r = std::find_if(regions.begin(), regions.end(), [&](const Region& r) { return r.p == uintptr_t(p); });
  free(r->base);
  regions.erase(r);
}
