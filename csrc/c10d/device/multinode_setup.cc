#include "c10d/device/multinode_setup.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "c10d/base/current_device.h"
#include "c10d/base/gil_signals.h"

namespace dreamcomm {
namespace {

/// A rank's answer, as the others read it.
struct Answer {
  bool can = true;
  std::array<char, 511> why{};

  void refuse(std::string_view reason) {
    can = false;
    reason.substr(0, reason.find('\n')).copy(why.data(), why.size() - 1);
  }
};

/// Runs `act`, and turns its errors into a refusal. Ctrl-C passes.
template <typename Act>
void attempt(Answer& own, const Act& act) {
  try {
    if (own.can) act();
  } catch (const std::exception& error) {
    if (is_foreign(error)) throw;
    own.refuse(concat("what goes between hosts: ", error.what()));
  }
}

std::optional<std::string> refusal_of_any(const Answer& own, const DeviceNodes& nodes) {
  std::vector<Answer> all(static_cast<std::size_t>(nodes.place.topology.size()));
  nodes.exchange(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  const auto one = std::find_if(all.begin(), all.end(), [](const Answer& a) { return !a.can; });
  if (one == all.end()) return std::nullopt;
  return concat("rank ", one - all.begin(), ": ", one->why.data());
}

}  // namespace

/// INVARIANT: the ranks of all nodes decide alike, so what one cannot do none does. Engines connect
/// here: they allocate memory then, which waits for kernels, and those would wait for peers.
MultinodeSetup set_up_nodes(const std::shared_ptr<gpu::Communicator>& group,
                            const std::string& why_not, const DeviceNodes& nodes,
                            c10::Device device) {
  Answer own;
  Fallback::Inner engine;
  if (!group) own.refuse(why_not);
  attempt(own, [&] { engine = nodes.make_engine(); });
  if (auto refusal = refusal_of_any(own, nodes)) return {nullptr, std::move(*refusal)};
  auto made = std::make_unique<MultinodeDeviceGroup>(group, nodes.place, std::move(engine), device);
  attempt(own, [&] { made->agree(CurrentDevice(device).stream()); });
  if (auto refusal = refusal_of_any(own, nodes)) return {nullptr, std::move(*refusal)};
  return {std::move(made), ""};
}

}  // namespace dreamcomm
