// Ranks as processes that share one GPU over CUDA IPC. A program of its own: a process that
// has used CUDA cannot be forked into ranks.
#include <doctest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "calls.h"
#include "gpu/cuda_driver.h"
#include "gpu/group.h"
#include "gpu/memory.h"
#include "gpu_groups.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

/// A call's tensors on the device, block after block.
class OnDevice {
 public:
  OnDevice(const gpu::OwnStream& stream, const Request& request) : stream_(stream) {
    const bool same =
        !request.in.empty() && !request.out.empty() && request.in[0].data == request.out[0].data;
    std::byte* at = place(request.in, in_, memory_.data());
    place(request.out, out_, same ? memory_.data() : at);
    mine_ = request;
    mine_.in = in_;
    mine_.out = out_;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      stream.copy(in_[i].data, request.in[i].data, in_[i].bytes);
    }
  }
  const Request& request() const { return mine_; }
  void bring(const Request& request) const {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      stream_.copy(request.out[i].data, out_[i].data, out_[i].bytes);
    }
  }

 private:
  static std::byte* place(std::span<const Block> blocks, std::vector<Block>& to, std::byte* at) {
    for (const Block& block : blocks) {
      to.push_back({at, block.bytes});
      at += block.bytes;
    }
    return at;
  }
  const gpu::OwnStream& stream_;
  gpu::DeviceMemory memory_{std::size_t{8} << 20};
  std::vector<Block> in_;
  std::vector<Block> out_;
  Request mine_;
};

void run_on(gpu::Group& group, const gpu::OwnStream& stream, const Request& request) {
  const OnDevice there(stream, request);
  group.run(there.request(), stream.get());
  stream.wait();
  if (const auto failed = group.failure()) throw *failed;
  there.bring(request);
}

/// Every rank a process with a group on the machine's first GPU.
void with_processes(int size, const std::function<void(gpu::Group&, Communicator&)>& body,
                    const std::vector<int>& may_die = {}) {
  CHECK_NOTHROW(run_ranks(
      {.transport = Transport::kShm, .size = size},
      [&](Communicator& comm) {
        const gpu::Exchange exchange = exchange_over(comm);
        gpu::Meeting meeting =
            gpu::meet(comm.rank(), size, gpu::make_cuda_driver, {.most_blocks = 16}, exchange);
        require(meeting.group != nullptr, meeting.why_not);
        body(*meeting.group, comm);
        if (may_die.empty()) meeting.group->close(exchange);
      },
      may_die));
}

Request sum_of(const Block& data, std::chrono::milliseconds time) {
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  request.in = request.out = std::span(&data, 1);
  request.deadline = Clock::now() + time;
  return request;
}

TEST_CASE("processes on one GPU carry out calls of all kinds over CUDA IPC") {
  for (const int size : {2, 4}) {
    CAPTURE(size);
    with_processes(size, [](gpu::Group& group, Communicator& comm) {
      const gpu::OwnStream stream;
      for (const Case& one : cases_of_all_kinds(comm.size())) {
        run_case_by(one, comm.rank(), comm.size(),
                    [&](const Request& request) { run_on(group, stream, request); });
      }
    });
  }
}

/// What a rank's call says if rank 1 does not come to it.
void call_alone(gpu::Group& group) {
  const gpu::OwnStream stream;
  std::vector<float> data(100, 1.0F);
  const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
  const OnDevice there(stream, sum_of(block, std::chrono::milliseconds(300)));
  group.run(there.request(), stream.get());
  stream.wait();
  const auto failed = group.failure();
  require(failed && failed->kind() == ErrorKind::kTimeout, "no timeout");
  require(std::strstr(failed->what(), "waiting for rank 1") != nullptr, failed->what());
}

TEST_CASE("a process that is stuck is named by the kernel that waits for it") {
  with_processes(2, [](gpu::Group& group, Communicator& comm) {
    if (comm.rank() == 0) call_alone(group);
    comm.run(Request{});
  });
}

TEST_CASE("a process that is killed is named by the kernel that waits for it") {
  with_processes(2,
                 [](gpu::Group& group, Communicator& comm) {
                   if (comm.rank() == 1) kill(getpid(), SIGKILL);
                   call_alone(group);
                 },
                 {1});
}

}  // namespace
}  // namespace dreamcomm::testing
