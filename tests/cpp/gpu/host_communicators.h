// Groups for tensors on GPUs whose devices are made of threads of the process.
#pragma once

#include <doctest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "cpp/gpu/communicators.h"
#include "cpp/gpu/tensors.h"
#include "cpp/support/host_driver.h"
#include "cpp/support/ranks.h"
#include "gpu/host/communicator.h"

namespace dreamcomm::testing {

inline constexpr gpu::CommunicatorOptions kSmall{.page_bytes = 512, .most_blocks = 3, .lanes = 3};

inline void with_groups(int size,
                        const std::function<void(gpu::Communicator&, Communicator&)>& body,
                        const gpu::CommunicatorOptions& options = kSmall) {
  const int before = host_memory_in_use();
  CHECK_NOTHROW(run_ranks({.size = size}, [&](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    gpu::BootstrapResult bootstrapped = gpu::bootstrap(
        comm.rank(), size, [&] { return make_host_driver(comm.rank() % 2, 8); }, options, exchange);
    require(bootstrapped.group != nullptr, bootstrapped.why_not);
    body(*bootstrapped.group, comm);
    bootstrapped.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before);
}

/// With the tensors in their own memory, or in the given one.
inline void run_on(gpu::Communicator& group, const Request& request, std::byte* memory = nullptr) {
  std::vector<std::byte> own;
  if (memory == nullptr) {
    own.resize(bytes_of(request) + 1);
    memory = own.data();
  }
  const Copied there(request, memory, std::memmove);
  group.run(there.request(), nullptr);
  if (const auto failed = group.failure()) throw *failed;
  there.bring();
}

/// The error of the call, or of the kernel; or "".
inline std::string outcome(gpu::Communicator& group, const Request& request) {
  try {
    group.run(request, nullptr);
  } catch (const Error& error) {
    return error.what();
  }
  const auto failed = group.failure();
  return failed ? failed->what() : "";
}

inline bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace dreamcomm::testing
