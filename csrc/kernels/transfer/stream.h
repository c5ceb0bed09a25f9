// A copy that leaves the caches alone.
#pragma once

#include <cstddef>

namespace dreamcomm {

/// memcpy whose stores go past the caches where the machine has such stores. For
/// memory that another core reads next: where the two share no cache, a line that
/// the reader still holds is costly to take back, and costly to fetch again. The
/// copy is visible to whoever sees a flag published after it.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace dreamcomm
