// A copy that leaves the caches alone.
#pragma once

#include <cstddef>

namespace dreamcomm {

/// memcpy whose stores bypass the caches, where the machine has such stores. It is for memory that
/// another core reads next. Where the two share no cache, a line that the reader still holds is
/// costly to take back, and costly to fetch again. The copy is visible to every thread that reads a
/// flag published after it.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace dreamcomm
