#include "c10d/python/module_counting.h"

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace dreamcomm {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

Counting& counting_of(BucketSet& set) {
  TORCH_CHECK_VALUE(set.counting, set.who, ": gradients are not averaged over counts");
  return *set.counting;
}

/// `weight`: in place of the whole number, unless it is negative.
Count count_of(std::int64_t whole, double weight) {
  return weight < 0 ? Count{.whole = whole} : Count{0, weight, false};
}

void count(BucketSet& set, std::int64_t whole, double weight) {
  const BucketSet::Lock lock(set.mutex);
  counting_of(set).add(count_of(whole, weight));
}

void replace_count(BucketSet& set, std::int64_t whole, double weight) {
  const BucketSet::Lock lock(set.mutex);
  counting_of(set).replace(count_of(whole, weight));
}

void note_kept(BucketSet& set) {
  const BucketSet::Lock lock(set.mutex);
  counting_of(set).note_kept();
}

void set_finishes(BucketSet& set, bool finishes) {
  const BucketSet::Lock lock(set.mutex);
  set.finishes = finishes;
}

/// Outside of a reduction.
void exchange_counts(BucketSet& set) {
  const BucketSet::Lock lock(set.mutex);
  set.begin_counts();
  set.await_counts();
}

}  // namespace

void bind_counting(py::class_<BucketSet, std::shared_ptr<BucketSet>>& sets) {
  sets.def("set_counted", &BucketSet::set_counted, py::arg("over") = py::none(), Released())
      .def("set_finishes", &set_finishes, py::arg("finishes"), Released())
      .def("exchange_counts", &exchange_counts, Released())
      .def("divisor", &BucketSet::divisor, Released())
      .def("count", &count, py::arg("whole"), py::arg("weight") = -1.0, Released())
      .def("replace_count", &replace_count, py::arg("whole"), py::arg("weight") = -1.0, Released())
      .def("note_kept", &note_kept, Released())
      .def("adopt_counting", &BucketSet::adopt_counting, py::arg("other"), Released());
}

}  // namespace dreamcomm
