// The store that torch hands to a backend.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dreamcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

}  // namespace dreamcomm
