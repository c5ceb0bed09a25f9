// Memory that processes share which are forked later.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <new>

#include "cpp/support/ranks.h"

namespace dreamcomm::testing {

/// A T for this process and all that are forked later.
template <typename T>
std::shared_ptr<T> shared_between_processes() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap failed");
  return {new (memory) T(), [](T* at) { munmap(at, sizeof(T)); }};
}

}  // namespace dreamcomm::testing
