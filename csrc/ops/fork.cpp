// Lets a forked child use threads. fork copies the calling thread alone, but with it the OpenMP
// runtime's record of that thread's team: a parallel loop in the child would wait for threads that
// do not exist, in torch's operators as in ours. So the team is ended before fork, and the parent
// and the child each start a new one at their next parallel loop.
//
// The team of another thread that is in a parallel loop at the time continues; the child has
// neither that thread nor its team. A call within a parallel loop does nothing.
#include <pthread.h>

// Of OpenMP 5.0; null if the runtime that torch brings does not have it.
extern "C" int omp_pause_resource_all(int kind) __attribute__((weak));

namespace {

constexpr int SOFT = 1;  // omp_pause_soft

void end_team() {
  if (omp_pause_resource_all) omp_pause_resource_all(SOFT);
}

[[maybe_unused]] const int registered = pthread_atfork(end_team, nullptr, nullptr);

}  // namespace
