#include "kernels/optimizer/optimizer.h"

#include "core/error.h"
#include "kernels/optimizer/steps.h"

namespace dreamcomm {
namespace {

std::size_t states_of(const AdamRule& rule) { return rule.amsgrad ? 3 : 2; }
std::size_t states_of(const SgdRule& rule) { return rule.momentum != 0 ? 1 : 0; }

void step(const AdamRule& rule, DType type, const kernels::StepRows& rows) {
  kernels::adam_step(kernels::fused_vectors(), rule, type, rows);
}

void step(const SgdRule& rule, DType type, const kernels::StepRows& rows) {
  kernels::sgd_step(kernels::fused_vectors(), rule, type, rows);
}

}  // namespace

void optimizer_step(const OptimizerRule& rule, DType type, const OptimizerMemory& memory,
                    const std::byte* gradient, std::size_t count) {
  check(type == DType::kFloat32 || type == DType::kFloat64, ErrorKind::kInvalid,
        "expected an optimizer's parameters in float32 or float64, got ", name(type));
  if (count == 0) return;
  std::visit(
      [&](const auto& one) {
        const std::size_t states = states_of(one);
        for (std::size_t s = 0; s < states; ++s) {
          check(memory.state[s] != nullptr, ErrorKind::kInvalid, "expected ", states,
                " states of an optimizer, got none at index ", s);
        }
        step(one, type, {memory, gradient, count});
      },
      rule);
}

}  // namespace dreamcomm
