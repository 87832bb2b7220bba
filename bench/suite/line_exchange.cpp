// How long a cache line takes from one CPU to another, for bench/suite/line_exchange.py.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace {

bool pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

}  // namespace

// Returns the nanoseconds of one way: the least of the means of `batches` batches of ways there and
// back, since another thread may interrupt some of them. Negative if a thread may not run on one of
// the CPUs, which have to be different ones.
extern "C" double line_exchange(int first, int second, int batches) {
  using Clock = std::chrono::steady_clock;
  constexpr int BATCH = 100;
  const int rounds = batches * BATCH;
  double least = -1;
  bool pinned = false;
  alignas(128) std::atomic<int> line{0};  // an odd number is for the first thread

  std::thread there([&] {
    const bool allowed = pin(second);
    line = allowed ? 1 : -1;
    for (int i = 1; i < 2 * rounds && allowed; i += 2) {
      while (line.load(std::memory_order_acquire) != i + 1)
        ;
      line.store(i + 2, std::memory_order_release);
    }
  });
  std::thread here([&] {
    pinned = pin(first);
    while (line.load(std::memory_order_acquire) == 0)
      ;
    Clock::time_point start = Clock::now();
    for (int i = 0; i < rounds && line.load() > 0; ++i) {
      line.store(2 * i + 2, std::memory_order_release);
      while (line.load(std::memory_order_acquire) != 2 * i + 3)
        ;
      if ((i + 1) % BATCH == 0) {
        const Clock::time_point now = Clock::now();
        const double time = std::chrono::duration<double, std::nano>(now - start).count();
        if (least < 0 || time < least) least = time;
        start = now;
      }
    }
  });
  there.join();
  here.join();
  return pinned ? least / (2 * BATCH) : -1;
}
