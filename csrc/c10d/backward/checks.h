// Errors of gradients that a backward pass makes, for people: who, which parameter, what to do.
// Each throws unless all is well. `who`: "rank 1 of 2".
#pragma once

#include <string>

#include "c10d/buckets/parameter.h"

namespace dreamcomm {

/// A pass may not add to a sum that is reduced already: the first part would count several times.
void require_average(const std::string& who, const Parameter& parameter, double factor);
/// Autograd has made the gradient no more often than in the first pass.
void require_once(const std::string& who, const Parameter& parameter);
/// Without an exchange of which gradients there are, each rank has to have all.
void require_used(const std::string& who, const Parameter& parameter, bool used);
/// Nothing steps a parameter, or takes its gradient away, in a pass before it is reduced: each rank
/// would use its own gradient. `arrived`: what autograd has just made the gradient of, if any.
void require_unstepped(const std::string& who, const Parameter& parameter,
                       const at::Tensor& arrived);
/// A static graph uses the parameters of its first pass.
void require_static(const std::string& who, const Parameter& parameter, bool now, bool at_first);

}  // namespace dreamcomm
