#include "core/request.h"

#include "core/error.h"
#include "core/sharded_pass.h"

namespace dreamcomm {
namespace {

std::size_t total_bytes(std::span<const Block> blocks) {
  std::size_t total = 0;
  for (const Block& block : blocks) total += block.bytes;
  return total;
}

/// Bytes of one block. All blocks of in and out are equal, except in all_to_all. A rank that takes
/// part in a call has at least one block of either.
std::size_t block_bytes(const Request& request) {
  if (!request.in.empty()) return request.in.front().bytes;
  return request.out.empty() ? 0 : request.out.front().bytes;
}

/// "1024 x float32"; bytes that are no whole number of elements stay bytes.
std::string elements(std::size_t bytes, DType dtype) {
  if (dtype == DType::kOpaque) return concat(bytes, " bytes");
  const std::size_t item = item_size(dtype);
  if (bytes % item != 0) return concat(bytes, " bytes of ", name(dtype));
  return concat(bytes / item, " x ", name(dtype));
}

/// "in 12, out 20 bytes of float32"
std::string in_and_out(const Request& request) {
  const DType dtype = request.reduction.dtype;
  const std::string unit = dtype == DType::kOpaque ? "" : concat(" of ", name(dtype));
  return concat("in ", total_bytes(request.in), ", out ", total_bytes(request.out), " bytes", unit);
}

std::string arguments(const Request& request) {
  if (request.pass != nullptr) {
    const std::size_t parts = request.pass->parts().size();
    return concat(name(*request.pass), ", ", parts, parts == 1 ? " parameter, " : " parameters, ",
                  pass_bytes(*request.pass), " bytes");
  }
  const std::string data = elements(block_bytes(request), request.reduction.dtype);
  const std::string_view op = name(request.reduction.op);
  switch (request.kind) {
    case Kind::kBarrier:
      return "";
    case Kind::kBroadcast:
    case Kind::kGather:
    case Kind::kScatter:
      return concat(data, ", root ", request.root);
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return concat(op, ", ", data);
    case Kind::kReduce:
      return concat(op, ", ", data, ", root ", request.root);
    case Kind::kAllGather:
    case Kind::kSend:
    case Kind::kRecv:
      return data;
    case Kind::kAllToAll:
      return in_and_out(request);
  }
  return "";
}

}  // namespace

std::string describe(const Request& request) {
  const std::string whole = request.part_of ? concat(describe(*request.part_of), ": ") : "";
  const ReduceOp op = request.reduction.op;
  if (request.kind == Kind::kAllGather && op != ReduceOp::kNone) {  // as algorithms/signature.cc
    return concat(whole, "all_reduce(", name(op), ", a sparse tensor)");
  }
  return concat(whole, name(request.kind), "(", arguments(request), ")");
}

std::size_t payload_bytes(const Request& request) {
  if (request.pass != nullptr) return pass_bytes(*request.pass);
  switch (request.kind) {
    case Kind::kBarrier:
      return 0;
    case Kind::kAllGather:
      return total_bytes(request.out);
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return total_bytes(request.in);
    case Kind::kGather:  // only the root sees all blocks, yet all ranks must agree
    case Kind::kScatter:
    case Kind::kBroadcast:
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kSend:
    case Kind::kRecv:
      return block_bytes(request);
  }
  return 0;
}

}  // namespace dreamcomm
