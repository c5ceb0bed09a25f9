#include "algorithms/signature.h"

#include "algorithms/table.h"
#include "core/counts.h"
#include "core/error.h"
#include "core/sharded_pass.h"

namespace dreamcomm {

std::size_t block_bytes(const Request& request) {
  if (request.pass != nullptr) return pass_bytes(*request.pass);
  switch (request.kind) {
    case Kind::kBarrier:
    case Kind::kAllToAll:
      return 0;
    case Kind::kBroadcast:
    case Kind::kScatter:
    case Kind::kReduceScatter:
      return request.out[0].bytes;
    default:
      return request.in[0].bytes;
  }
}

Signature signature_of(const Request& request, std::uint64_t sequence, std::uint8_t row) {
  Signature signature;
  signature.sequence = sequence;
  signature.bytes = block_bytes(request);
  signature.root = request.root;
  signature.rest = request.rest;
  if (request.pass != nullptr) {
    signature.root = static_cast<std::int32_t>(digest(*request.pass));
    signature.rest = static_cast<std::uint32_t>(request.pass->parts().size());
  }
  signature.kind = request.kind;
  signature.op = request.reduction.op;
  signature.dtype = request.reduction.dtype;
  signature.row = row;
  const GradientCounts* const counts = request.reduction.counts;
  signature.counted = counts != nullptr && !counts->is_known();
  signature.along_tree = request.reduction.along_tree;
  signature.refused = request.refusal != nullptr;
  signature.digest = request.digest & Signature::kDigest;
  return signature;
}

namespace {

std::string how_averaged(const Signature& s) {
  return concat(s.counted ? "by counts, " : "", s.along_tree ? "along a tree, " : "");
}

}  // namespace

std::string words(const Signature& s) {
  // An all_gather with an operation exists only for sparse tensors: the ranks exchange their sizes
  // before these are reduced.
  if (s.kind == Kind::kAllGather && s.op != ReduceOp::kNone) {
    return concat("all_reduce(", name(s.op), ", a sparse tensor) as call ", s.sequence);
  }
  const std::size_t row = s.row & ~Signature::kAsks;
  if (row == Signature::kSharded) {
    const std::string_view what = s.kind == Kind::kAllReduce       ? "sharded step"
                                  : s.kind == Kind::kReduceScatter ? "sharded reduction"
                                                                   : "sharded write";
    return concat(name(s.kind), '(', what, ", ", s.rest,
                  s.rest == 1 ? " parameter, " : " parameters, ", how_averaged(s), s.bytes,
                  " bytes, digest ", static_cast<std::uint32_t>(s.root), ") as call ", s.sequence);
  }
  std::string what;
  if (s.op != ReduceOp::kNone) what += concat(name(s.op), ", ");
  what += how_averaged(s);
  if (s.kind == Kind::kAllToAll) what += concat(name(s.dtype), ", ");
  if (s.kind != Kind::kAllToAll && s.kind != Kind::kBarrier) {
    what += concat(s.bytes / item_size(s.dtype), " x ", name(s.dtype), ", ");
  }
  if (s.kind == Kind::kBroadcast || s.kind == Kind::kReduce || s.kind == Kind::kGather ||
      s.kind == Kind::kScatter) {
    what += concat("root ", s.root, ", ");
  }
  if (s.digest != 0) what += concat("layout ", s.digest, ", ");
  const std::string more = s.rest == 0 ? "" : concat(", with ", s.rest, " more to come in it");
  if (row < algorithm_table().size()) {
    what += concat("algorithm ", algorithm_table()[row].name);
  } else if (what.size() > 1) {
    what.resize(what.size() - 2);
  }
  return concat(name(s.kind), '(', what, ") as call ", s.sequence, more);
}

std::string deed(const Signature& s) {
  return s.refused ? concat(" refused its call ", s.sequence) : concat(" called ", words(s));
}

}  // namespace dreamcomm
