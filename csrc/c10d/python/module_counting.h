// Counts of tokens for Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

/// Adds what averages gradients over counts.
void bind_counting(pybind11::class_<BucketSet, std::shared_ptr<BucketSet>>& sets);

}  // namespace dreamcomm
