#include "comm/tuning/agree_costs.h"

#include <cstring>
#include <type_traits>

#include "comm/wait_watchdog.h"

namespace dreamcomm {

Measured agree_on_costs(RankState& state, Rounds& rounds, Primitives::Scratch& scratch,
                        const std::optional<Costs>& known, Heap* heap, const TuningWaits& waits) {
  const std::function<std::string()> what = [] {
    return std::string("agreeing on the costs of algorithms");
  };
  WaitWatchdog watchdog(state, what, waits.deadline, waits.idle, waits.interrupt);
  static_assert(std::is_trivially_copyable_v<std::optional<Costs>>);
  try {
    std::memcpy(rounds.page(), &known, sizeof known);
    rounds.turn(Peers::all(), Peers::all(), watchdog);
    std::optional<Costs> told;
    std::memcpy(&told, rounds.from(0), sizeof told);
    return told ? Measured{*told, true} : measure_costs(rounds, scratch, heap, watchdog);
  } catch (const Error& error) {
    state.fail(error.kind(), error.what());
    throw;
  } catch (...) {
    state.fail(ErrorKind::kInterrupted, concat(what(), " was interrupted on ", state.who()));
    throw;
  }
}

}  // namespace dreamcomm
