// Packs many tensors into one flat buffer, and unpacks them, on a GPU: the counterpart of
// kernels/bucket.h, with the same arithmetic and the same bits.
//
// The buffer is divided into tiles, which are distributed among the blocks. Lanes take groups of a
// tile's elements and find the tensor that each belongs to. So the work is even for any sizes of
// tensors, and one kernel handles any number of them.
#pragma once

#include <bit>
#include <type_traits>

#include "core/half.h"
#include "core/schedule.h"
#include "gpu/bucket/norm.h"
#include "gpu/collectives/formats.h"
#include "gpu/collectives/vec16.h"

namespace dreamcomm::gpu {

/// A tensor, and the index of its first element in the buffer.
struct Part {
  std::byte* data;
  std::uint64_t begin;
};

/// A row of a buffer's elements; it begins at a whole block of the sum of squares.
struct BucketTask {
  std::byte* flat = nullptr;
  float* residual = nullptr;   // null: none; else as PackJob says
  double* partials = nullptr;  // null: no inspection; else one for each block of the row
  std::size_t count = 0;       // elements
  int parts = 0;               // at least one, none of them empty
  double scale = 1.0;
  double divisor = 1.0;  // of unpacking
};

/// Groups of elements that a lane reads before it writes the first.
inline constexpr unsigned kGroupsUnderWay = 4;

namespace bucket {

/// The last of parts [low, high) that begins at or before an element.
DREAMCOMM_DEVICE int part_at(const Part* parts, int low, int high, std::size_t element) {
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (parts[middle].begin <= element ? low : high) = middle;
  }
  return low;
}

/// Contiguous elements, read and written in as few accesses as possible.
template <typename E, int kCount>
struct Group {
  static constexpr std::size_t kBytes = sizeof(E) * kCount;
  static constexpr std::size_t kAccess = kBytes < kPackBytes ? kBytes : kPackBytes;
  static constexpr int kPerAccess = static_cast<int>(kAccess / sizeof(E));
  static_assert(kBytes % kAccess == 0);
  struct alignas(kAccess) Piece {
    E item[kPerAccess];
  };
  E item[kCount];

  /// True if `data` is aligned for these accesses.
  DREAMCOMM_DEVICE static bool fits(const std::byte* data) {
    return reinterpret_cast<std::uintptr_t>(data) % kAccess == 0;
  }
  DREAMCOMM_DEVICE void load_from(const std::byte* data) {
    for (int p = 0; p < kCount / kPerAccess; ++p) {
      const Piece piece = reinterpret_cast<const Piece*>(data)[p];
      for (int i = 0; i < kPerAccess; ++i) item[p * kPerAccess + i] = piece.item[i];
    }
  }
  DREAMCOMM_DEVICE void store_to(std::byte* data) const {
    for (int p = 0; p < kCount / kPerAccess; ++p) {
      Piece piece;
      for (int i = 0; i < kPerAccess; ++i) piece.item[i] = item[p * kPerAccess + i];
      reinterpret_cast<Piece*>(data)[p] = piece;
    }
  }
};

/// Converts one element from the format From to To.
template <typename From, typename To>
struct Step {
  static constexpr bool kWide =
      sizeof(typename From::Element) == 8 || sizeof(typename To::Element) == 8;
  using A = std::conditional_t<kWide, double, float>;
  using In = typename From::Element;
  using Out = typename To::Element;
  A scale;
  A divisor;

  DREAMCOMM_DEVICE explicit Step(const BucketTask& task)
      : scale(static_cast<A>(task.scale)), divisor(static_cast<A>(task.divisor)) {}

  /// Rounds once.
  DREAMCOMM_DEVICE static Out round(A value) {
    if constexpr (kWide && sizeof(Out) == 2) {
      return To::write(round_to_odd(value));
    } else {
      return To::write(static_cast<typename To::Accumulator>(value));
    }
  }
  // Division by 1 changes nothing and takes longer, so it is left out.
  DREAMCOMM_DEVICE Out operator()(In element) const {
    const A value = static_cast<A>(From::read(element));
    return round(divisor == 1 ? value * scale : value / divisor * scale);
  }
  DREAMCOMM_DEVICE Out operator()(In element, float& residual) const {
    const A value = static_cast<A>(From::read(element)) * scale + static_cast<A>(residual);
    const Out sent = round(value);
    residual = kernels::left_over(value, static_cast<A>(To::read(sent)));
    return sent;
  }
};

/// Finds where an element is read and where its result is written.
template <bool kPacks, typename From, typename To>
struct Places {
  const BucketTask& task;
  const Part* parts;

