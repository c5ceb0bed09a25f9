#include "c10d/python/module_gradients.h"

#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/base/convert.h"
#include "c10d/gradients/entry.h"
#include "c10d/gradients/gradient_reducer.h"
#include "c10d/gradients/ownership.h"
#include "c10d/gradients/rank_exchange.h"
#include "kernels/bucket.h"
#include "kernels/inspector.h"

namespace dreamcomm {
namespace {

std::shared_ptr<GradientReducer> make_reducer(
    const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
    const std::vector<bool>& sparse, const GradientReducer::Buckets& buckets, const GroupPtr& group,
    bool averages, double factor, std::size_t own_bytes, bool finds_unused,
    GradientReducer::Replan replan, GradientReducer::Mixed mixed, bool hooked) {
  Gradients gradients(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    gradients[i].parameter = parameters[i];
    gradients[i].name = names.at(i);
    gradients[i].sparse = sparse.at(i);
    // What is there already counts in the first pass: another average of an average is the same.
    gradients[i].touched = factor == 0 && parameters[i].grad().defined();
  }
  BucketRule rule{.group = group,
                  .own_bytes = own_bytes,
                  .averages = averages,
                  .factor = factor,
                  .finds_unused = finds_unused,
                  .sharded = false,
                  .deferred = false,
                  .heaps = nullptr,
                  .divisor = 0,
                  .hook = nullptr};
  auto reducer = std::make_shared<GradientReducer>(std::move(gradients), std::move(rule),
                                                   std::move(replan), std::move(mixed));
  if (hooked) reducer->attach();
  reducer->set_buckets(buckets);
  return reducer;
}

void set_hook(GradientReducer& reducer, py::object state, const py::object& hook, bool in_turn) {
  std::shared_ptr<c10d::CommHookInterface> called;
  if (!hook.is_none()) called = std::make_shared<c10d::PythonCommHook>(std::move(state), hook);
  const py::gil_scoped_release release;
  reducer.set_hook(std::move(called), in_turn);
}

void shard_gradients(GradientReducer& reducer, const std::vector<bool>& replicated,
                     const std::vector<py::object>& sum_types,
                     const std::vector<std::optional<at::Tensor>>& stand_ins, bool deferred,
                     const c10::intrusive_ptr<DreamBackend>& heaps) {
  std::vector<Shard> shards(replicated.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].replicated = replicated[i];
    shards[i].sum_type = reinterpret_cast<THPDtype*>(sum_types.at(i).ptr())->scalar_type;
    shards[i].stand_in = stand_ins.at(i).value_or(at::Tensor());
  }
  const py::gil_scoped_release release;
  reducer.shard(std::move(shards), deferred, heaps);
}

py::dict report_of(const GradientReducer& reducer) {
  PassReport report;
  {
    const py::gil_scoped_release release;
    report = reducer.report();
  }
  py::dict found;
  found["passes"] = report.passes;
  found["backward_seconds"] = report.backward_seconds;
  found["exposed_seconds"] = report.exposed_seconds;
  found["bytes"] = report.bytes;
  found["copied"] = report.copied;
  return found;
}

constexpr std::int64_t kNormBlock = 4096;  // elements; dreamcomm/buckets/norm.py has it, too

at::Tensor block_squares(const at::Tensor& flat, std::int64_t low, std::int64_t high) {
  TORCH_CHECK_VALUE(flat.is_cpu() && flat.dim() == 1 && flat.is_contiguous(),
                    "block_squares: expected a contiguous CPU tensor of one dimension");
  const std::int64_t blocks = (flat.numel() + kNormBlock - 1) / kNormBlock;
  TORCH_CHECK_VALUE(0 <= low && low <= high && high <= blocks,
                    "block_squares: expected blocks of 0 to ", blocks, ", got ", low, " to ", high);
  const DType type = to_dtype(flat.scalar_type());
  TORCH_CHECK_VALUE(is_packable(type),
                    "block_squares: expected float32, float64, bfloat16 or float16, got ",
                    flat.scalar_type());
  at::Tensor sums = at::empty({high - low}, at::TensorOptions().dtype(at::kDouble));
  auto* const sum = sums.mutable_data_ptr<double>();
  const auto* const data = static_cast<const std::byte*>(flat.const_data_ptr());
  for (std::int64_t block = low; block < high; ++block) {
    const std::int64_t begin = block * kNormBlock;
    const std::int64_t count = std::min(kNormBlock, flat.numel() - begin);
    sum[block - low] = kernels::sum_of_squares(type, data + begin * flat.element_size(),
                                               static_cast<std::size_t>(count));
  }
  return sums;
}

double add_in_order(const at::Tensor& numbers) {
  const auto* const number = numbers.const_data_ptr<double>();
  return std::accumulate(number, number + numbers.numel(), 0.0);
}

}  // namespace

