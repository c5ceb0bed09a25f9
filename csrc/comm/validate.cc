#include "comm/validate.h"

#include <cstddef>

#include "core/error.h"
#include "kernels/reduce.h"

namespace dreamcomm {
namespace {

struct Shape {
  std::size_t in;
  std::size_t out;
};

/// How many input and output blocks a rank passes (the table in core/request.h).
Shape expected(const Request& request, int rank, int size) {
  const auto n = static_cast<std::size_t>(size);
  const bool root = rank == request.root;
  switch (request.kind) {
    case Kind::kBroadcast:
      return {root ? 1U : 0U, 1};
    case Kind::kReduce:
      return {1, root ? 1U : 0U};
    case Kind::kAllGather:
      return {1, n};
    case Kind::kGather:
      return {1, root ? n : 0U};
    case Kind::kScatter:
      return {root ? n : 0U, 1};
    case Kind::kReduceScatter:
      return {n, 1};
    case Kind::kAllToAll:
      return {n, n};
    case Kind::kAllReduce:
      return {1, 1};
    default:
      return {0, 0};
  }
}

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

}  // namespace

void validate(const Request& request, int rank, int size) {
  const auto fail_unless = [&](bool condition, const auto&... words) {
    check(condition, ErrorKind::kInvalid, name(request.kind), " on rank ", rank, ": ", words...);
  };
  fail_unless(request.kind != Kind::kSend && request.kind != Kind::kRecv,
              "a message is not a collective");
  fail_unless(request.root >= 0 && request.root < size, "root is ", request.root,
              ", but must be a rank from 0 to ", size - 1);
  if (request.pass != nullptr) return;  // the walk finds all ranks' tensors itself
  const Shape shape = expected(request, rank, size);
  fail_unless(request.in.size() == shape.in && request.out.size() == shape.out, "got ",
              request.in.size(), " input and ", request.out.size(), " output blocks, expected ",
              shape.in, " and ", shape.out);
  const std::size_t item = item_size(request.reduction.dtype);
  const Block* first = nullptr;
  for (const auto& blocks : {request.in, request.out}) {
    for (const Block& block : blocks) {
      fail_unless(block.bytes % item == 0, "a block of ", block.bytes,
                  " bytes does not hold whole elements of ", name(request.reduction.dtype));
      fail_unless(block.bytes == 0 || block.data != nullptr, "a block has no memory");
      if (first == nullptr) first = &block;
      fail_unless(request.kind == Kind::kAllToAll || block.bytes == first->bytes,
                  "all blocks must be of one size, got ", first->bytes, " and ", block.bytes,
                  " bytes");
    }
  }
  if (!reduces(request.kind)) return;
  try {
    check_defined(request.reduction);
  } catch (const Error& error) {
    fail_unless(false, error.what());
  }
}

}  // namespace dreamcomm
