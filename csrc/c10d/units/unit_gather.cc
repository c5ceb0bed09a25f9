#include "c10d/units/unit_gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "c10d/units/lend.h"

namespace dreamcomm {
namespace {

/// The beginning of a rank's small rows.
struct UnitHeader {
  std::int64_t number;
  std::int64_t note;
};
constexpr std::int64_t kHeaderBytes = sizeof(UnitHeader);

at::Tensor new_bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

std::byte* data_of(const at::Tensor& bytes) {
  return static_cast<std::byte*>(bytes.mutable_data_ptr());
}

/// Rows as many bytes as rank 0 has: the last ranks may have fewer.
at::Tensor padded(const at::Tensor& rows, std::int64_t bytes) {
  const auto own = static_cast<std::int64_t>(rows.nbytes());
  if (own == bytes) return bytes_of(rows, bytes);
  at::Tensor made = new_bytes(bytes).zero_();
  if (own > 0) std::memcpy(data_of(made), rows.const_data_ptr(), rows.nbytes());
  return made;
}

/// An owner's bytes of a whole parameter.
std::int64_t bytes_of_owner(const GatheredPlace& place, std::int64_t owner) {
  return std::clamp<std::int64_t>(place.bytes - owner * place.each, 0, place.each);
}

}  // namespace

UnitGather::UnitGather(GroupPtr group, std::int64_t number, std::vector<GatheredPlace> places,
                       std::vector<std::int64_t> owners)
    : group_(std::move(group)),
      number_(number),
      places_(std::move(places)),
      owners_(std::move(owners)) {
  TORCH_CHECK_VALUE(owners_.size() == static_cast<std::size_t>(group_->getSize()),
                    "UnitGather: expected an owner for each of ", group_->getSize(), " ranks, got ",
                    owners_.size());
  std::int64_t packed = kHeaderBytes;
  for (const GatheredPlace& place : places_) {
    if (!place.direct) packed += place.each;
  }
  packed_ = new_bytes(packed);
  received_packed_ = new_bytes(packed * group_->getSize());
}

WorkPtr UnitGather::gather(TensorList to, const at::Tensor& from) {
  received_ +=
      static_cast<std::uint64_t>(from.numel()) * static_cast<std::uint64_t>(group_->getSize() - 1);
  return all_gather_into(group_, std::move(to), from);
}

/// Where each rank's rows of a parameter belong.
TensorList UnitGather::places_in(const at::Tensor& block, const GatheredPlace& place) const {
  TensorList found;
  for (const std::int64_t owner : owners_)
    found.push_back(block.narrow(0, place.offset + owner * place.each, place.each));
  return found;
}

void UnitGather::start(const at::Tensor& block, const std::vector<at::Tensor>& rows,
                       std::int64_t note) {
  TORCH_CHECK_VALUE(rows.size() == places_.size(), "UnitGather: expected the rows of ",
                    places_.size(), " parameters, got ", rows.size());
  TORCH_CHECK(!is_under_way(), "UnitGather: it is under way already");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t mine =
        bytes_of_owner(places_[i], owners_[static_cast<std::size_t>(group_->getRank())]);
    TORCH_CHECK_VALUE(static_cast<std::int64_t>(rows[i].nbytes()) == mine, "UnitGather: expected ",
                      mine, " bytes of parameter ", i, ", got ", rows[i].nbytes());
  }
  block_ = block;
  pack(rows, note);
  small_ = gather(received_packed_.split(packed_.numel()), packed_);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const GatheredPlace& place = places_[i];
    if (place.direct)
      large_.push_back(gather(places_in(block, place), padded(rows[i], place.each)));
  }
}

void UnitGather::pack(const std::vector<at::Tensor>& rows, std::int64_t note) {
  std::byte* to = data_of(packed_);
  const UnitHeader header{number_, note};
  std::memcpy(to, &header, kHeaderBytes);
  to += kHeaderBytes;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (places_[i].direct) continue;
    // Rows lie in memory one after the other, whatever the order of their dimensions.
    if (rows[i].numel() > 0) std::memcpy(to, rows[i].const_data_ptr(), rows[i].nbytes());
    to += places_[i].each;
  }
}

void UnitGather::unpack() {
  const std::int64_t width = packed_.numel();
  for (std::size_t rank = 0; rank < owners_.size(); ++rank) {
    const std::byte* from =
        data_of(received_packed_) + static_cast<std::int64_t>(rank) * width + kHeaderBytes;
    for (const GatheredPlace& place : places_) {
      if (place.direct) continue;
      const auto count = static_cast<std::size_t>(bytes_of_owner(place, owners_[rank]));
      std::byte* const to = data_of(block_) + place.offset + owners_[rank] * place.each;
      if (count > 0) std::memcpy(to, from, count);
      from += place.each;
    }
  }
}

std::vector<std::int64_t> UnitGather::wait() {
  TORCH_CHECK(is_under_way(), "UnitGather: nothing is under way");
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(group_->getSize()));
  try {
    small_->wait();
    notes_.resize(numbers.size());
    for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
      UnitHeader header{};
      const std::int64_t begin = static_cast<std::int64_t>(rank) * packed_.numel();
      std::memcpy(&header, data_of(received_packed_) + begin, kHeaderBytes);
      numbers[rank] = header.number;
      notes_[rank] = header.note;
    }
    // Ranks that differ have called for different sizes: those calls may never end.
    const bool are_equal = std::all_of(numbers.begin(), numbers.end(),
                                       [this](std::int64_t one) { return one == number_; });
    if (are_equal) {
      for (const WorkPtr& work : large_) work->wait();
      unpack();
    }
  } catch (...) {
    end();
    throw;
  }
  end();
  return numbers;
}

void UnitGather::drop() {
  if (!is_under_way()) return;
  try {
    small_->wait();
    for (const WorkPtr& work : large_) work->wait();
  } catch (const std::exception&) {
    // The bytes are not used: the caller raises the error that has brought it here.
  }
  end();
}

void UnitGather::end() {
  small_ = nullptr;
  large_.clear();
  block_ = at::Tensor();
}

}  // namespace dreamcomm
