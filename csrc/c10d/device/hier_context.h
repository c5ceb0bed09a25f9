// A multi-node call on a device's memory: this library's kernels within the host, torch's own
// engine between nodes. All of it is put on one stream; the host waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "gpu/host/communicator.h"
#include "internode/collectives/hier_context.h"

namespace dreamcomm {

/// The messages of one number, which the engine takes together: NCCL would wait for each one before
/// it begins the next.
class BatchedTransfer;

class DeviceHierContext final : public HierContext {
 public:
  /// All of these outlive the context.
  struct Level {
    gpu::Communicator& group;  // of the ranks of this host
    c10d::Backend& engine;
    const Topology& topology;
    int rank;
    bool widens_halves;
    c10::Device device;
    void* stream;  // the current one
  };
  DeviceHierContext(const Level& level, Clock::time_point deadline, std::size_t chunk);
  /// Orders the stream behind messages under way, so that no room is used again before they end.
  ~DeviceHierContext() override;

  void run_on_host(Kind kind, const Reduction& how, std::span<const Block> in,
                   std::span<const Block> out, int root = 0) override;
  Cargo allocate(std::size_t bytes) const override;
  /// The block itself: the stream does not continue before the message is sent.
  Cargo keep(const Block& block) override;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override;
  Cargo widened(const TwoStepReduction& steps, std::byte* in, std::size_t count) override;
  void combine(const TwoStepReduction& steps, std::span<const std::byte* const> of_hosts,
               std::byte* out, std::size_t count) override;
  void send(int rank, const Cargo& cargo, std::uint32_t number) override;
  void receive(int rank, const Cargo& cargo, std::uint32_t number) override;
  void depart(std::uint32_t number) override;
  Transfers sends() override;
  Transfers receives() override;
  /// Orders the stream behind them.
  void wait(const Transfers& transfers) override;

 private:
  const std::shared_ptr<BatchedTransfer>& transfer(std::uint32_t number);

  const Level level_;
  const Clock::time_point deadline_;
  std::map<std::uint32_t, std::shared_ptr<BatchedTransfer>> named_;  // not started
  std::vector<std::shared_ptr<BatchedTransfer>> departed_;
  Transfers sends_;
  Transfers receives_;
};

}  // namespace dreamcomm
