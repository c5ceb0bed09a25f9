// How many processors the process may use.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dreamcomm {

/// Returns at least 1: the processors in the affinity mask, limited by the time that the process's
/// control groups (version 1 or 2) grant, rounded up. Reads files.
int usable_cpus();

/// The processor this thread runs on now; cheap.
int current_cpu();

/// Moves this thread to another processor than its current one, if it may use another. Its affinity
/// is the same afterwards. (Processors that its cpuset is given later are not in it, as with any
/// thread whose affinity was ever set.)
void leave_cpu();

/// Processors' worth of time in a version 2 "cpu.max" ("150000 100000" is 1.5), or
/// nothing where it sets no limit.
std::optional<double> cpu_limit(std::string_view text);

}  // namespace dreamcomm
