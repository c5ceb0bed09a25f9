// Files that no folder names: they end with the last process that has them open or mapped.
#pragma once

#include <cstddef>
#include <string>

#include "transport/os/unix_socket.h"

namespace dreamcomm {

/// A new zeroed file of `bytes`, whose place on the disk is reserved. Other users cannot open it.
/// Throws Error(kSystem): the folder is missing, not writable, full, or lies in memory.
Fd create_unnamed_file(const std::string& folder, std::size_t bytes);

/// True if the descriptor is a file of exactly `bytes`, that can be written.
bool is_unnamed_file(const Fd& fd, std::size_t bytes);

/// True if a larger file would end the process by SIGXFSZ, where that is not ignored.
bool is_too_large_a_file(std::size_t bytes);

// Parts of a file, in bytes that are multiples of a page. Each throws Error(kSystem), as where the
// disk has failed.

/// Begins to write what has changed. Does not wait for the disk.
void start_writing(const Fd& fd, std::size_t offset, std::size_t bytes);
/// Waits until all changes are written, and frees the pages that no process maps.
void drop_pages(const Fd& fd, std::size_t offset, std::size_t bytes);
/// Begins to read. Does not wait for the disk.
void start_reading(const Fd& fd, std::size_t offset, std::size_t bytes);

}  // namespace dreamcomm
