// The memory of the simulated device: guarded buffers, shared memory, and the fibers' stacks.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "machine.h"

namespace simt {

Range stacks, variables;
size_t dynamic_bytes;

namespace {

constexpr size_t GUARD = 4096;

std::map<uintptr_t, Region> regions;          // by the address of their first guard zone
std::vector<unsigned char> variables_before;  // the TLS segment before the launch
Block* shown_block;  // whose __shared__ variables are at their address; null: no block's
std::vector<uintptr_t> dynamic;  // the dynamic shared memory of each slot
size_t stack_bytes;              // allocated for all stacks

// Poison reads as NaN in every floating-point format, and its bytes differ from each other.
unsigned char poison(uintptr_t a) {
  return a & 1 ? 0xff : 0x81 | (a * 0x9E3779B1u >> 20 & 0x7e);
}
void poison(uintptr_t p, size_t bytes) {
  for (uintptr_t a = p; a < p + bytes; ++a)
    *reinterpret_cast<unsigned char*>(a) = poison(a);
}
void check_guards() {
  for (const auto& [base, r] : regions)
    for (uintptr_t a = r.whole.p; a < r.whole.p + r.whole.bytes; ++a) {
      if (a == r.inside.p) a += r.inside.bytes;
      if (*reinterpret_cast<unsigned char*>(a) == poison(a)) continue;
      fault("the guard zone of a buffer of %zu bytes was written at its byte %td", r.inside.bytes,
            ptrdiff_t(a - r.inside.p));
      *reinterpret_cast<unsigned char*>(a) = poison(a);
    }
}

// A poisoned buffer with guard zones; `before` bytes are in front of it.
Region new_region(size_t before, size_t bytes) {
  const size_t whole = (before + bytes + GUARD + 1023) / 1024 * 1024;
  const auto base = uintptr_t(aligned_alloc(1024, whole));
  poison(base, whole);
  return regions[base] = {{base + before, bytes}, {base, whole}};
}
void free_region(uintptr_t base) {
  free(reinterpret_cast<void*>(base));
  regions.erase(base);
}

Range find_variables(const void* anchor) {
  struct Query {
    uintptr_t anchor;
    Range found;
  } query{uintptr_t(anchor), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* q) {
        Query& query = *static_cast<Query*>(q);
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const Range range{uintptr_t(library->dlpi_tls_data), library->dlpi_phdr[i].p_memsz};
          if (library->dlpi_phdr[i].p_type == PT_TLS && range.p && range.has(query.anchor))
            query.found = range;
        }
        return 0;
      },
      &query);
  return query.found;
}

void* variable_bytes() {
  return reinterpret_cast<void*>(variables.p);
}

void need_stacks(size_t fibers) {
  stacks.bytes = fibers * STACK;
  if (stacks.bytes <= stack_bytes) return;
  if (stacks.p) munmap(reinterpret_cast<void*>(stacks.p), stack_bytes);
  stack_bytes = stacks.bytes;
  void* p = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  stacks.p = p == MAP_FAILED ? 0 : uintptr_t(p);
  if (stacks.p) return;
  stack_bytes = 0;
  fault("no memory for the stacks of %zu threads", fibers);
}

}  // namespace

void start_memory(const Launch& l, unsigned slots) {
  need_stacks(size_t(slots) * l.block.x * l.block.y * l.block.z);
  variables = find_variables(l.anchor);
  const auto first = static_cast<unsigned char*>(variable_bytes());
  variables_before.assign(first, first + variables.bytes);
  shown_block = nullptr;
  dynamic_bytes = l.shared;
  for (unsigned slot = 0; l.shared && slot < slots; ++slot)
    dynamic.push_back(new_region(GUARD, l.shared).inside.p);
  check_launch();
}

void end_memory() {
  check_guards();
  for (const uintptr_t p : dynamic)
    free_region(p - GUARD);
  dynamic.clear();
  std::copy(variables_before.begin(), variables_before.end(),
            static_cast<unsigned char*>(variable_bytes()));
}

char* dynamic_shared(const Block& b) {
  return dynamic.empty() ? nullptr : reinterpret_cast<char*>(dynamic[b.slot]);
}
bool is_shared(const void* p) {
  if (variables.has(uintptr_t(p))) return true;
  const auto own = [p](uintptr_t block) {
    return Range{block, dynamic_bytes}.has(uintptr_t(p));
  };
  return std::any_of(dynamic.begin(), dynamic.end(), own);
}

void start_shared(Block& b) {
  show_variables(b);
  poison(variables.p, variables.bytes);
  poison(uintptr_t(dynamic_shared(b)), dynamic_bytes);
  check_block(b);
}

void show_variables(Block& b) {
  if (shown_block == &b) return;
  if (shown_block) std::memcpy(shown_block->variables.data(), variable_bytes(), variables.bytes);
  b.variables.resize(variables.bytes);
  std::memcpy(variable_bytes(), b.variables.data(), variables.bytes);
  shown_block = &b;
}

void end_shared(const Block& b) {
  if (shown_block == &b) shown_block = nullptr;
}

const Region* region_of(const void* p) {
  auto r = regions.upper_bound(uintptr_t(p));
  if (r == regions.begin()) return nullptr;
  --r;
  return r->second.whole.has(uintptr_t(p)) ? &r->second : nullptr;
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

// Poisoned memory between guard zones, `misaligned` bytes after a multiple of 256.
EXPORT void* simt_allocate(size_t bytes, size_t misaligned) {
  return reinterpret_cast<void*>(simt::new_region(simt::GUARD + misaligned, bytes).inside.p);
}
EXPORT void simt_free(void* p) {
  simt::free_region(simt::region_of(static_cast<char*>(p) - 1)->whole.p);
}
