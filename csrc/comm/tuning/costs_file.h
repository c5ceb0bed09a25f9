// Where the measured costs of a machine are kept.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "algorithms/cost/costs.h"

namespace dreamcomm {

/// The file for groups of `size` ranks with pages of `page_bytes`, all with a heap or
/// not, on this kind of machine:
/// costs-<processor>-<processors usable>-... in $XDG_CACHE_HOME/dreamcomm, or
/// ~/.cache/dreamcomm; empty if neither is known.
std::string costs_path(int size, std::size_t page_bytes, bool heaps);

/// The costs in a file; nothing if it is missing or is no such file.
std::optional<Costs> load_costs(const std::string& path);

/// Writes the file whole or not at all, with its folder; says whether it did.
bool save_costs(const std::string& path, const Costs& costs);

}  // namespace dreamcomm
