#include "c10d/rendezvous/rendezvous.h"

#include <functional>
#include <optional>
#include <utility>

#include "c10d/base/python_callbacks.h"
#include "c10d/process/process_call_sites.h"
#include "c10d/rendezvous/liveness.h"
#include "comm/rank_state.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

/// Why a rank of a new group does not take part, as the default group knows it.
std::function<std::string(int)> members_watch(const DreamOptions& options) {
  const std::shared_ptr<Liveness> job = is_default(options) ? nullptr : liveness();
  if (!job) return {};
  return [members = members_of(options), job](int rank) -> std::string {
    if (static_cast<std::size_t>(rank) >= members.size()) return "";
    const int member = members[static_cast<std::size_t>(rank)];
    if (std::string why = job->group_order().contradiction(member); !why.empty()) return why;
    return job->has_ended(member) ? concat("the process of rank ", rank, " has ended") : "";
  };
}

/// Describes a group whose name torch has counted or hashed; names of other kinds give nothing.
std::optional<GroupRecord> record_of(const DreamOptions& options) {
  GroupRecord record{.name = options.group_name, .members = members_of(options)};
  const bool known = record.number() || record.is_hashed();
  return known && !record.members.empty() ? std::optional(record) : std::nullopt;
}

/// The part of the option that has to be equal on all ranks; paths may differ.
std::string costs_kind(const std::string& costs) {
  return costs == "auto" || costs == "fixed" ? costs : "file";
}

/// The group's members, as ranks of the job: groups that ranks make in different orders may have
/// one name and one size. For many ranks a number that tells them from others.
std::string members_text(const DreamOptions& options) {
  constexpr std::size_t kMostNamed = 16;
  const std::vector<int> members = members_of(options);
  std::string text;
  std::uint64_t mixed = 0xcbf29ce484222325;  // FNV-1a
  for (const int member : members) {
    text += concat(text.empty() ? "" : "/", member);
    mixed = (mixed ^ static_cast<std::uint64_t>(member)) * 0x100000001b3;
  }
  if (members.size() > kMostNamed) return concat(members.size(), '/', mixed);
  return members.empty() ? "all" : text;
}

std::vector<std::string> settings_of(const DreamOptions& options) {
  return {concat("algorithm=", options.algorithm),
          concat("fixed_order=", options.fixed_order ? 1 : 0),
          concat("costs=", costs_kind(options.costs)),
          concat("cuda=", options.cuda),
          concat("cuda_heap_bytes=", options.cuda_heap_bytes),
          concat("hosts=", options.hosts.empty() ? "found" : options.hosts),
          concat("internode_dtype=", options.internode_dtype),
          concat("ranks=", members_text(options))};
}

}  // namespace

std::vector<int> members_of(const DreamOptions& options) {
  return {options.global_ranks_in_group.begin(), options.global_ranks_in_group.end()};
}

bool is_default(const DreamOptions& options) {
  return options.group_name == kDefaultGroup && options.global_ranks_in_group.empty();
}

std::string group_being_made(const DreamOptions& options) {
  if (is_default(options)) return "a group";
  return describe_group(options.group_name, members_of(options));
}

ShmOptions rendezvous_options(const DreamOptions& options, int size, const PythonCallbacks& host,
                              const std::shared_ptr<Heap>& heap, const std::string& no_heap) {
  ShmOptions shm{.page_bytes = options.page_bytes,
                 .message_bytes = options.message_bytes,
                 .timeout = rendezvous_timeout(options),
                 .heap = heap,
                 .no_heap = no_heap,
                 .settings = settings_of(options),
                 .remedies = {{"ranks", kMembersAlone}},
                 .group = group_being_made(options),
                 .warn = host.warn,
                 .will_not_come = members_watch(options),
                 .hosts = hosts_of(options, size),
                 .refuse = !options.shared_memory};
  // Also for a rank that is alone on its host: warnings of its own threads use this service.
  if (size > 1) shm.make_call_sites = [&host] { return process_call_sites(host.main_thread_site); };
  return shm;
}

ShmResult meet(Store& store, int rank, int size, const ShmOptions& shm,
               const DreamOptions& options) {
  const std::optional<GroupRecord> record = record_of(options);
  const std::shared_ptr<Liveness> job = record ? liveness() : nullptr;
  if (!job) return connect_shm(store, rank, size, shm);
  job->group_order().begin(*record);
  try {
    ShmResult result = connect_shm(store, rank, size, shm);
    job->group_order().end(true);
    return result;
  } catch (...) {
    job->group_order().end(false);
    throw;
  }
}

}  // namespace dreamcomm
