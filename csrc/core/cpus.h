// How many processors the process may use.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dreamcomm {

/// At least 1: those of the affinity mask, and no more than the control groups
/// (version 1 or 2) of the process grant time for, rounded up. Reads files.
int usable_cpus();

/// The processor this thread runs on now; cheap.
int current_cpu();

/// Moves this thread to another processor than the one it is on, if it may use any;
/// it may use the same ones afterwards. (Processors that its cpuset is given later are
/// not among them, as with any thread whose affinity was ever set.)
void leave_cpu();

/// Processors' worth of time in a version 2 "cpu.max" ("150000 100000" is 1.5), or
/// nothing where it sets no limit.
std::optional<double> cpu_limit(std::string_view text);

}  // namespace dreamcomm
