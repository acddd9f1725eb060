// Collectives of ranks that share memory on one node: sums, gathers and a broadcast.
//
// The memory holds a counter of each rank, two slots of each, and a user buffer of each.
//
// Each rank has two slots for its data, which take turns, and a counter. It raises the counter when
// its part of an exchange lies in its slot, or if it has none. A slot is filled again two exchanges
// later, once all counters stand where the exchange between has left them: who has raised its
// counter there has read all that it wanted of the exchange before. So nobody waits for readers.
//
// A user buffer is written by whoever computes what is to be added up. An exchange of all, such as
// `communicator_gather_rows`, lies between two sums from it: who has come back from that knows that
// the others have read, and may write again.
//
// `tests/simulation/communicator_model.py` checks it in every order of 2 and of 4 ranks.

#include <sched.h>
#include <time.h>

#include <atomic>

#include "arguments.h"

namespace {

constexpr int64_t LINE = 64, PAGE = 4096, BLOCK = 1024, DONE = -1;
// From here on, where there are more than two, each rank adds up a part for all.
constexpr int64_t TWO_SHOT_BYTES = 32768;
constexpr int SPINS = 2000, YIELDS = 2000;
constexpr timespec MOMENT{0, 50000};

// Mirrored in `communicator.py`.
struct Place {
  char* memory;
  int64_t rank, ranks, slot_bytes, buffer_bytes;
  double timeout_s;
  uint64_t exchange, count, copied_sums;
};

std::atomic<uint64_t>& counter(const Place& at, int64_t rank) {
  return *(std::atomic<uint64_t>*)(at.memory + rank * LINE);
}

// Where the slots begin, behind the counters.
int64_t first_slot(int64_t ranks) { return (ranks * LINE + PAGE - 1) / PAGE * PAGE; }

char* slot(const Place& at, int64_t rank) {
  const int64_t index = 2 * rank + (int64_t)(at.exchange & 1);
  return at.memory + first_slot(at.ranks) + index * at.slot_bytes;
}

int64_t first_buffer(int64_t ranks, int64_t slot_bytes) {
  return first_slot(ranks) + 2 * ranks * slot_bytes;
}

char* buffer(const Place& at, int64_t rank) {
  return at.memory + first_buffer(at.ranks, at.slot_bytes) + rank * at.buffer_bytes;
}

// Where the data of rank 0 lie, and how far behind those of a rank those of the next.
struct Parts {
  const char* first;
  int64_t step;
};

Parts slots(const Place& at) { return {slot(at, 0), 2 * at.slot_bytes}; }

Parts buffers(const Place& at) { return {buffer(at, 0), at.buffer_bytes}; }

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Waits until a counter is where ours is, first with this core and then without: the rank that is
// waited for may need it.
bool wait_for(const Place& at, int64_t rank) {
  const auto& theirs = counter(at, rank);
  const auto is_there = [&] { return theirs.load(std::memory_order_acquire) >= at.count; };
  for (int i = 0; i < SPINS; i++, relax())
    if (is_there()) return true;
  const double until = now_s() + at.timeout_s;
  for (int64_t i = 0; !is_there(); i++) {
    if (i < YIELDS) {
      sched_yield();
    } else {
      nanosleep(&MOMENT, nullptr);
      if (now_s() > until) return false;
    }
  }
  return true;
}

// Returns DONE, or the first rank that did not come.
int64_t wait_for_all(const Place& at) {
  for (int64_t rank = 0; rank < at.ranks; rank++)
    if (!wait_for(at, rank)) return rank;
  return DONE;
}

void raise_counter(Place& at) { counter(at, at.rank).store(++at.count, std::memory_order_release); }

// out: the ranks' sum of n elements from `first` on, added in the order of the ranks.
template <class T>
void add_up(const Place& at, Parts parts, T* out, int64_t first, int64_t n) {
  float sum[BLOCK];
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t size = std::min(BLOCK, n - begin);
    for (int64_t rank = 0; rank < at.ranks; rank++) {
      const T* x = (const T*)(parts.first + rank * parts.step) + first + begin;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = (rank ? sum[i] : 0.0f) + to_float(x[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++) from_float(sum[i], out + begin + i);
  }
}

// One-shot: each rank reads all slots. Two-shot: it adds up its part, in its slot, where nobody
// else reads that part before, and the second raise of its counter says that it lies there.
template <class T>
int64_t sum_slot(Place& at, T* x, int64_t n) {
  int64_t missing = wait_for_all(at);
  if (missing != DONE) return missing;
  at.exchange++;
  T* own = (T*)slot(at, at.rank);
  memcpy(own, x, n * sizeof(T));
  raise_counter(at);
  if ((missing = wait_for_all(at)) != DONE) return missing;
  if (at.ranks == 2 || n * (int64_t)sizeof(T) < TWO_SHOT_BYTES) {
    add_up(at, slots(at), x, 0, n);
    return DONE;
  }
  const int64_t part = (n + at.ranks - 1) / at.ranks;
  const auto first = [&](int64_t rank) { return std::min(n, rank * part); };
  const auto size = [&](int64_t rank) { return first(rank + 1) - first(rank); };
  add_up(at, slots(at), own + first(at.rank), first(at.rank), size(at.rank));
  raise_counter(at);
  for (int64_t rank = 0; rank < at.ranks; rank++) {
    if (!wait_for(at, rank)) return rank;
    memcpy(x + first(rank), (T*)slot(at, rank) + first(rank), size(rank) * sizeof(T));
  }
  return DONE;
}

template <class T>
int64_t sum(Place& at, T* x, int64_t n) {
  const int64_t most = at.slot_bytes / (int64_t)sizeof(T);
  int64_t missing = DONE;
  for (int64_t i = 0; i < n && missing == DONE; i += most)
    missing = sum_slot(at, x + i, std::min(most, n - i));
  return missing;
}

struct Range {
  int64_t begin, end;
};

// What of n is a rank's, if each but the last has `part`; the last ones' may be short, or empty.
Range share(int64_t rank, int64_t n, int64_t part) {
  return {std::min(n, rank * part), std::min(n, (rank + 1) * part)};
}

// What of a share is exchanged from element `from` on.
Range stretch(int64_t rank, int64_t n, int64_t part, int64_t from, int64_t most) {
  const auto [begin, end] = share(rank, n, part);
  return {std::min(begin + from, end), std::min(begin + from + most, end)};
}

template <class T>
int64_t sum_share(Place& at, const T* x, T* out, int64_t n, int64_t part) {
  const Range own = share(at.rank, n, part);
  int64_t missing = DONE;
  if ((const char*)x == buffer(at, at.rank)) {
    at.exchange++;
    raise_counter(at);
    if ((missing = wait_for_all(at)) != DONE) return missing;
    add_up(at, buffers(at), out, own.begin, own.end - own.begin);
    return DONE;
  }
  at.copied_sums++;
  const int64_t most = at.slot_bytes / (int64_t)sizeof(T) / at.ranks;
  for (int64_t i = 0; i < part; i += most) {
    if ((missing = wait_for_all(at)) != DONE) return missing;
    at.exchange++;
    for (int64_t rank = 0; rank < at.ranks; rank++) {
      const auto [begin, end] = stretch(rank, n, part, i, most);
      memcpy((T*)slot(at, at.rank) + rank * most, x + begin, (end - begin) * sizeof(T));
    }
    raise_counter(at);
    if ((missing = wait_for_all(at)) != DONE) return missing;
    const auto [begin, end] = stretch(at.rank, n, part, i, most);
    add_up(at, slots(at), out + i, at.rank * most, end - begin);
  }
  return DONE;
}

}  // namespace

// How much memory so many ranks share, and how much of that lies before their user buffers.
extern "C" int64_t communicator_bytes(int64_t ranks, int64_t slot_bytes, int64_t buffer_bytes) {
  return first_buffer(ranks, slot_bytes) + ranks * buffer_bytes;
}

// Of the functions below all ranks call the same, with equal sizes. They return -1, or the rank that
// they have waited for in vain.
//
// sum: the n elements of x become the ranks' sum.
// sum_share: out becomes this rank's share of the ranks' sum of x, which has n elements, `part` for
// each rank but the last. If x is the user buffer, it is read there; all ranks' are, or none's.
#define SUMS(name, T)                                                                         \
  extern "C" int64_t communicator_sum_##name(Place* at, T* x, int64_t n) {                    \
    return sum(*at, x, n);                                                                    \
  }                                                                                           \
  extern "C" int64_t communicator_sum_share_##name(Place* at, const T* x, T* out, int64_t n,  \
                                                   int64_t part) {                            \
    return sum_share(*at, x, out, n, part);                                                   \
  }

