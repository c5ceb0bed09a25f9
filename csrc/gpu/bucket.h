// Many tensors into one flat buffer and back on a GPU: the twin of kernels/bucket.h, with
// the same arithmetic and the same bits.
//
// The buffer is cut into tiles, dealt out to the blocks; lanes take groups of a tile's
// elements and find the tensor that each lies in. So the work is even whatever the
// tensors' sizes are, and one kernel serves any number of them.
#pragma once

#include <bit>
#include <type_traits>

#include "core/half.h"
#include "core/schedule.h"
#include "gpu/bucket_sums.h"
#include "gpu/formats.h"
#include "gpu/pack.h"

namespace dreamcomm::gpu {

/// A tensor, and the first of the buffer's elements that are its own.
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

namespace bucket {

/// The last of parts [low, high) that begins at or before an element.
DREAMCOMM_DEVICE int part_at(const Part* parts, int low, int high, std::size_t element) {
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (parts[middle].begin <= element ? low : high) = middle;
  }
  return low;
}

/// Elements one after another, in whole packs where their address allows it.
template <typename E, int kCount>
struct Group {
  static constexpr int kPerPack = Pack<E>::kItems;
  static_assert(kCount % kPerPack == 0);
  E item[kCount];

  DREAMCOMM_DEVICE void load_from(const std::byte* data) {
    if (is_packed(data)) return load_as<true>(data);
    load_as<false>(data);
  }
  DREAMCOMM_DEVICE void store_to(std::byte* data) const {
    if (is_packed(data)) return store_as<true>(data);
    store_as<false>(data);
  }

 private:
  template <bool kAligned>
  DREAMCOMM_DEVICE void load_as(const std::byte* data) {
    for (int p = 0; p < kCount / kPerPack; ++p) {
      const auto pack = load<kAligned, E>(data, static_cast<std::size_t>(p));
      for (int i = 0; i < kPerPack; ++i) item[p * kPerPack + i] = pack.item[i];
    }
  }
  template <bool kAligned>
  DREAMCOMM_DEVICE void store_as(std::byte* data) const {
    for (int p = 0; p < kCount / kPerPack; ++p) {
      Pack<E> pack;
      for (int i = 0; i < kPerPack; ++i) pack.item[i] = item[p * kPerPack + i];
      store<kAligned>(data, static_cast<std::size_t>(p), pack);
    }
  }
};

/// What one element goes through, between the formats From and To.
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
  // To divide by 1 changes nothing, and takes longer.
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

/// Tells where an element is read and where its result is written.
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
  /// As many as make a pack of the smaller type.
  static constexpr int kGroup =
      static_cast<int>(kPackBytes / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out)));

  DREAMCOMM_DEVICE Mover(const BucketTask& task, const Part* parts)
      : places_{task, parts}, step_(task), residual_(task.residual) {}

  /// The elements of `range`, at most kGroup, of which the first lies in `part`; `wrote`
  /// is told each with its number and what was written.
  template <typename Wrote>
  DREAMCOMM_DEVICE void move(const Range& range, int part, const Wrote& wrote) const {
    if (range.size() == kGroup && range.end <= places_.end_of(part)) {
      return move_whole(range.begin, part, wrote);
    }
    for (std::size_t i = range.begin; i < range.end; ++i) {
      while (i >= places_.end_of(part)) ++part;
      const In in = *reinterpret_cast<const In*>(source(part, i));
      Out out;
      if (residual_ == nullptr) {
        out = step_(in);
      } else {
        out = step_(in, residual_[i]);
      }
      *reinterpret_cast<Out*>(target(part, i)) = out;
      wrote(i, out);
    }
  }

 private:
  DREAMCOMM_DEVICE const std::byte* source(int part, std::size_t element) const {
    return kPacks ? places_.own(part, element) : places_.flat(element);
  }
  DREAMCOMM_DEVICE std::byte* target(int part, std::size_t element) const {
    return kPacks ? places_.flat(element) : places_.own(part, element);
  }

  template <typename Wrote>
  DREAMCOMM_DEVICE void move_whole(std::size_t first, int part, const Wrote& wrote) const {
    Group<In, kGroup> in;
    Group<Out, kGroup> out;
    in.load_from(source(part, first));
    if (residual_ == nullptr) {
      for (int i = 0; i < kGroup; ++i) out.item[i] = step_(in.item[i]);
    } else {
      move_with_residual(first, in, out);
    }
    out.store_to(target(part, first));
    for (int i = 0; i < kGroup; ++i) wrote(first + static_cast<std::size_t>(i), out.item[i]);
  }

  DREAMCOMM_DEVICE void move_with_residual(std::size_t first, const Group<In, kGroup>& in,
                                           Group<Out, kGroup>& out) const {
    if constexpr (kGroup < 4) {  // float64 on both sides
      for (int i = 0; i < kGroup; ++i) {
        out.item[i] = step_(in.item[i], residual_[first + static_cast<std::size_t>(i)]);
      }
    } else {
      auto* place = reinterpret_cast<std::byte*>(residual_ + first);
      Group<float, kGroup> carried;
      carried.load_from(place);
      for (int i = 0; i < kGroup; ++i) out.item[i] = step_(in.item[i], carried.item[i]);
      carried.store_to(place);
    }
  }

  const Places<kPacks, From, To> places_;
  const Step<From, To> step_;
  float* const residual_;
};

}  // namespace bucket

/// Elements that a block takes at a time: whole blocks of the sum of squares.
inline constexpr std::size_t kTile = 4 * kernels::Inspector::kBlock;

/// Bytes that the lanes of a block share where elements are inspected.
template <typename To>
constexpr std::size_t bucket_scratch() {
  return TileSums<typename To::Accumulator, kTile>::kBytes;
}

/// Packs (the parts are read) or unpacks (they are written). `scratch`: bucket_scratch()
/// bytes of the block's own, aligned to 16; not looked at without inspection.
template <bool kPacks, typename From, typename To, Target T>
DREAMCOMM_DEVICE void bucket_body(const T& target, const BucketTask& task, const Part* parts,
                                  std::byte* scratch) {
  const bucket::Mover<kPacks, From, To> mover(task, parts);
  TileSums<typename To::Accumulator, kTile> sums(scratch);
  const auto lane = static_cast<std::size_t>(target.lane());
  const auto lanes = static_cast<std::size_t>(target.lanes());
  constexpr std::size_t kGroup = bucket::Mover<kPacks, From, To>::kGroup;
  for (auto tile = static_cast<std::size_t>(target.block()); tile < chunks(task.count, kTile);
       tile += static_cast<std::size_t>(target.blocks())) {
    const Range all = chunk(task.count, kTile, tile);
    const int first = bucket::part_at(parts, 0, task.parts, all.begin);
    const int last = bucket::part_at(parts, first, task.parts, all.end - 1);
    for (std::size_t at = all.begin + lane * kGroup; at < all.end; at += lanes * kGroup) {
      const Range group{at, at + kGroup < all.end ? at + kGroup : all.end};
      mover.move(group, bucket::part_at(parts, first, last + 1, at),
                 [&](std::size_t i, typename To::Element written) {
                   if (task.partials != nullptr) sums.keep(i - all.begin, To::read(written));
                 });
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
