#include "c10d/rendezvous/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <chrono>
#include <utility>
#include <vector>

#include "c10d/rendezvous/connect_nodes.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

std::string in_short(const std::exception& error) {
  const std::string text = gloo_error_text(error.what());
  return text.substr(0, text.find(". This is typically"));
}

[[noreturn]] void fail(int rank, const std::exception& error) {
  throw Error(ErrorKind::kPeerLost,
              concat("the connection to rank ", rank, " has failed: ", in_short(error)));
}

class GlooParcel final : public Parcel {
 public:
  GlooParcel(c10::intrusive_ptr<c10d::Work> work, int peer) : work_(std::move(work)), peer_(peer) {}

  bool wait() override {
    try {
      // Calls have deadlines of their own; Gloo's would end them with its own errors.
      return work_->wait(std::chrono::hours(24 * 365));
    } catch (const std::exception& error) {
      fail(peer_, error);
    }
  }
  void interrupt() override { work_->abort(); }  // ends the wait: the message stays under way

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const int peer_;
};

std::vector<at::Tensor> tensors_of(const Cargo& cargo) {
  return {at::from_blob(
      cargo.data(), {static_cast<std::int64_t>(cargo.bytes)}, [owner = cargo.memory](void*) {},
      at::TensorOptions(at::kByte))};
}

}  // namespace

Fallback::Inner GlooLink::gloo() const {
  const std::scoped_lock lock(mutex_);
  check(gloo_.defined(), ErrorKind::kAborted, "rank ", rank_, " has aborted the group");
  return gloo_;
}

/// Hidden from the profiler: a message may outlast the profiler's run that it began in. When a
/// recorded message ends, torch writes to that run's memory, which is freed by then.
template <typename Begin>
std::shared_ptr<Parcel> GlooLink::begin(int rank, const Cargo& cargo, Begin&& begin) const {
  const at::DisableRecordFunctionGuard unseen;
  const Fallback::Inner inner = gloo();
  std::vector<at::Tensor> tensors = tensors_of(cargo);
  try {
    return std::make_shared<GlooParcel>(begin(*inner, tensors), rank);
  } catch (const std::exception& error) {
    fail(rank, error);
  }
}

std::shared_ptr<Parcel> GlooLink::send(int rank, const Cargo& cargo, std::uint32_t tag) {
  return begin(rank, cargo, [&](c10d::Backend& gloo, std::vector<at::Tensor>& tensors) {
    return gloo.send(tensors, rank, static_cast<int>(tag));
  });
}

std::shared_ptr<Parcel> GlooLink::receive(int rank, const Cargo& cargo, std::uint32_t tag) {
  return begin(rank, cargo, [&](c10d::Backend& gloo, std::vector<at::Tensor>& tensors) {
    return gloo.recv(tensors, rank, static_cast<int>(tag));
  });
}

/// The connections end with the last message that holds the group.
void GlooLink::close() {
  Fallback::Inner last;  // dropped without the lock
  const std::scoped_lock lock(mutex_);
  last.swap(gloo_);
}

}  // namespace dreamcomm
