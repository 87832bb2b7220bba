// Thread block clusters: barriers of a cluster, barriers in shared memory (mbarrier) and bulk
// copies to the shared memory of a cluster's blocks.
//
// A bulk copy is done some time after it was started, to each of its blocks at another time: only
// then are its bytes read and written, and counted at the block's barrier. It belongs to the
// asynchronous proxy: it sees the relaxed stores of other threads that were ordered before the last
// proxy fence of the thread that started it, and others at a random time. In the checked build it
// is a thread of its own, whose accesses follow that fence, and precede what follows the wait for
// its barrier.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

#include "machine.h"

namespace simt {

struct Cluster {
  std::vector<Block*> members;  // by rank; null: ended
  unsigned arrived, phase;      // at the cluster's barrier; its completed phases
  SharedClock arriving, completed;
};

namespace {

constexpr unsigned LATE = 16;  // mean number of turns of waiting loops until a copy
constexpr uint64_t MAGIC = 0xBA221E2BA221E2ED;  // in a barrier's memory
constexpr long MOST_BYTES = (1 << 20) - 1;      // PTX ISA: the valid range of tx-count

struct Mbarrier {
  unsigned arrivals, pending, phase;
  long bytes;  // announced and not yet copied
  Fiber* initialised_by;
  bool fenced;
  SharedClock arriving, completed;  // of the current phase; of the last complete one
};
struct Copy {
  uintptr_t to, from, barrier;
  size_t bytes;
  unsigned block, to_block;  // that started it; to which it copies
  unsigned agent, epoch;     // the copying thread, in clocks
  SharedClock before;
  void* pc;
};
std::unordered_map<uintptr_t, Mbarrier> barriers;
std::map<std::pair<uintptr_t, unsigned>, unsigned>
    agents;  // {(barrier, block that starts): number}
std::vector<unsigned> agent_epochs;
std::vector<Copy> copies;  // that are not done, in the order in which they were started
std::vector<std::unique_ptr<Cluster>> clusters;

Cluster& own_cluster(int line) {
  Cluster* c = current().owner->cluster;
  if (!c) fault_in_kernel("line %d: the launch has no clusters", line);
  return *c;
}

Block* member(unsigned number) {
  const size_t size = clusters[0]->members.size();
  return clusters[number / size]->members[number % size];
}

// The block of the thread's cluster in whose shared memory p is.
Block& block_with(const void* p, size_t bytes, const char* what) {
  const Fiber& f = current();
  if (!f.owner->cluster) return *f.owner;
  for (Block* b : f.owner->cluster->members)
    if (b && Range{uintptr_t(dynamic_shared(*b)), dynamic_bytes}.has(uintptr_t(p), bytes))
      return *b;
  fault_in_kernel(
      "thread %u of block %u: %s outside of the shared memory of its cluster, or of a "
      "block that has ended",
      f.number, f.owner->number, what);
}

// The barrier at p in the shared memory of block b.
Mbarrier& barrier_at(void* p, const Block& b, bool by_others) {
  const auto found = barriers.find(uintptr_t(p));
  uint64_t content = 0;
  if (found != barriers.end()) std::memcpy(&content, p, 8);
  if (content != MAGIC)
    fault_in_kernel("thread %u of block %u uses a barrier that is not initialised, or overwritten",
                    current().number, current().owner->number);
  if (by_others && !found->second.fenced)
    fault_in_kernel("a barrier of block %u is used by others without fence.mbarrier_init",
                    b.number);
  return found->second;
}

void try_complete(Mbarrier& b) {
  if (std::abs(b.bytes) > MOST_BYTES)
    fault_in_kernel("a barrier counts %ld bytes, which is more than it can", b.bytes);
  if (b.pending || b.bytes) return;
  b.completed = std::move(b.arriving);
  b.arriving = nullptr;
  b.pending = b.arrivals;
  ++b.phase;
  progress();
}

void do_copy(size_t i) {
  const Copy c = copies[i];
  copies.erase(copies.begin() + long(i));
  const Accessor by{c.agent, 0, c.epoch, c.before};
  const auto to = reinterpret_cast<char*>(c.to);
  const auto from = reinterpret_cast<const char*>(c.from);
  check_access_by(by, from, c.bytes, false, false, c.pc);
  check_access_by(by, to, c.bytes, true, false, c.pc);
  for (size_t at = 0; at < c.bytes; at += 16) {
    unsigned char bytes[16];
    std::memcpy(bytes, from + at, 16);
    undo_for(c.before, c.from + at, bytes, 16);
    std::memcpy(to + at, bytes, 16);
  }
  void* barrier = reinterpret_cast<void*>(c.barrier);
  Mbarrier& b = barrier_at(barrier, *member(c.to_block), true);
  check_access_by(by, barrier, 8, true, true, c.pc);
  b.bytes -= long(c.bytes);
  if (is_checked()) {
    Clock own;
    own.set(c.agent, 1, 0, c.epoch);
    b.arriving = joined(b.arriving, std::make_shared<Clock>(own));
  }
  try_complete(b);
  progress();
}

void try_cluster(Cluster& c) {
  unsigned alive = 0;
  for (const Block* b : c.members)
    alive += b ? b->alive : 0;
  if (!c.arrived || c.arrived < alive) return;
  c.arrived = 0;
  c.completed = std::move(c.arriving);
  c.arriving = nullptr;
  ++c.phase;
  for (const Block* b : c.members)
    for (Fiber* f : b ? b->fibers : std::vector<Fiber*>())
      if (f->state == State::cluster) make_ready(f);
  progress();
}

}  // namespace

void start_clusters(unsigned blocks, unsigned size) {
  barriers.clear();
  agents.clear();
  agent_epochs.clear();
  copies.clear();
  clusters.clear();
  for (unsigned first = 0; size > 1 && first < blocks; first += size) {
    clusters.push_back(std::make_unique<Cluster>());
    clusters.back()->members.resize(size);
  }
}

void join_cluster(Block& b) {
  if (clusters.empty()) return;
  const size_t size = clusters[0]->members.size();
  b.cluster = clusters[b.number / size].get();
  b.cluster->members[b.number % size] = &b;
}

void end_thread_of_cluster(Block& b) {
  if (!b.cluster) return;
  if (!b.alive) {
    for (const Copy& c : copies)
      if (c.block == b.number || c.to_block == b.number)
        fault_in_kernel("block %u ends while a copy %s it is under way", b.number,
                        c.to_block == b.number ? "to" : "of");
    std::replace(b.cluster->members.begin(), b.cluster->members.end(), &b, (Block*)nullptr);
  }
  try_cluster(*b.cluster);
}

void run_copies() {
  if (copies.empty() || (seed && random_below(LATE))) return;
  do_copy(seed ? random_below(unsigned(copies.size())) : 0);
}

unsigned cluster_rank() {
  const Block& b = *current().owner;
  return b.cluster ? b.number % unsigned(b.cluster->members.size()) : 0;
}

void cluster_arrive(int line) {
  Fiber& f = current();
  Cluster& c = own_cluster(line);
  if (f.cluster_phase)
    fault_in_kernel("line %d: thread %u of block %u arrives twice at its cluster's barrier", line,
                    f.number, f.owner->number);
  f.cluster_phase = c.phase + 1;
  c.arriving = joined(c.arriving, publish(f));
  ++c.arrived;
  try_cluster(c);
}

void cluster_wait(int line) {
  Fiber& f = current();
  Cluster& c = own_cluster(line);
  if (!f.cluster_phase)
    fault_in_kernel(
        "line %d: thread %u of block %u waits at its cluster's barrier before it arrives", line,
        f.number, f.owner->number);
  if (c.phase < f.cluster_phase) {
    f.state = State::cluster;
    f.line = line;
    to_scheduler();
  }
  f.cluster_phase = 0;
  f.clock = joined(f.clock, c.completed);
}

char* in_cluster(const void* p, unsigned rank) {
  const Fiber& f = current();
  const Cluster* c = f.owner->cluster;
  const Block* b = c && rank < c->members.size() ? c->members[rank] : nullptr;
  if (!b) fault_in_kernel("the shared memory of block %u of a cluster, which does not exist", rank);
  return dynamic_shared(*b) + (static_cast<const char*>(p) - f.shared);
}

void barrier_init(void* p, unsigned arrivals, void* pc) {
  Fiber& f = current();
  if (uintptr_t(p) % 8) fault_in_kernel("a barrier that is not aligned, %s", line_of(pc).c_str());
  if (&block_with(p, 8, "a barrier") != f.owner)
    fault_in_kernel("a barrier of another block is initialised, %s", line_of(pc).c_str());
  check_access(p, 8, true, false, pc);
  std::memcpy(p, &MAGIC, 8);
  barriers[uintptr_t(p)] = {arrivals, arrivals, 0, 0, &f, false, nullptr, nullptr};
}

void fence_barrier_init() {
  for (auto& [p, b] : barriers)
    b.fenced = b.fenced || b.initialised_by == &current();
}

void barrier_arrive(void* p, unsigned bytes, void* pc) {
  Fiber& f = current();
  if (seed && random_below(16) == 0) yield();
  const Block& owner = block_with(p, 8, "a barrier");
  Mbarrier& b = barrier_at(p, owner, &owner != f.owner);
  check_access(p, 8, true, true, pc);
  if (!b.pending)
    fault_in_kernel("more arrivals at a barrier than its phase has, %s", line_of(pc).c_str());
  b.bytes += bytes;
  b.arriving = joined(b.arriving, publish(f));
  --b.pending;
  try_complete(b);
}

bool barrier_is_complete(void* p, unsigned parity, int line, void* pc) {
  Fiber& f = current();
  run_copies();
  if (&block_with(p, 8, "a barrier") != f.owner)
    fault_in_kernel("line %d: only barriers of the own block can be tested", line);
  const Mbarrier& b = barrier_at(p, *f.owner, false);
  check_access(p, 8, false, true, pc);
  if ((b.phase & 1) == (parity & 1)) {
    spin(line);
    return false;
  }
  f.clock = joined(f.clock, b.completed);
  return true;
}

void fence_proxy_async() {
  Fiber& f = current();
  f.proxied = publish(f);
  if (seed && random_below(4) == 0) yield();
}

void start_copy(void* to, const void* from, size_t bytes, void* barrier, unsigned ranks, void* pc) {
  Fiber& f = current();
  Cluster& c = own_cluster(f.line);
  if ((uintptr_t(to) | uintptr_t(from) | bytes) % 16)
    fault_in_kernel("a bulk copy that is not of multiples of 16 bytes, %s", line_of(pc).c_str());
  for (unsigned rank = 0; rank < c.members.size(); ++rank) {
    if (!(ranks >> rank & 1)) continue;
    const char* there = in_cluster(to, rank);
    const auto arrives_at = uintptr_t(in_cluster(barrier, rank));
    const Block& b = block_with(there, bytes, "a bulk copy");
    const auto [agent, is_new] =
        agents.emplace(std::pair(arrives_at, f.owner->number), unsigned(agents.size()));
    if (is_new) agent_epochs.push_back(0);
    copies.push_back({uintptr_t(there), uintptr_t(from), arrives_at, bytes, f.owner->number,
                      b.number, COPIES_FROM + agent->second, ++agent_epochs[agent->second],
                      f.proxied, pc});
  }
  if (ranks >> c.members.size()) fault_in_kernel("a bulk copy to a block that does not exist");
}

}  // namespace simt
