#include "c10d/device/multinode_group.h"

#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "c10d/device/hier_context.h"
#include "comm/validate.h"
#include "internode/collectives/dispatch.h"

namespace dreamcomm {

MultinodeDeviceGroup::MultinodeDeviceGroup(std::shared_ptr<gpu::Communicator> group,
                                           DevicePlace place, Fallback::Inner engine,
                                           c10::Device device)
    : group_(std::move(group)),
      place_(std::move(place)),
      engine_(std::move(engine)),
      device_(device) {}

void MultinodeDeviceGroup::run(const Request& request, void* stream) {
  validate(request, place_.rank, place_.topology.size());
  under_way_ = true;
  const DeviceHierContext::Level level{.group = *group_,
                                       .engine = *engine_,
                                       .topology = place_.topology,
                                       .rank = place_.rank,
                                       .widens_halves = place_.widens_halves,
                                       .device = device_,
                                       .stream = stream};
  DeviceHierContext context(level, request.deadline, place_.chunk);
  try {
    if (request.kind == Kind::kBarrier) {  // the verdict is the barrier between nodes
      context.run_on_host(Kind::kBarrier, Reduction{}, {}, {});
    } else {
      internode::run(context, request);
    }
  } catch (const Error& error) {  // of a part
    throw Error(error.kind(), concat(dreamcomm::describe(request), ": ", error.what()));
  }
  const auto kind = static_cast<std::size_t>(request.kind);
  sent_[kind].grow(static_cast<std::int64_t>(context.traffic().sent));
  received_[kind].grow(static_cast<std::int64_t>(context.traffic().received));
}

void MultinodeDeviceGroup::agree(void* stream) {
  const auto words = at::TensorOptions().dtype(at::kLong).device(device_);
  std::vector<at::Tensor> verdict{at::empty({1}, words)};
  auto* const word = static_cast<std::byte*>(verdict[0].mutable_data_ptr());
  group_->put_verdict(word, stream);
  c10d::AllreduceOptions most;
  most.reduceOp = c10d::ReduceOp::MAX;
  most.asyncOp = false;
  // NCCL puts it on the current stream, and has no work to return then.
  if (const auto work = engine_->allreduce(verdict, most)) work->wait();
  group_->take_verdict(word, stream);
  under_way_ = false;
}

std::array<WireTraffic, kKinds> MultinodeDeviceGroup::traffic() const {
  std::array<WireTraffic, kKinds> all;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {static_cast<std::uint64_t>(sent_[i].read()),
              static_cast<std::uint64_t>(received_[i].read())};
  }
  return all;
}

}  // namespace dreamcomm