  DREAMCOMM_DEVICE std::byte* flat(std::size_t element) const {
    return task.flat +
           element * (kPacks ? sizeof(typename To::Element) : sizeof(typename From::Element));
  }
  DREAMCOMM_DEVICE std::byte* own(int part, std::size_t element) const {
    return parts[part].data +
           (element - parts[part].begin) *
               (kPacks ? sizeof(typename From::Element) : sizeof(typename To::Element));
  }
  DREAMCOMM_DEVICE std::size_t end_of(int part) const {
    return part + 1 < task.parts ? parts[part + 1].begin : task.count;
  }
};

template <bool kPacks, typename From, typename To>
class Mover {
 public:
  using In = typename From::Element;
  using Out = typename To::Element;
  /// A pack of the larger type, so that neighbouring lanes access neighbouring packs.
  static constexpr int kGroup =
      static_cast<int>(kPackBytes / (sizeof(In) < sizeof(Out) ? sizeof(Out) : sizeof(In)));

  DREAMCOMM_DEVICE Mover(const BucketTask& task, const Part* parts)
      : places_{task, parts}, step_(task), residual_(task.residual) {}

  DREAMCOMM_DEVICE std::size_t end_of(int part) const { return places_.end_of(part); }

  /// Moves elements of one part, by all lanes. `sums`, if not null, keeps what was written, as
  /// elements from `first` on.
  template <Lanes L, typename Sums>
  DREAMCOMM_DEVICE void move(const L& lanes, const Range& range, int part, Sums* sums,
                             std::size_t first) const {
    const std::size_t whole = is_even(range.begin, part, first) ? range.size() / kGroup : 0;
    if (whole > 0) {
      move_groups(lanes, range.begin, static_cast<unsigned>(whole), part, sums, first);
    }
    for (std::size_t i = range.begin + whole * kGroup + static_cast<std::size_t>(lanes.lane());
         i < range.end; i += static_cast<std::size_t>(lanes.lanes())) {
      move_item(i, part, sums, first);
    }
  }

 private:
  DREAMCOMM_DEVICE const std::byte* source(int part, std::size_t element) const {
    return kPacks ? places_.own(part, element) : places_.flat(element);
  }
  DREAMCOMM_DEVICE std::byte* target(int part, std::size_t element) const {
    return kPacks ? places_.flat(element) : places_.own(part, element);
  }
  DREAMCOMM_DEVICE std::byte* carried(std::size_t element) const {
    return reinterpret_cast<std::byte*>(residual_ + element);
  }

  /// True if lanes may take groups from this element on.
  DREAMCOMM_DEVICE bool is_even(std::size_t begin, int part, std::size_t first) const {
    return Group<In, kGroup>::fits(source(part, begin)) &&
           Group<Out, kGroup>::fits(target(part, begin)) && (begin - first) % kGroup == 0 &&
           (residual_ == nullptr || Group<float, kGroup>::fits(carried(begin)));
  }

  template <Lanes L, typename Sums>
  DREAMCOMM_DEVICE void move_groups(const L& lanes, std::size_t begin, unsigned groups, int part,
                                    Sums* sums, std::size_t first) const {
    const std::byte* const from = source(part, begin);
    std::byte* const to = target(part, begin);
    const auto step = static_cast<unsigned>(lanes.lanes());
    for (auto at = static_cast<unsigned>(lanes.lane()); at < groups; at += kGroupsUnderWay * step) {
      Group<In, kGroup> in[kGroupsUnderWay];
      for (unsigned d = 0; d < kGroupsUnderWay; ++d) {
        const unsigned group = at + d * step;
        if (group < groups) in[d].load_from(from + group * sizeof in[d]);
      }
      for (unsigned d = 0; d < kGroupsUnderWay; ++d) {
        const unsigned group = at + d * step;
        if (group >= groups) continue;
        const std::size_t element = begin + std::size_t{group} * kGroup;
        const Group<Out, kGroup> out = result_of(in[d], element);
        out.store_to(to + group * sizeof out);
        if (sums != nullptr) keep(out, *sums, element - first);
      }
    }
  }

