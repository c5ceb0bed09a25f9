#include "c10d/device/device_communicator.h"

namespace dreamcomm {
namespace {

[[noreturn]] void refuse(const OpLabel& label) {
  throw Error(ErrorKind::kInvalid, concat(label.name(),
                                          ": this group serves no accelerator; ask serves() or "
                                          "connects_with() first"));
}

}  // namespace

c10::intrusive_ptr<DeviceWork> NoDevices::issue(const DevicePlan& plan, Calls& /*calls*/) {
  refuse(plan.label);
}

c10::intrusive_ptr<DeviceWork> NoDevices::send(const DevicePlan& plan, const at::Tensor& /*tensor*/,
                                               int /*to*/) {
  refuse(plan.label);
}

c10::intrusive_ptr<DeviceWork> NoDevices::receive(const DevicePlan& plan,
                                                  const at::Tensor& /*tensor*/, int /*from*/) {
  refuse(plan.label);
}

at::Tensor NoDevices::allocate(std::int64_t /*size*/, const at::TensorOptions& /*options*/) {
  throw Error(ErrorKind::kInvalid, "this group serves no accelerator; ask handles() first");
}

std::string NoDevices::explain(Kind /*kind*/, std::size_t /*bytes*/) const {
  return "torch's own NCCL group, as the option cuda says";
}

}  // namespace dreamcomm