void bind_gradients(pybind11::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("block_squares", &block_squares, py::arg("flat"), py::arg("low"), py::arg("high"),
        Released());
  m.def(
      "owns_memory", [](const at::Tensor& tensor) { return owns_memory(tensor); },
      py::arg("tensor"));
  m.def("add_in_order", &add_in_order, py::arg("numbers"));
  py::class_<GraphEntry>(m, "EntryNode", "Where received tensors enter an autograd graph.")
      .def_property_readonly("node",
                             [](const GraphEntry& self) {
                               return py::reinterpret_steal<py::object>(
                                   torch::autograd::functionToPyObject(self.node));
                             })
      .def("take", [](const GraphEntry& self) {
        py::list taken;
        for (const at::Tensor& gradient : self.entry->take()) {
          taken.append(gradient.defined() ? py::cast(gradient) : py::object(py::none()));
        }
        return taken;
      });
  m.def("enter", &enter, py::arg("tensors"));
  py::class_<GradientReducer, std::shared_ptr<GradientReducer>>(
      m, "GradientReducer", "Reduces a module's gradients in backward passes.", py::dynamic_attr())
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("names"), py::arg("sparse"),
           py::arg("buckets"), py::arg("group"), py::arg("averages"), py::arg("factor"),
           py::arg("own_bytes"), py::arg("finds_unused"), py::arg("replan"), py::arg("mixed"),
           py::arg("hooked"))
      .def("detach", &GradientReducer::detach, Released())
      .def("set_buckets", &GradientReducer::set_buckets, py::arg("buckets"), Released())
      .def("set_hook", &set_hook, py::arg("state"), py::arg("hook"), py::arg("in_turn"))
      .def("set_static_graph", &GradientReducer::set_static_graph, py::arg("is_static"), Released())
      .def_property("sync", py::cpp_function(&GradientReducer::sync, Released()),
                    py::cpp_function(&GradientReducer::set_sync, Released()))
      .def("set_divisor", &GradientReducer::set_divisor, py::arg("ranks"), Released())
      .def("set_group", &GradientReducer::set_group, py::arg("group"), py::arg("averages"),
           py::arg("own_bytes"), Released())
      .def("await_backward", &GradientReducer::await_backward, py::arg("outputs"), Released())
      .def("check_planned", &GradientReducer::check_planned, Released())
      .def("set_unchecked", &GradientReducer::set_unchecked, py::arg("unchecked"))
      .def("recover", &GradientReducer::recover, Released())
      .def("reduce_now", &GradientReducer::reduce_now, Released())
      .def("reduce_zeros", &GradientReducer::reduce_zeros, Released())
      .def("mixed", &GradientReducer::mixed, Released())
      .def("relearn", &GradientReducer::relearn, Released())
      .def("report", &report_of)
      .def_static("of", &GradientReducer::of, py::arg("parameter"))
      .def_property_readonly("parameters", &GradientReducer::parameters)
      .def("shard", &shard_gradients, py::arg("replicated"), py::arg("sum_types"),
           py::arg("stand_ins"), py::arg("deferred"), py::arg("heaps"))
      .def("shard_gradients", &GradientReducer::shard_gradients, Released())
      .def("shard_memory", &GradientReducer::shard_memory, py::arg("index"), Released())
      .def(
          "agree_reduced",
          [](const GradientReducer& self, std::uint64_t digest) {
            const GradientReducer::Agreed agreed = self.agree_reduced(digest);
            return std::make_pair(agreed.reduced, agreed.same);
          },
          py::arg("digest") = 0, Released())
      .def("unshard", &GradientReducer::unshard, Released())
      .def("holds_shards", &GradientReducer::holds_shards, Released())
      .def("set_optimizer_memory", &GradientReducer::set_optimizer_memory, py::arg("masters"),
           py::arg("states"))
      .def("step", &GradientReducer::step, py::arg("rules"), py::arg("rule_of"), py::arg("reads"),
           Released())
      .def("note_seen", &GradientReducer::note_seen, Released())
      .def("changed", &GradientReducer::changed, Released());
}

}  // namespace dreamcomm