  DREAMCOMM_DEVICE Group<Out, kGroup> result_of(const Group<In, kGroup>& in,
                                                std::size_t element) const {
    Group<Out, kGroup> out;
    if (residual_ == nullptr) {
      for (int i = 0; i < kGroup; ++i) out.item[i] = step_(in.item[i]);
    } else {
      Group<float, kGroup> left;
      left.load_from(carried(element));
      for (int i = 0; i < kGroup; ++i) out.item[i] = step_(in.item[i], left.item[i]);
      left.store_to(carried(element));
    }
    return out;
  }

  template <typename Sums>
  DREAMCOMM_DEVICE static void keep(const Group<Out, kGroup>& out, Sums& sums, std::size_t place) {
    Group<typename To::Accumulator, kGroup> written;
    for (int i = 0; i < kGroup; ++i) written.item[i] = To::read(out.item[i]);
    written.store_to(sums.place(place));
  }

  template <typename Sums>
  DREAMCOMM_DEVICE void move_item(std::size_t element, int part, Sums* sums,
                                  std::size_t first) const {
    const In in = *reinterpret_cast<const In*>(source(part, element));
    const Out out = residual_ == nullptr ? step_(in) : step_(in, residual_[element]);
    *reinterpret_cast<Out*>(target(part, element)) = out;
    if (sums != nullptr) sums->keep(element - first, To::read(out));
  }

  const Places<kPacks, From, To> places_;
  const Step<From, To> step_;
  float* const residual_;
};

}  // namespace bucket

/// Elements that a block takes at a time: as many whole blocks of the sum of squares as fit into
/// the shared memory that a block has by default (48 KiB).
template <typename To>
inline constexpr std::size_t kTile = std::size_t{32768} / sizeof(typename To::Accumulator) /
                                     kernels::Inspector::kBlock * kernels::Inspector::kBlock;

/// Bytes that the lanes of a block share where elements are inspected.
template <typename To>
constexpr std::size_t bucket_scratch() {
  return TileSums<typename To::Accumulator, kTile<To>>::kBytes;
}

/// Packs (reads the parts) or unpacks (writes them). `scratch`: bucket_scratch() bytes of the
/// block's own, aligned to 16; not used without inspection.
template <bool kPacks, typename From, typename To, Target T>
DREAMCOMM_DEVICE void bucket_body(const T& target, const BucketTask& task, const Part* parts,
                                  std::byte* scratch) {
  using Mover = bucket::Mover<kPacks, From, To>;
  const Mover mover(task, parts);
  TileSums<typename To::Accumulator, kTile<To>> sums(scratch);
  auto* const inspected = task.partials == nullptr ? nullptr : &sums;
  for (auto tile = static_cast<std::size_t>(target.block()); tile < chunks(task.count, kTile<To>);
       tile += static_cast<std::size_t>(target.blocks())) {
    const Range all = chunk(task.count, kTile<To>, tile);
    int part = bucket::part_at(parts, 0, task.parts, all.begin);
    for (Range range{all.begin, all.begin}; range.end < all.end; ++part) {
      range.begin = range.end;
      range.end = mover.end_of(part) < all.end ? mover.end_of(part) : all.end;
      mover.move(target, range, part, inspected, all.begin);
    }
    target.count(all.size() * sizeof(typename From::Element), 1, 0);
    target.count(all.size() * sizeof(typename To::Element), 0, 1);
    if (task.residual != nullptr) target.count(all.size() * sizeof(float), 1, 1);
    if (task.partials != nullptr) {
      sums.add_up(target, all.size(), task.partials + all.begin / kernels::Inspector::kBlock);
    }
  }
}

}  // namespace dreamcomm::gpu
