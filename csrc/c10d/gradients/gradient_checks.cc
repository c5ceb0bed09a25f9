#include "c10d/gradients/gradient_checks.h"

#include <c10/util/Exception.h>

namespace dreamcomm {

void require_average(const std::string& who, const Gradient& gradient, double factor) {
  TORCH_CHECK(factor == 0, who, ": this backward pass adds to the gradient of '", gradient.name,
              "', which is reduced already. With reduce=\"mean\" that is right; with a sum or a "
              "factor call zero_grad() before, or put all backward passes except the last under "
              "no_sync()");
}

void require_layout(const std::string& who, const Gradient& gradient) {
  const at::Tensor& made = gradient.parameter.grad();
  if (!made.defined()) return;
  TORCH_CHECK(made.scalar_type() == gradient.parameter.scalar_type(), who, ": the gradient of '",
              gradient.name, "' is ", made.scalar_type(), ", expected ",
              gradient.parameter.scalar_type(), " as the parameter: leave grad_dtype as it is");
  if (made.is_sparse() == gradient.sparse) return;
  TORCH_CHECK(!gradient.shard.sharded, who, ": the gradient of parameter '", gradient.name,
              "' is sparse, and a sharded optimizer takes dense ones: leave sparse=True out");
  const char* const why =
      gradient.sparse
          ? "a sparse one: its module has sparse=True, but the parameter is used elsewhere, too"
          : "a dense one: only those of torch.nn.Embedding and EmbeddingBag with sparse=True are "
            "expected to be sparse";
  TORCH_CHECK(false, who, ": the gradient of parameter '", gradient.name, "' is ",
              gradient.sparse ? "dense" : "sparse", ", expected ", why);
}

void require_once(const std::string& who, const Gradient& gradient) {
  TORCH_CHECK(
      gradient.made <= gradient.expected, who, ": autograd made the gradient of '", gradient.name,
      "' ", gradient.made, " times in this backward pass, and only ", gradient.expected,
      gradient.expected == 1 ? " time" : " times",
      " in the first one, after which it was sent to the other ranks. A part of the model "
      "runs under torch.utils.checkpoint with use_reentrant=True more often than then: give "
      "use_reentrant=False, which makes each gradient once");
}

void require_used(const std::string& who, const Gradient& gradient, bool used) {
  TORCH_CHECK(used, who, ": parameter '", gradient.name,
              "' got no gradient in this backward pass: give find_unused_parameters=True, with "
              "which ranks tell each other so, or its name as one of unused=");
}

void require_unstepped(const std::string& who, const Gradient& gradient,
                       const at::Tensor& arrived) {
  const bool is_taken = arrived.defined() && !gradient.parameter.grad().defined();
  if (!is_taken && gradient.parameter._version() == gradient.parameter_version) return;
  TORCH_CHECK(
      false, who, ": ", is_taken ? "a hook has taken the gradient of parameter '" : "parameter '",
      gradient.name, is_taken ? "' away" : "' was changed",
      " within a backward pass, before its gradient was reduced: each rank would be stepped "
      "with its own gradient. Step the optimizer after backward(), not in a hook");
}

void require_static(const std::string& who, const Gradient& gradient, bool now, bool at_first) {
  TORCH_CHECK(now == at_first, who, ": parameter '", gradient.name,
              now ? "' got a gradient, but none" : "' got no gradient, but one",
              " in the first backward pass that reduced: with static_graph=True all passes have to "
              "use the same parameters. Leave static_graph off");
}

}  // namespace dreamcomm
