// Collectives on memory of other libraries' arrays.
#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/op_labels.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {
namespace {

const OpLabel& label_of(Kind kind) {
  switch (kind) {
    case Kind::kBroadcast:
      return kBroadcast;
    case Kind::kAllReduce:
      return kAllReduce;
    case Kind::kReduce:
      return kReduce;
    case Kind::kAllGather:
      return kAllGatherBase;
    case Kind::kGather:
      return kGather;
    case Kind::kScatter:
      return kScatter;
    case Kind::kReduceScatter:
      return kReduceScatterBase;
    case Kind::kAllToAll:
      return kAllToAllBase;
    default:
      return kBarrier;
  }
}

bool is_same(const at::Tensor& one, const at::Tensor& other) {
  return one.const_data_ptr() == other.const_data_ptr() && one.sizes() == other.sizes() &&
         one.strides() == other.strides();
}

/// True if `input` may be read while `output` is written: it is the own block there, or elsewhere.
bool is_apart(const at::Tensor& input, const at::Tensor& output, Kind kind, int rank) {
  if (!overlap(input, output)) return true;
  const auto offset = input.nbytes() * static_cast<std::size_t>(rank);
  return (kind == Kind::kAllGather || kind == Kind::kGather) && is_plain(input) &&
         is_plain(output) &&
         input.const_data_ptr() == static_cast<const std::byte*>(output.const_data_ptr()) + offset;
}

void require_sizes(const Site& site, const char* argument, const at::Tensor& tensor,
                   const std::vector<std::size_t>& sizes) {
  if (sizes.empty()) return;
  std::size_t sum = 0;
  for (const std::size_t size : sizes) sum += size;
  TORCH_CHECK_VALUE(sum == tensor.nbytes(), site, "'", argument, "' has ", tensor.nbytes(),
                    " bytes, its parts have ", sum);
}

/// As Call::leave_to_peers().
void leave_to_peers(const Request& request) {
  const std::shared_ptr<Heap> heap = live_process_heap();
  if (!heap) return;
  for (const auto& blocks : {request.in, request.out}) {
    for (const Block& block : blocks) heap->retire(block.data);
  }
}

}  // namespace

void DreamBackend::run_blocks(Request request) {
  require_open();
  require_turn(label_of(request.kind));
  sequence_.add(1);
  request.deadline = deadline_after(c10d::kUnsetTimeout, timeout());
  try {
    cpu_->run(request, interrupt_);
  } catch (...) {
    if (cpu_->failure_kind()) leave_to_peers(request);
    std::rethrow_exception(current_as_torch());
  }
}

WorkPtr DreamBackend::run_arrays(const ArrayCall& asked) {
  const OpLabel& label = label_of(asked.kind);
  const Site site = at(label);
  const std::optional<Tensor>& in = asked.input;
  const std::optional<Tensor>& out = asked.output;
  if (in) require_dense(site, "array", *in);
  if (out) require_writable(site, "out", *out);
  if (in && out) require_same_type(site, "out", *out, *in);
  if (in) require_sizes(site, "array", *in, asked.in_sizes);
  if (out) require_sizes(site, "out", *out, asked.out_sizes);
  TORCH_CHECK_VALUE(in || out, site, "expected an array");
  const Tensor& some = in ? *in : *out;
  const Reduction how = asked.op ? to_reduction(*asked.op, some.scalar_type(), site) : moving(some);
  Calls calls;
  Call& call = calls.emplace_back(asked.kind, how, require_rank(site, "root", asked.root));
  call.laid_out(asked.digest);
  if (in && out && asked.in_sizes.empty() && asked.out_sizes.empty() && is_same(*in, *out)) {
    call.in_place(*out);
  } else {
    const bool aside = in && out && !is_apart(*in, *out, asked.kind, rank_);
    for (int copy = 0; in && copy < asked.copies; ++copy) {
      if (asked.in_sizes.empty()) {
        call.input(*in, aside);
      } else {
        call.input(*in, asked.in_sizes, aside);
      }
    }
    if (out && asked.out_sizes.empty()) call.output(*out);
    if (out && !asked.out_sizes.empty()) call.output(*out, asked.out_sizes);
  }
  const Tensors inputs = in ? Tensors(*in) : Tensors();
  const Tensors outputs = out ? Tensors(*out) : Tensors();
  return issue({label, inputs, outputs, c10d::kUnsetTimeout, asked.async}, calls);
}

WorkPtr DreamBackend::run_together(const TensorList& tensors,
                                   const std::optional<c10d::ReduceOp>& op, int root,
                                   std::uint32_t digest, bool async) {
  const OpLabel& label = op ? kAllReduceCoalesced : kBroadcast;
  const Site site = at(label);
  const Kind kind = op ? Kind::kAllReduce : Kind::kBroadcast;
  TORCH_CHECK_VALUE(!tensors.empty(), site, "expected an array");
  require_rank(site, "src", root);
  Calls calls;
  for (const Tensor& tensor : tensors) {
    require_writable(site, "array", tensor);
    const Reduction how = op ? to_reduction(*op, tensor.scalar_type(), site) : moving(tensor);
    Call& call = calls.emplace_back(kind, how, root);
    call.laid_out(digest);
    if (op || rank_ == root) {
      call.in_place(tensor);
    } else {
      call.output(tensor);
    }
  }
  return issue({label, tensors, tensors, c10d::kUnsetTimeout, async}, calls);
}

void DreamBackend::refuse(const std::string& why) {
  if (!cpu_) return;
  require_open();
  sequence_.add(1);
  Calls calls;
  calls.emplace_back(Kind::kBarrier, Reduction{}).refuse(why);
  run_later({kBarrier, {}, {}, c10d::kUnsetTimeout, true}, calls);
}

}  // namespace dreamcomm
