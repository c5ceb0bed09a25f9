// One step of an optimizer for a row of elements: Adam, AdamW and SGD.
//
// The arithmetic is that of torch's single-tensor form on the CPU (torch.optim with foreach=False
// and fused=False): the same operations, each rounded where torch rounds. Its vectorised kernels
// fuse the multiplication and the addition of lerp, addcmul and add with alpha, on AVX2 and
// AVX-512. So do these, on every instruction set, and for every element whatever its place: a row
// gives the same bits however it is cut. Bits differ from torch's in three cases:
// - torch itself fuses nothing where the processor has no AVX2, or with
// ATEN_CPU_CAPABILITY=default.
// - torch takes square roots from MKL, which are up to one unit in the last place off, and not the
//   same on all processors: AdamRule::roots.
// - A NaN that is written is always the same quiet one.
#pragma once

#include <array>
#include <cstddef>
#include <variant>

#include "core/types.h"

namespace dreamcomm {

/// Writes the square roots of `count` elements over them.
using SquareRoots = void (*)(DType type, std::byte* data, std::size_t count);

/// The numbers of one step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), as torch
/// computes them in double before it touches a tensor.
struct AdamRule {
  double decay = 1;         // parameters are multiplied by it first: 1 - lr * weight_decay; 1: none
  double weight_decay = 0;  // not decoupled: gradient += weight_decay * parameter; 0: none
  double lerp_weight = 0;   // 1 - beta1
  double beta2 = 0;
  double square_weight = 0;  // 1 - beta2
  double bias_correction2_sqrt = 1;
  double eps = 0;
  double step_size = 0;         // lr / bias_correction1
  bool amsgrad = false;         // the third state is the maximum of the second
  bool maximize = false;        // the gradient is negated first
  SquareRoots roots = nullptr;  // null: correctly rounded, in the same pass, which is faster
};

struct SgdRule {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool maximize = false;  // the gradient is negated first
  bool first = false;     // the momentum buffer has no value yet, and becomes the gradient
};

using OptimizerRule = std::variant<AdamRule, SgdRule>;

/// Elements of one parameter and of its state: exp_avg, exp_avg_sq and max_exp_avg_sq of Adam, or
/// the momentum buffer of SGD. Null where the rule has none.
struct OptimizerMemory {
  std::byte* parameter = nullptr;
  std::array<std::byte*, 3> state{};
};

/// Steps `count` elements. All are of `type`, and no two rows overlap. Pointers need no alignment
/// beyond the element's own. Throws Error(kInvalid) if the type is neither float32 nor float64, or
/// the memory lacks a state that the rule has.
void optimizer_step(const OptimizerRule& rule, DType type, const OptimizerMemory& memory,
                    const std::byte* gradient, std::size_t count);

}  // namespace dreamcomm
