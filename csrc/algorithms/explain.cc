#include "algorithms/explain.h"

#include <sstream>

#include "core/error.h"
#include "transport/window.h"

namespace dreamcomm {

std::string explain(const Call& call, const Preference& preference, const std::string& transport) {
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
    const std::string_view against = objection(table[i], call, preference);
    text << (i == picked ? "  * " : "    ") << table[i].name << ": " << table[i].why;
    if (!against.empty()) text << " [passed over: " << against << ']';
    text << '\n';
  }
  text << "  (the first that suits is taken, or the one that the option algorithm names: "
       << preference.algorithm << ')';
  return text.str();
}

}  // namespace dreamcomm