SUMS(float32, float)
SUMS(bfloat16, bf16)

// x: rank 0's bytes come to all.
extern "C" int64_t communicator_broadcast(Place* at, char* x, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += at->slot_bytes) {
    const int64_t size = std::min(at->slot_bytes, num_bytes - i);
    if (at->rank == 0) {
      const int64_t missing = wait_for_all(*at);
      if (missing != DONE) return missing;
    }
    at->exchange++;
    if (at->rank == 0) memcpy(slot(*at, 0), x + i, size);
    raise_counter(*at);
    if (at->rank == 0) continue;
    if (!wait_for(*at, 0)) return 0;
    memcpy(x + i, slot(*at, 0), size);
  }
  return DONE;
}

// parts: the bytes of all ranks, one after the other, on all of them or on rank 0 alone.
extern "C" int64_t communicator_gather(Place* at, const char* x, char* parts, int64_t num_bytes,
                                       bool to_all) {
  for (int64_t i = 0; i < num_bytes; i += at->slot_bytes) {
    const int64_t size = std::min(at->slot_bytes, num_bytes - i);
    int64_t missing = wait_for_all(*at);
    if (missing != DONE) return missing;
    at->exchange++;
    memcpy(slot(*at, at->rank), x + i, size);
    raise_counter(*at);
    if (at->rank != 0 && !to_all) continue;
    for (int64_t rank = 0; rank < at->ranks; rank++) {
      if (!wait_for(*at, rank)) return rank;
      memcpy(parts + rank * num_bytes + i, slot(*at, rank), size);
    }
  }
  return DONE;
}

// x: num_bytes, `part` of each rank but the last, which the others get from there.
extern "C" int64_t communicator_gather_rows(Place* at, char* x, int64_t num_bytes, int64_t part) {
  for (int64_t i = 0; i < part; i += at->slot_bytes) {
    int64_t missing = wait_for_all(*at);
    if (missing != DONE) return missing;
    at->exchange++;
    const Range own = stretch(at->rank, num_bytes, part, i, at->slot_bytes);
    memcpy(slot(*at, at->rank), x + own.begin, own.end - own.begin);
    raise_counter(*at);
    // Of those without a part too: they have then read the user buffers.
    if ((missing = wait_for_all(*at)) != DONE) return missing;
    for (int64_t rank = 0; rank < at->ranks; rank++)
      if (rank != at->rank) {
        const Range theirs = stretch(rank, num_bytes, part, i, at->slot_bytes);
        memcpy(x + theirs.begin, slot(*at, rank), theirs.end - theirs.begin);
      }
  }
  return DONE;
}
