// A link between nodes that is one of torch's own Gloo groups.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "c10d/base/torch_fallback.h"
#include "transport/link.h"

namespace dreamcomm {

/// The group carries only the link's messages. Its pairs must be connected: else a first message
/// would wait for its receiver, without a way to interrupt it.
class GlooLink final : public Link {
 public:
  GlooLink(Fallback::Inner gloo, int rank) : gloo_(std::move(gloo)), rank_(rank) {}

  std::shared_ptr<Parcel> send(int rank, const Cargo& cargo, std::uint32_t tag) override;
  std::shared_ptr<Parcel> receive(int rank, const Cargo& cargo, std::uint32_t tag) override;
  void close() override;
  std::string describe() const override { return "torch's Gloo carries messages"; }

 private:
  Fallback::Inner gloo() const;
  template <typename Begin>
  std::shared_ptr<Parcel> begin(int rank, const Cargo& cargo, Begin&& begin) const;

  mutable std::mutex mutex_;
  Fallback::Inner gloo_;  // null once closed
  const int rank_;
};

}  // namespace dreamcomm
