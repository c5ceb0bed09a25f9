// Ranks as processes that share one GPU over CUDA IPC. This is a separate program, because a
// process that has used CUDA cannot be forked into ranks.
#include <doctest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "cpp/gpu/communicators.h"
#include "cpp/gpu/device_tensors.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"
#include "gpu/cuda/driver.h"
#include "gpu/host/communicator.h"
#include "gpu/host/memory.h"

namespace dreamcomm::testing {
namespace {

/// Every rank a process with a group on the machine's first GPU.
void with_processes(int size, const std::function<void(gpu::Communicator&, Communicator&)>& body,
                    const std::vector<int>& may_die = {}) {
  CHECK_NOTHROW(run_ranks(
      {.transport = Transport::kShm, .size = size},
      [&](Communicator& comm) {
        const gpu::Exchange exchange = exchange_over(comm);
        gpu::BootstrapResult bootstrapped =
            gpu::bootstrap(comm.rank(), size, gpu::make_cuda_driver, {.most_blocks = 16}, exchange);
        require(bootstrapped.group != nullptr, bootstrapped.why_not);
        body(*bootstrapped.group, comm);
        if (may_die.empty()) bootstrapped.group->close(exchange);
      },
      may_die));
}

TEST_CASE("processes on one GPU carry out calls of all kinds over CUDA IPC") {
  for (const int size : {2, 4}) {
    CAPTURE(size);
    with_processes(size, [](gpu::Communicator& group, Communicator& comm) {
      const gpu::OwnStream stream;
      const gpu::DeviceMemory memory(kTensorBytes);
      for (const Case& one : cases_of_all_kinds(comm.size())) {
        run_case_by(one, comm.rank(), comm.size(),
                    [&](const Request& request) { run_on(group, stream, request, memory.data()); });
      }
    });
  }
}

/// The error of a rank's call that rank 1 does not enter.
void call_alone(gpu::Communicator& group) {
  const gpu::OwnStream stream;
  std::vector<float> data(100, 1.0F);
  const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
  const gpu::DeviceMemory memory(kTensorBytes);
  const Copied there =
      on_device(stream, sum_of(block, std::chrono::milliseconds(300)), memory.data());
  group.run(there.request(), stream.get());
  stream.wait();
  const auto failed = group.failure();
  require(failed && failed->kind() == ErrorKind::kTimeout, "no timeout");
  require(std::strstr(failed->what(), "waiting for rank 1") != nullptr, failed->what());
}

TEST_CASE("a process that is stuck is named by the kernel that waits for it") {
  with_processes(2, [](gpu::Communicator& group, Communicator& comm) {
    if (comm.rank() == 0) call_alone(group);
    comm.run(Request{});
  });
}

TEST_CASE("a process that is killed is named by the kernel that waits for it") {
  with_processes(2,
                 [](gpu::Communicator& group, Communicator& comm) {
                   if (comm.rank() == 1) kill(getpid(), SIGKILL);
                   call_alone(group);
                 },
                 {1});
}

}  // namespace
}  // namespace dreamcomm::testing
