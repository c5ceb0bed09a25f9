// Checks of a call's arguments before anything is sent. All throw c10::ValueError
// (Python: ValueError) that names the rank, the call and the argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <ostream>

namespace dreamcomm {

/// A call, and the rank that makes it.
struct Site {
  const char* call;
  int rank;
  int size;
};

/// "rank 1 of 4: all_reduce: "
std::ostream& operator<<(std::ostream& out, const Site& site);

/// A dense tensor whose storage holds all of its elements.
void require_dense(const Site& site, const char* argument, const at::Tensor& tensor);
/// Dense, and no two of its elements share memory.
void require_writable(const Site& site, const char* argument, const at::Tensor& tensor);
/// A list of `length` tensors or other things.
void require_length(const Site& site, const char* argument, std::size_t got, std::size_t length);
/// `tensor` lies on `like`'s device.
void require_same_device(const Site& site, const char* argument, const at::Tensor& tensor,
                         const at::Tensor& like);
/// `tensor` holds `numel` elements of `like`'s type, on its device.
void require_match(const Site& site, const char* argument, const at::Tensor& tensor,
                   const at::Tensor& like, std::int64_t numel);
void require_same_type(const Site& site, const char* argument, const at::Tensor& tensor,
                       const at::Tensor& like);
/// A rank of the group; returns it.
int require_rank(const Site& site, const char* argument, std::int64_t rank);
/// Another rank of the group; returns it.
int require_peer(const Site& site, const char* argument, int peer);
/// A message's tag; returns it.
std::uint64_t require_tag(const Site& site, int tag);

/// The bytes of each rank's part of `tensor`, whose first dimension is cut into
/// `splits` rows per rank; no splits: into equal parts.
std::vector<std::size_t> split_bytes(const Site& site, const char* argument,
                                     const at::Tensor& tensor, c10::ArrayRef<std::int64_t> splits);

/// True if two tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// True if two of the tensors share memory.
bool any_overlap(c10::ArrayRef<at::Tensor> tensors);

}  // namespace dreamcomm
