// Distinguishes a process from the children it forks.
#pragma once

#include <sys/mman.h>

#include "core/error.h"

namespace dreamcomm {

/// A page that the kernel blanks in a forked child: a look at it costs one load, getpid() a system
/// call.
class ForkGuard {
 public:
  ForkGuard() {
    void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(page != MAP_FAILED, ErrorKind::kSystem, "no memory for a page of ", kBytes, " bytes");
    mark_ = static_cast<char*>(page);
    if (madvise(page, kBytes, MADV_WIPEONFORK) != 0) {
      munmap(page, kBytes);
      throw Error(ErrorKind::kSystem, "madvise(MADV_WIPEONFORK) failed: Linux 4.14 has it");
    }
    *mark_ = 1;
  }
  ~ForkGuard() { munmap(mark_, kBytes); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  /// True if this is the process that made the mark.
  bool at_home() const { return *mark_ == 1; }

 private:
  static constexpr std::size_t kBytes = 4096;
  char* mark_ = nullptr;
};

}  // namespace dreamcomm
