// Groups of ranks that are threads, on GPUs: they reach each other's memory by its address, and
// where there are several GPUs, through peer access between those of one process.
#include <doctest.h>

#include <stdexcept>
#include <string>

#include "cpp/gpu/communicators.h"
#include "cpp/gpu/device.h"
#include "cpp/gpu/device_tensors.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"
#include "gpu/cuda/driver.h"
#include "gpu/host/communicator.h"
#include "gpu/host/launch.h"

namespace dreamcomm::testing {
namespace {

int devices() {
  std::string why;
  const int count = gpu::device_count(why);
  if (count == 0) throw std::runtime_error("these tests need a GPU: " + why);
  return count;
}

/// A rank's own memory on its device.
struct Own {
  gpu::OwnStream stream;
  gpu::DeviceMemory memory{kTensorBytes};
};

/// Distributes the ranks over the machine's GPUs in turn.
void with_threads(int size, const gpu::CommunicatorOptions& options,
                  const std::function<void(gpu::Communicator&, Communicator&, const Own&)>& body) {
  const int count = devices();
  CHECK_NOTHROW(run_ranks({.size = size}, [&](Communicator& comm) {
    use_device(comm.rank() % count);
    const Own own;
    const gpu::Exchange exchange = exchange_over(comm);
    gpu::BootstrapResult bootstrapped =
        gpu::bootstrap(comm.rank(), size, gpu::make_cuda_driver, options, exchange);
    require(bootstrapped.group != nullptr, bootstrapped.why_not);
    body(*bootstrapped.group, comm, own);
    bootstrapped.group->close(exchange);
    // Freeing memory waits for the kernels that run: here none does on any rank.
  }));
}

TEST_CASE("threads on GPUs carry out calls of all kinds") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    with_threads(size, {.most_blocks = 16},
                 [](gpu::Communicator& group, Communicator& comm, const Own& own) {
                   for (const Case& one : cases_of_all_kinds(comm.size())) {
                     run_case_by(one, comm.rank(), comm.size(), [&](const Request& request) {
                       run_on(group, own.stream, request, own.memory.data());
                     });
                   }
                 });
  }
}

/// Some ranks' tensors are in registered memory, and sometimes all ranks'.
TEST_CASE("threads on GPUs carry out calls of all kinds on registered memory") {
  gpu::CommunicatorOptions options{.most_blocks = 16, .heap_bytes = kTensorBytes};
  options.costs.turn = 1e-15;  // in place from a few bytes on
  for (const int size : {2, 4}) {
    CAPTURE(size);
    with_threads(size, options, [](gpu::Communicator& group, Communicator& comm, const Own& own) {
      int turn = 0;
      for (const Case& one : cases_of_all_kinds(comm.size())) {
        std::byte* const memory =
            turn++ % 4 == comm.rank() ? own.memory.data() : group.heap().get();
        run_case_by(one, comm.rank(), comm.size(),
                    [&](const Request& request) { run_on(group, own.stream, request, memory); });
      }
    });
  }
}

}  // namespace
}  // namespace dreamcomm::testing
