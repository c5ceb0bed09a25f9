// Element-wise reduction of several arrays into one, in the order given.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "core/types.h"

namespace dreamcomm {

/// The widest vectors that this machine's kernels use: "AVX-512", "AVX2", "SSE2",
/// "NEON" or "portable code". The results do not depend on it.
std::string_view instruction_set();

/// Throws Error(kInvalid) if the operation is not defined on the type, the
/// divisor is below 1, or an integer type cannot hold `how.factor`.
void check_defined(const Reduction& how);

/// out[i] = in[0][i] op in[1][i] op ... for i in [0, count).
///
/// The operands are combined from left to right, whatever the count, so equal
/// inputs give equal bits; or along a binary tree, if `how.along_tree`. float16 and bfloat16 are
/// accumulated in float32 and rounded once at the end (to nearest even). AVG divides the sum by
/// `how.divisor` (integers truncate toward zero); PREMUL_SUM multiplies each
/// input by its factor first. MIN and MAX hand a NaN on, as torch does.
/// Signed overflow wraps. `out` may be equal to one of `in`, not overlap it
/// otherwise. Pointers need no alignment beyond the element's own.
/// A NaN in the result is always the same quiet NaN.
/// Throws as check_defined() does, or Error(kInvalid) if `in` is empty.
void reduce(const Reduction& how, std::span<const std::byte* const> in, std::byte* out,
            std::size_t count);

/// The same into every one of `outs`, which do not overlap each other; each may be
/// equal to one of `in`. `in` holds other pointers afterwards.
///
/// The result is made a tile at a time in the L1 cache and copied from there. The tensors of
/// several ranks often begin at equal offsets in their pages. A loop that reads one and writes
/// another is slowed down by the false dependence of loads on stores 4096 bytes apart. The tile
/// avoids it: 2 to 3 times faster on two cores.
void reduce_into(const Reduction& how, std::span<const std::byte*> in,
                 std::span<std::byte* const> outs, std::size_t count);

}  // namespace dreamcomm
