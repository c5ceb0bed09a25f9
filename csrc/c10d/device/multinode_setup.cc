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

/// A rank's, as the others read it.
struct Answer {
  bool can = true;
  std::array<char, 511> why{};

  void refuse(std::string_view reason) {
    can = false;
    reason.substr(0, reason.find('\n')).copy(why.data(), why.size() - 1);
  }
};

/// What is not said by the program's own means: "" if `act` went well.
template <typename Act>
void attempt(Answer& own, const Act& act) {
  try {
    if (own.can) act();
  } catch (const std::exception& error) {
    if (is_foreign(error)) throw;
    own.refuse(concat("what goes between hosts: ", error.what()));
  }
}

std::optional<std::string> refusal_of_any(const Answer& own, const DeviceHosts& hosts) {
  std::vector<Answer> all(static_cast<std::size_t>(hosts.place.topology.size()));
  hosts.exchange(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  const auto one = std::find_if(all.begin(), all.end(), [](const Answer& a) { return !a.can; });
  if (one == all.end()) return std::nullopt;
  return concat("rank ", one - all.begin(), ": ", one->why.data());
}

}  // namespace

/// INVARIANT: all hosts' ranks go the same way, so what one cannot do none does. Engines connect
/// here: they allocate memory then, which waits for kernels that would wait for peers.
MultinodeSetup meet_hosts(const std::shared_ptr<gpu::Communicator>& group,
                          const std::string& why_not, const DeviceHosts& hosts,
                          c10::Device device) {
  Answer own;
  Fallback::Inner engine;
  if (!group) own.refuse(why_not);
  attempt(own, [&] { engine = hosts.make_engine(); });
  if (auto refusal = refusal_of_any(own, hosts)) return {nullptr, std::move(*refusal)};
  auto span = std::make_unique<MultinodeDeviceGroup>(group, hosts.place, std::move(engine), device);
  attempt(own, [&] { span->agree(CurrentDevice(device).stream()); });
  if (auto refusal = refusal_of_any(own, hosts)) return {nullptr, std::move(*refusal)};
  return {std::move(span), ""};
}

}  // namespace dreamcomm
