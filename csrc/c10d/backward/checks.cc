#include "c10d/backward/checks.h"

#include <c10/util/Exception.h>

namespace dreamcomm {

void require_average(const std::string& who, const Parameter& parameter, double factor) {
  TORCH_CHECK(factor == 0, who, ": this backward pass adds to the gradient of '", parameter.name,
              "', which is reduced already. With reduce=\"mean\" that is right; with a sum or a "
              "factor call zero_grad() before, or put all backward passes except the last under "
              "no_sync()");
}

void require_once(const std::string& who, const Parameter& parameter) {
  TORCH_CHECK(
      parameter.made <= parameter.expected, who, ": autograd made the gradient of '",
      parameter.name, "' ", parameter.made, " times in this backward pass, and only ",
      parameter.expected, parameter.expected == 1 ? " time" : " times",
      " in the first one, after which it was sent to the other ranks. A part of the model "
      "runs under torch.utils.checkpoint with use_reentrant=True more often than then: give "
      "use_reentrant=False, which makes each gradient once");
}

void require_used(const std::string& who, const Parameter& parameter, bool used) {
  TORCH_CHECK(used, who, ": parameter '", parameter.name,
              "' got no gradient in this backward pass: give find_unused_parameters=True, with "
              "which ranks tell each other so, or its name as one of unused=");
}

void require_unstepped(const std::string& who, const Parameter& parameter,
                       const at::Tensor& arrived) {
  const bool is_taken = arrived.defined() && !parameter.tensor.grad().defined();
  if (!is_taken && parameter.tensor._version() == parameter.version) return;
  TORCH_CHECK(
      false, who, ": ", is_taken ? "a hook has taken the gradient of parameter '" : "parameter '",
      parameter.name, is_taken ? "' away" : "' was changed",
      " within a backward pass, before its gradient was reduced: each rank would be stepped "
      "with its own gradient. Step the optimizer after backward(), not in a hook");
}

void require_static(const std::string& who, const Parameter& parameter, bool now, bool at_first) {
  TORCH_CHECK(now == at_first, who, ": parameter '", parameter.name,
              now ? "' got a gradient, but none" : "' got no gradient, but one",
              " in the first backward pass that reduced: with static_graph=True all passes have to "
              "use the same parameters. Leave static_graph off");
}

}  // namespace dreamcomm
