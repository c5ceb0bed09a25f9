#include "core/flag.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace dreamcomm {

// The shared form of the futex: the word may be mapped by several processes.

void Doorbell::sleep(std::uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec limit{};
  limit.tv_sec = seconds.count();
  limit.tv_nsec = (longest - seconds).count();
  // Errors are answers here: already rung (EAGAIN), time over (ETIMEDOUT), a signal (EINTR). The
  // caller reads its flags again in each case.
  syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Doorbell::wake() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace dreamcomm
