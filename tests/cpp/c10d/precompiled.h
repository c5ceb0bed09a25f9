// Headers that the tests of c10d include, read once for all. Torch's come before doctest, because
// both define CHECK: the tests use doctest's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Logging.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cpp/precompiled.h"
