#include "transport/introspect/process_state.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "transport/introspect/window_reader.h"
#include "transport/os/memfd.h"

namespace dreamcomm {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(pid_t pid) { return fs::path("/proc") / std::to_string(pid); }

/// Returns the state of the main thread, as /proc/PID/stat has it after the command in parentheses;
/// or 0.
char state_of(const fs::path& process) {
  std::ifstream file(process / "stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t end = text.rfind(") ");
  return end == std::string::npos || end + 2 >= text.size() ? '\0' : text[end + 2];
}

/// Returns the call, of any group, that the process has been in for longest.
std::optional<RankView> longest_call(pid_t pid, const fs::path& process) {
  std::optional<RankView> longest;
  std::error_code gone;
  for (fs::directory_iterator one(process / "fd", gone), end; !gone && one != end;
       one.increment(gone)) {
    std::error_code closed;
    const std::string opened = fs::read_symlink(*one, closed).string();
    if (closed || opened != concat("/memfd:", kWindowLabel, " (deleted)")) continue;
    const std::optional<RankView> seen = observe(one->path().string());
    if (!seen || !(seen->inside || seen->away) || seen->pid != pid)
      continue;  // a child process has its parent's windows open
    if (!longest || seen->entered_ns < longest->entered_ns) longest = seen;
  }
  return longest;
}

/// A process that was just woken, as this one was, runs for a moment.
bool still_runs(const fs::path& process) {
  constexpr int kLooks = 3;
  constexpr std::chrono::milliseconds kMoment{2};
  for (int look = 0; look < kLooks; ++look) {
    std::this_thread::sleep_for(kMoment);
    if (state_of(process) != 'R') return false;
  }
  return true;
}

}  // namespace

bool is_stopped(pid_t pid) {
  const char state = state_of(folder_of(pid));
  return state == 'T' || state == 't';
}

std::string describe_process(pid_t pid, const std::string& team, bool inside) {
  if (pid <= 0) return "";
  const fs::path process = folder_of(pid);
  const char state = state_of(process);
  if (state == 'T' || state == 't') {
    return concat("; its process ", pid, " is stopped (SIGSTOP or a debugger)");
  }
  if (const std::optional<RankView> call = longest_call(pid, process)) {
    if (call->team == team) return "";
    return concat("; its process ", pid, ", in group '", call->group, "', ", last_act(*call));
  }
  if (inside && state != 'D') return "";
  switch (state == 'R' && !still_runs(process) ? 'S' : state) {
    case 'R':
      return concat("; its process ", pid, " computes, outside of all collectives");
    case 'S':
      return concat("; its process ", pid, " sleeps or waits, outside of all collectives");
    case 'D':
      return concat("; its process ", pid, " waits for a disk or the network (state D)");
    default:
      return "";
  }
}

}  // namespace dreamcomm
