// The state of a late rank's process, as seen from the kernel and its other groups.
#pragma once

#include <sys/types.h>

#include <string>

namespace dreamcomm {

/// "; its process 42 is stopped (SIGSTOP or a debugger)", or that it is in a call of another group
/// than `team` (RankView). Unless it was just seen `inside` a call of that one, it computes or
/// sleeps. Empty if /proc shows nothing: for a process of another user or PID namespace, or one
/// that has ended.
std::string describe_process(pid_t pid, const std::string& team, bool inside);
/// True if it is stopped by SIGSTOP or a debugger, as far as /proc shows.
bool is_stopped(pid_t pid);

}  // namespace dreamcomm
