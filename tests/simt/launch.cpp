// The simulated device: its limits, the launches that it rejects, and its errors, which have CUDA's
// numbers.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "machine.h"

namespace simt {

unsigned long seed;
bool cooperative, failed;
Range call;

namespace {

enum Error {
  SUCCESS,
  INVALID_VALUE = 1,
  INVALID_CONFIGURATION = 9,
  NO_KERNEL_IMAGE = 209,
  LAUNCH_FAILURE = 719,
  TOO_LARGE = 720,
  NOT_SUPPORTED = 801
};

constexpr size_t RESERVED = 1024;  // bytes of shared memory that CUDA reserves in each block
constexpr size_t DEFAULT_SHARED = 48 << 10;
constexpr unsigned MAX_THREADS = 1024, MAX_RESIDENT_THREADS = 2048, MAX_RESIDENT_BLOCKS = 32;

struct Device {
  int sms = 4, shared = 232448, cooperative = 1, capability = 90;
} device;
size_t resident = 1 << 20;              // blocks of a cooperative grid, as limits of MPS may be
std::map<const void*, size_t> allowed;  // bytes that cudaFuncSetAttribute allowed, by kernel
int error;                              // that cudaGetLastError has not returned yet
std::string text;                       // the description of the last error
int cooperative_launches;               // that were not refused
// By kernel; null: the library has no other code than the kernels' own.
std::map<const void*, Translation>* translations;
const Translation* translation;  // of the launch in progress
void* const* translated_arguments;
bool accept_any_memory = false;  // as the device's; otherwise only what simt_allocate returned

int refuse(Error e, const char* format, ...) __attribute__((format(printf, 2, 3)));
int refuse(Error e, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  text.clear();
  record(format, arguments);
  va_end(arguments);
  failed = false;
  return error = e;
}

size_t most_shared(const void* kernel) {
  const auto it = allowed.find(kernel);
  return it == allowed.end() ? std::min(DEFAULT_SHARED, size_t(device.shared)) : it->second;
}

int blocks_on_one(const void* kernel, size_t threads, size_t shared) {
  if (shared > most_shared(kernel)) return 0;
  return int(
      std::min({size_t(MAX_RESIDENT_BLOCKS), MAX_RESIDENT_THREADS / ((threads + 31) / 32 * 32),
                (device.shared + RESERVED) / (shared + RESERVED)}));
}

int refused(const Launch& l) {
  const size_t threads = size_t(l.block.x) * l.block.y * l.block.z,
               blocks = size_t(l.grid.x) * l.grid.y * l.grid.z;
  const auto name = [&] {
    return function_of(l.kernel);
  };
  if (device.capability < 80)
    return refuse(NO_KERNEL_IMAGE, "%s: not compiled for the device", name().c_str());
  if (!threads || threads > MAX_THREADS || l.block.z > 64)
    return refuse(INVALID_CONFIGURATION, "%s: a block of %zu threads", name().c_str(), threads);
  if (!blocks || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    return refuse(INVALID_CONFIGURATION, "%s: a grid of %u x %u x %u blocks", name().c_str(),
                  l.grid.x, l.grid.y, l.grid.z);
  if (l.shared > most_shared(l.kernel))
    return refuse(INVALID_VALUE, "%s: %zu bytes of dynamic shared memory, %zu are allowed",
                  name().c_str(), l.shared, most_shared(l.kernel));
  if (!l.cooperative) return SUCCESS;
  if (!device.cooperative)
    return refuse(NOT_SUPPORTED, "%s: the device has no cooperative launch", name().c_str());
  const size_t most =
      std::min(resident, size_t(device.sms) * blocks_on_one(l.kernel, threads, l.shared));
  if (blocks > most)
    return refuse(TOO_LARGE, "%s: a cooperative grid of %zu blocks, %zu fit", name().c_str(),
                  blocks, most);
  return SUCCESS;
}

// Rejects a range of memory that is not inside one buffer.
int no_buffer(const char* name, const void* p, size_t bytes) {
  if (error == LAUNCH_FAILURE) return error;
  const Region* r = region_of(p);
  if (!r && accept_any_memory) return SUCCESS;
  return r && r->inside.has(uintptr_t(p), bytes)
             ? SUCCESS
             : refuse(INVALID_VALUE, "%s: %zu bytes that are not of one buffer", name, bytes);
}

unsigned slots_of(const Launch& l) {  // how many blocks are resident at a time
  const size_t blocks = size_t(l.grid.x) * l.grid.y * l.grid.z;
  return unsigned(l.cooperative ? blocks
                                : std::min<size_t>(blocks, seed ? 1 + random_below(3) : 1));
}

// Replaces the kernel of a launch by its translation, if the library has translations.
int use_translation(Launch& l) {
  translation = nullptr;
  if (!translations) return SUCCESS;
  const auto found = translations->find(l.kernel);
  if (found == translations->end())
    return refuse(NO_KERNEL_IMAGE, "%s: not translated", function_of(l.kernel).c_str());
  translation = &found->second;
  if (!std::equal(translation->sizes.begin(), translation->sizes.end(), l.sizes, l.sizes + l.arity))
    return refuse(INVALID_VALUE, "%s: its translation has parameters of other sizes",
                  function_of(l.kernel).c_str());
  translated_arguments = l.arguments;
  l.run = [](void*) {
    translation->run(translated_arguments);
  };
  l.shared += translation->shared;
  return SUCCESS;
}

}  // namespace

bool translate(const Translation& t) {
  if (!translations) translations = new std::map<const void*, Translation>;
  return translations->emplace(t.kernel, t).second;
}

void record(const char* format, va_list arguments) {
  char line[512];
  vsnprintf(line, sizeof line, format, arguments);
  if (text.empty()) text = line;
  failed = true;
}
void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(format, arguments);
  va_end(arguments);
}

int launch(const Launch& launch) {
  if (error == LAUNCH_FAILURE) return error;  // as on a GPU: after a failed kernel nothing runs
  if (const int refusal = refused(launch)) return refusal;
  Launch l = launch;
  if (const int refusal = use_translation(l)) return refusal;
  text.clear();
  failed = false;
  cooperative = l.cooperative;
  cooperative_launches += cooperative;
  call = {uintptr_t(l.call), l.bytes};
  globals.block = l.block;
  globals.grid = l.grid;
  start_random();
  const unsigned slots = slots_of(l);
  start_memory(l, slots);
  start_exchange(seed && slots > 1);
  if (!failed) run_blocks(l, slots);
  end_memory();
  if (!failed) return SUCCESS;
  text = function_of(l.kernel) + ": " + text;
  return error = LAUNCH_FAILURE;
}

int last_error() {
  const int last = error;
  if (error != LAUNCH_FAILURE) error = SUCCESS;  // a failed kernel has destroyed the context
  return last;
}

const char* error_name(int e) {
  switch (e) {
    case SUCCESS:
      return "cudaSuccess";
    case INVALID_VALUE:
      return "cudaErrorInvalidValue";
    case INVALID_CONFIGURATION:
      return "cudaErrorInvalidConfiguration";
    case NO_KERNEL_IMAGE:
      return "cudaErrorNoKernelImageForDevice";
    case LAUNCH_FAILURE:
      return "cudaErrorLaunchFailure";
    case TOO_LARGE:
      return "cudaErrorCooperativeLaunchTooLarge";
    case NOT_SUPPORTED:
      return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}
const char* error_text(int e) {
  return e == SUCCESS || text.empty() ? error_name(e) : text.c_str();
}

int device_attribute(int attribute, int* value) {
  switch (attribute) {
    case 1:
      *value = MAX_THREADS;
      break;
    case 8:
      *value = int(DEFAULT_SHARED);
      break;
    case 10:
      *value = 32;
      break;
    case 16:
      *value = device.sms;
      break;
    case 39:
      *value = MAX_RESIDENT_THREADS;
      break;
    case 75:
      *value = device.capability / 10;
      break;
    case 76:
      *value = device.capability % 10;
      break;
    case 81:
      *value = device.shared + int(RESERVED);
      break;
    case 95:
      *value = device.cooperative;
      break;
    case 97:
      *value = device.shared;
      break;
    case 111:
      *value = int(RESERVED);
      break;
    default:
      return refuse(INVALID_VALUE, "cudaDeviceGetAttribute: tests/simt does not have attribute %d",
                    attribute);
  }
  return SUCCESS;
}

int allow_shared(const void* kernel, size_t bytes) {
  if (bytes > size_t(device.shared))
    return refuse(INVALID_VALUE, "%s: %zu bytes of dynamic shared memory, the device has %d",
                  function_of(kernel).c_str(), bytes, device.shared);
  allowed[kernel] = bytes;
  return SUCCESS;
}

int blocks_that_fit(const void* kernel, int threads, size_t shared, int* blocks) {
  if (threads <= 0)
    return refuse(INVALID_VALUE, "cudaOccupancyMaxActiveBlocksPerMultiprocessor: %d threads",
                  threads);
  *blocks = blocks_on_one(kernel, size_t(threads), shared);
  return SUCCESS;
}

int fill(void* p, int value, size_t bytes) {
  if (const int e = no_buffer("cudaMemset", p, bytes)) return e;
  std::memset(p, value, bytes);
  return SUCCESS;
}
int copy(void* p, const void* from, size_t bytes) {
  if (const int e = no_buffer("cudaMemcpy", p, bytes)) return e;
  if (const int e = no_buffer("cudaMemcpy", from, bytes)) return e;
  std::memmove(p, from, bytes);
  return SUCCESS;
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sets the seed of the order in which threads and blocks run (0: that of their numbers), and clears
// the last error.
EXPORT void simt_seed(unsigned long s) {
  simt::seed = s;
  simt::error = simt::SUCCESS;
}
EXPORT void simt_accept_any_memory() {
  simt::accept_any_memory = true;
}
// The most blocks that a cooperative grid may have, beside the device's own limits.
EXPORT void simt_limit_residency(int blocks) {
  simt::resident = size_t(blocks);
}
// The number of cooperative launches that were not refused, ever.
EXPORT int simt_cooperative_launches() {
  return simt::cooperative_launches;
}
// The least shared memory that a kernel was allowed by cudaFuncSetAttribute; -1 without a call.
EXPORT int simt_least_allowed() {
  int least = -1;
  for (const auto& [kernel, bytes] : simt::allowed)
    least = least < 0 ? int(bytes) : std::min(least, int(bytes));
  return least;
}
EXPORT void simt_device(int sms, int shared, int cooperative, int capability) {
  simt::device = {sms, shared, cooperative, capability};
  simt::allowed.clear();
}
