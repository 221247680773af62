// Counters in shared memory: one process counts up, others wait. Linux only.
#pragma once
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace modelcenter {

// A futex is a 4-byte word: the lower half of a counter.
inline const uint32_t* futex_of(const int64_t* counter) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half comes first");
  return (const uint32_t*)counter;
}

// A process that sees the new value also sees everything that this thread wrote before.
inline void set_counter(int64_t* counter, int64_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, futex_of(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Whether the counter reaches a value within so many milliseconds. Polling briefly saves most waits a sleep; polling
// longer would take the processor from the process that is waited for.
inline bool wait_for_counter(const int64_t* counter, int64_t value, int64_t milliseconds) {
  constexpr int kAwake = 2000;  // polls
  for (int i = 0; i < kAwake; i++)
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= value) return true;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000 + now.tv_nsec + milliseconds * 1000000;
  while (true) {
    const int64_t found = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
    if (found >= value) return true;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t left = end - (now.tv_sec * 1000000000 + now.tv_nsec);
    if (left <= 0) return false;
    const timespec most = {left / 1000000000, left % 1000000000};
    // Returns at once if the counter has changed since.
    syscall(SYS_futex, futex_of(counter), FUTEX_WAIT, (uint32_t)found, &most, nullptr, 0);
  }
}

}  // namespace modelcenter
