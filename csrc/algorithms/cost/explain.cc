#include "algorithms/cost/explain.h"

#include <iomanip>
#include <sstream>

#include "core/error.h"
#include "kernels/reduce.h"
#include "transport/window.h"

namespace dreamcomm {

namespace {

std::string microseconds(double seconds) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(seconds < 1e-5 ? 2 : 0) << seconds * 1e6 << " us";
  return text.str();
}

std::string reason(const CallShape& call, const Preference& preference, bool heaps) {
  const std::string chosen =
      preference.algorithm == "auto"
          ? std::string("the least predicted time of those that suit is taken")
          : concat("the option algorithm names '", preference.algorithm,
                   "'; where it does not suit, the least predicted time is taken");
  // all_to_all finds out in the wait in which its sizes are compared.
  const bool asks = heaps && call.kind != Kind::kAllToAll && asks_for_heaps(call, preference);
  const std::string wait = asks ? "; one wait finds out whose tensors lie in heaps" : "";
  return concat(chosen, wait, "; kernels use ", instruction_set());
}

}  // namespace

std::string explain(const CallShape& call, const Preference& preference,
                    const std::string& transport, bool heaps) {
  if (call.kind == Kind::kSend || call.kind == Kind::kRecv) {
    return concat(name(call.kind), " over ", transport,
                  ": announced to the receiver, then streamed through two buffers; up to ",
                  Envelope::kInline, " bytes travel inside the announcement");
  }
  const auto table = algorithm_table();
  const std::size_t picked = pick(call, preference);
  std::ostringstream text;
  text << name(call.kind) << " of " << call.bytes << " bytes a rank over " << transport << ": "
       << table[picked].name << '\n';
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (table[i].kind != call.kind) continue;
    const bool in_vain = is_in_heaps(table[i]) && !heaps;
    const std::string_view against =
        in_vain ? "not all ranks have heaps" : objection(table[i], call, preference);
    text << (i == picked ? "  * " : "    ") << table[i].name << ": "
         << microseconds(predict(table[i], call, *preference.costs)) << ": " << table[i].why;
    if (!against.empty()) text << " [passed over: " << against << ']';
    text << '\n';
  }
  text << "  (" << reason(call, preference, heaps) << ')';
  return text.str();
}

}  // namespace dreamcomm
