#include "c10d/base/options.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "algorithms/table.h"
#include "c10d/base/convert.h"
#include "comm/communicator.h"
#include "comm/tuning/costs_file.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 30;
/// Keeps sums of sizes from overflowing; memory that the system refuses is done without.
constexpr std::size_t kMostHeap = std::size_t{1} << 60;

/// Setting a group up may take this long, whatever its timeout.
constexpr std::chrono::milliseconds kLeastMeeting{10'000};

void require_bytes(const char* option, std::size_t bytes, std::size_t least,
                   std::size_t most = kMost) {
  TORCH_CHECK_VALUE(bytes >= least && bytes <= most, "dreamcomm.Options: expected ", option,
                    " from ", least, " to ", most, ", got ", bytes);
}

/// The parts between a text's commas; none of an empty text.
std::vector<std::string> names_in(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream rest(text.empty() ? text : text + ',');
  for (std::string name; std::getline(rest, name, ',');) names.push_back(name);
  return names;
}

}  // namespace

std::string algorithm_named(const std::string& name) {
  if (name == "two_shot") return "direct";
  return name == "zero_copy" ? "heap" : name;
}

void require_valid(const DreamOptions& options) {
  const auto rows = algorithm_table();
  const bool known = options.algorithm == "auto" ||
                     std::any_of(rows.begin(), rows.end(),
                                 [&](const Row& row) { return row.name == options.algorithm; });
  TORCH_CHECK_VALUE(
      known, "dreamcomm.Options: expected algorithm to be auto, direct (also ",
      "called two_shot), one_shot, ring, master or heap (also called zero_copy), got '",
      options.algorithm, "'");
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "dreamcomm.Options: expected a positive timeout, ",
                    "got ", options.timeout.count(), " ms");
  TORCH_CHECK_VALUE(options.cuda == "nccl" || options.cuda == "dreamcomm",
                    "dreamcomm.Options: expected cuda to be nccl or dreamcomm, got '", options.cuda,
                    "'");
  TORCH_CHECK_VALUE(options.internode_dtype == "float32" || options.internode_dtype == "16bit",
                    "dreamcomm.Options: expected internode_dtype to be float32 or 16bit, got '",
                    options.internode_dtype, "'");
  for (const std::string& name : names_in(options.hosts)) {
    TORCH_CHECK_VALUE(!name.empty() && name.find_first_of(" \t\n") == std::string::npos,
                      "dreamcomm.Options (or DREAMCOMM_HOSTS): expected hosts to be names without "
                      "blanks, one for every ",
                      "rank of the job, as a,a,b,b, got '", options.hosts, "'");
  }
  require_bytes("page_bytes", options.page_bytes, 1536);
  require_bytes("message_bytes", options.message_bytes, 128);
  require_bytes("heap_bytes", options.heap_bytes, 0, kMostHeap);
  TORCH_CHECK_VALUE(
      options.costs == "auto" || options.costs == "fixed" || load_costs(options.costs),
      "dreamcomm.Options: expected costs to be auto, fixed or the path of a file that was ",
      "written for auto, got '", options.costs, "'");
}

c10::intrusive_ptr<DreamOptions> own_options(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto* given = dynamic_cast<const DreamOptions*>(opts.get());
  TORCH_CHECK_VALUE(given != nullptr,
                    "expected the options of a dreamcomm group to be dreamcomm.Options");
  auto own = c10::make_intrusive<DreamOptions>(*given);
  own->timeout = bounded(own->timeout);
  return own;
}

std::vector<std::string> hosts_of(const DreamOptions& options, int size) {
  if (options.hosts.empty()) return {};
  const std::vector<std::string> of_job = names_in(options.hosts);
  std::vector<std::string> of_group;
  const std::vector<uint64_t>& members = options.global_ranks_in_group;
  const bool is_job = options.group_name == kDefaultGroup && members.empty();
  TORCH_CHECK_VALUE(!is_job || of_job.size() <= static_cast<std::size_t>(size),
                    "dreamcomm.Options (or DREAMCOMM_HOSTS): expected hosts to name one for every "
                    "rank of the job, got '",
                    options.hosts, "', which names ", of_job.size(), " for ", size, " ranks");
  for (int rank = 0; rank < size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const std::size_t member = members.empty() ? index : members.at(index);
    TORCH_CHECK_VALUE(member < of_job.size(),
                      "dreamcomm.Options (or DREAMCOMM_HOSTS): expected hosts to name one for ",
                      "every rank of the job, got '", options.hosts, "', which names ",
                      of_job.size(), " and none for rank ", member);
    of_group.push_back(of_job[member]);
  }
  return of_group;
}

std::chrono::milliseconds rendezvous_timeout(std::chrono::milliseconds timeout) {
  // A group for quick calls may still be slow to set up: processes start one by one.
  return std::max(timeout, kLeastMeeting);
}

std::chrono::milliseconds rendezvous_timeout(const DreamOptions& options) {
  return rendezvous_timeout(options.timeout);
}

std::chrono::milliseconds time_to_connect(const DreamOptions& options) {
  return rendezvous_timeout(options) * 4 / 5;
}

}  // namespace dreamcomm
