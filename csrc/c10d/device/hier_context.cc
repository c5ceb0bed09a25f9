#include "c10d/device/hier_context.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "c10d/base/call_blocks.h"
#include "c10d/base/current_device.h"
#include "c10d/device/contiguous.h"
#include "c10d/device/torch_reduce.h"

namespace dreamcomm {
namespace {

/// Memory that the caller keeps.
Cargo lent(std::byte* data, std::size_t bytes) {
  return {std::shared_ptr<std::byte>(std::shared_ptr<void>(), data), 0, bytes};
}

}  // namespace

class BatchedTransfer final : public Parcel {
 public:
  void add(int rank, const Cargo& cargo, bool sends) { messages_.push_back({rank, cargo, sends}); }

  void depart(c10d::Backend& engine, c10::Device device) {
    engine.startCoalescing();
    try {
      for (const Message& one : messages_) hand_over(engine, one, device);
    } catch (...) {
      engine.endCoalescing();
      throw;
    }
    work_ = engine.endCoalescing();
  }

  bool wait() override {
    if (work_) std::exchange(work_, nullptr)->wait();
    return true;
  }
  void interrupt() override {}  // the host does not wait

 private:
  struct Message {
    int rank;
    Cargo cargo;
    bool sends;
  };

  static void hand_over(c10d::Backend& engine, const Message& one, c10::Device device) {
    std::vector<at::Tensor> tensors{bytes_at({one.cargo.data(), one.cargo.bytes}, device)};
    one.sends ? engine.send(tensors, one.rank, 0) : engine.recv(tensors, one.rank, 0);
  }

  std::vector<Message> messages_;
  c10::intrusive_ptr<c10d::Work> work_;  // null: not departed, or waited for
};

DeviceHierContext::DeviceHierContext(const Level& level, Clock::time_point deadline,
                                     std::size_t chunk)
    : HierContext(level.topology, level.rank, chunk, level.widens_halves),
      level_(level),
      deadline_(deadline) {}

DeviceHierContext::~DeviceHierContext() {
  try {
    for (const auto& one : departed_) one->wait();
  } catch (const std::exception& error) {
    TORCH_WARN("dreamcomm: messages of GPUs between hosts: ", error.what());
  }
}

void DeviceHierContext::run_on_host(Kind kind, const Reduction& how, std::span<const Block> in,
                                    std::span<const Block> out, int root) {
  const Contiguous ins(in, level_.device);
  const Contiguous outs(out, level_.device);
  ins.collect();
  Request part;
  part.kind = kind;
  part.reduction = how;
  part.in = ins.blocks();
  part.out = outs.blocks();
  part.root = root;
  part.deadline = deadline_;
  level_.group.run(part, level_.stream);
  outs.spread();
}

Cargo DeviceHierContext::allocate(std::size_t bytes) const {
  const auto options = at::TensorOptions().dtype(at::kByte).device(level_.device);
  at::Tensor made = at::empty({static_cast<std::int64_t>(bytes)}, options);
  auto* const data = static_cast<std::byte*>(made.mutable_data_ptr());
  return {std::shared_ptr<std::byte>(data, [made](std::byte*) {}), 0, bytes};
}

Cargo DeviceHierContext::keep(const Block& block) { return lent(block.data, block.bytes); }

void DeviceHierContext::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  copy_into(bytes_at({to, bytes}, level_.device),
            bytes_at({const_cast<std::byte*>(from), bytes}, level_.device));
}

Cargo DeviceHierContext::widened(const TwoStepReduction& steps, std::byte* in, std::size_t count) {
  if (!steps.widens()) return lent(in, count * steps.item());
  Cargo wide = allocate(count * steps.wire_item());
  convert_on_device({steps.wire, wide.data()}, {steps.type, in}, count, level_.device);
  return wide;
}

void DeviceHierContext::combine(const TwoStepReduction& steps,
                                std::span<const std::byte* const> of_hosts, std::byte* out,
                                std::size_t count) {
  reduce_on_device(steps.between, of_hosts, {steps.type, out}, count, level_.device);
}

const std::shared_ptr<BatchedTransfer>& DeviceHierContext::transfer(std::uint32_t number) {
  std::shared_ptr<BatchedTransfer>& one = named_[number];
  if (!one) one = std::make_shared<BatchedTransfer>();
  return one;
}

void DeviceHierContext::send(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes == 0) return;
  transfer(number)->add(rank, cargo, true);
  sends_.push_back({transfer(number), rank});
  traffic_.sent += cargo.bytes;
}

void DeviceHierContext::receive(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes == 0) return;
  transfer(number)->add(rank, cargo, false);
  receives_.push_back({transfer(number), rank});
  traffic_.received += cargo.bytes;
}

void DeviceHierContext::depart(std::uint32_t number) {
  const auto found = named_.find(number);
  if (found == named_.end()) return;
  departed_.push_back(std::move(found->second));
  named_.erase(found);
  departed_.back()->depart(level_.engine, level_.device);
}

HierContext::Transfers DeviceHierContext::sends() { return std::exchange(sends_, {}); }
HierContext::Transfers DeviceHierContext::receives() { return std::exchange(receives_, {}); }

void DeviceHierContext::wait(const Transfers& transfers) {
  for (const Transfer& one : transfers) one.parcel->wait();
}

}  // namespace dreamcomm
