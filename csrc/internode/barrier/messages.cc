#include "internode/barrier/messages.h"

#include <cstddef>
#include <istream>
#include <ostream>
#include <sstream>

namespace dreamcomm::barrier {
namespace {

/// Writes the length first, because the text may contain anything.
void put(std::ostream& to, const std::string& text) { to << text.size() << ' ' << text << ' '; }

std::string take(std::istream& from) {
  std::size_t length = 0;
  from >> length;
  from.get();
  std::string text(length, '\0');
  from.read(text.data(), static_cast<std::streamsize>(length));
  return text;
}

}  // namespace

std::string to_text(const Report& report) {
  std::ostringstream text;
  text << report.number << ' ' << static_cast<int>(report.state) << ' ' << report.issued << ' '
       << report.before << ' ' << report.over << ' ' << report.count.bits << ' '
       << report.count.missing.size() << ' ';
  for (std::size_t i = 0; i < report.count.missing.size(); ++i) {
    text << report.count.missing[i] << ' ';
    put(text, report.count.acts[i]);
  }
  put(text, report.count.problem);
  return text.str();
}

Report report_from(const std::string& text) {
  Report report;
  std::istringstream from(text);
  int state = 0;
  std::size_t missing = 0;
  from >> report.number >> state >> report.issued >> report.before >> report.over >>
      report.count.bits >> missing;
  if (!from) return {};  // nothing has been posted
  report.state = static_cast<Report::State>(state);
  for (std::size_t i = 0; i < missing; ++i) {
    int rank = 0;
    from >> rank;
    report.count.missing.push_back(rank);
    report.count.acts.push_back(take(from));
  }
  report.count.problem = take(from);
  return report;
}

std::string to_text(const Verdict& verdict) {
  std::ostringstream text;
  text << verdict.ended << ' ' << verdict.passed << ' ' << verdict.in << ' ' << verdict.entered_with
       << ' ' << verdict.asks << ' ';
  for (const std::int64_t issued : verdict.issued) text << issued << ' ';
  text << verdict.outcome.bits << ' ';
  put(text, verdict.outcome.problem);
  return text.str();
}

Verdict verdict_from(const std::string& text) {
  Verdict verdict;
  std::istringstream from(text);
  from >> verdict.ended >> verdict.passed >> verdict.in >> verdict.entered_with >> verdict.asks;
  for (std::int64_t& issued : verdict.issued) from >> issued;
  from >> verdict.outcome.bits;
  if (!from) return {};
  verdict.outcome.problem = take(from);
  return verdict;
}

}  // namespace dreamcomm::barrier
