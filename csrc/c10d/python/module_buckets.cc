#include "c10d/python/module_buckets.h"

#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/autograd/entry.h"
#include "c10d/backward/hooks.h"
#include "c10d/base/convert.h"
#include "c10d/buckets/moves/gather.h"
#include "c10d/buckets/moves/optimizer_pass.h"
#include "c10d/buckets/ownership.h"
#include "c10d/buckets/sharded_gradients.h"
#include "c10d/python/module_counting.h"
#include "c10d/region/many.h"
#include "kernels/bucket.h"
#include "kernels/inspector.h"

namespace dreamcomm {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;
using Members = std::vector<std::vector<std::size_t>>;

std::shared_ptr<BucketSet> make_set(const std::vector<at::Tensor>& parameters,
                                    const std::vector<std::string>& names,
                                    const std::vector<bool>& sparse, const Members& buckets,
                                    const GroupPtr& group, bool averages, double factor,
                                    std::size_t own_bytes, bool finds_unused) {
  Parameters all(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    all[i].tensor = parameters[i];
    all[i].name = names.at(i);
    all[i].layout = sparse.at(i) ? at::kSparse : at::kStrided;
    // A gradient from before counts in the first pass: another average of an average is the same.
    all[i].touched = factor == 0 && parameters[i].grad().defined();
  }
  Rule rule;
  rule.group = group;
  rule.unused = finds_unused ? Unused::kExchanged : Unused::kRefused;
  rule.own_bytes = own_bytes;
  rule.averages = averages;
  rule.factor = factor;
  auto set = std::make_shared<BucketSet>(std::move(all), std::move(rule));
  set->set_buckets(buckets);
  return set;
}

void set_hook(BucketSet& set, py::object state, const py::object& hook, bool in_turn) {
  std::shared_ptr<c10d::CommHookInterface> called;
  if (!hook.is_none()) called = std::make_shared<c10d::PythonCommHook>(std::move(state), hook);
  const py::gil_scoped_release release;
  set.set_hook(std::move(called), in_turn);
}

void set_divisor(BucketSet& set, std::int64_t ranks) {
  const BucketSet::Lock lock(set.mutex);
  set.rule.divisor = ranks;
}

void set_static_graph(BucketSet& set) {
  const BucketSet::Lock lock(set.mutex);
  set.rule.unused = Unused::kStatic;
}

std::vector<at::Tensor> parameters_of(const BucketSet& set) {
  const BucketSet::Lock lock(set.mutex);
  std::vector<at::Tensor> found;
  for (const Parameter& one : set.parameters) found.push_back(one.tensor);
  return found;
}

std::shared_ptr<ShardedGradients> shard_gradients(
    std::shared_ptr<BucketSet> set, std::size_t stage, const std::vector<py::object>& sum_types,
    const std::vector<std::optional<at::Tensor>>& stand_ins,
    const c10::intrusive_ptr<DreamBackend>& heaps) {
  std::vector<at::ScalarType> types;
  for (const py::object& type : sum_types)
    types.push_back(reinterpret_cast<THPDtype*>(type.ptr())->scalar_type);
  const py::gil_scoped_release release;
  return std::make_shared<ShardedGradients>(std::move(set), kStages.at(stage), types, stand_ins,
                                            heaps);
}

std::vector<bool> step(OptimizerPass& pass, const std::vector<OptimizerRule>& rules,
                       const std::vector<int>& rule_of, bool reduces) {
  return pass.step(rules, rule_of, reduces ? Move::kSumRows : Move::kNothing);
}

py::dict report_of(const BackwardPass& pass) {
  PassReport report;
  {
    const py::gil_scoped_release release;
    report = pass.report();
  }
  py::dict found;
  found["passes"] = report.passes;
  found["backward_seconds"] = report.backward_seconds;
  found["exposed_seconds"] = report.exposed_seconds;
  found["bytes"] = report.bytes;
  found["copied"] = report.copied;
  return found;
}

std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t rows, int world, int rank) {
  const RankRange range = rows_of_rank(rows, world, rank);
  return {range.begin, range.begin + range.count};
}

std::vector<bool> any_of(const GroupPtr& group, const std::vector<bool>& flags) {
  return set_on_any(group, c10::kCPU, flags);
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

void bind_sets(py::module_& m) {
  py::class_<BucketSet, std::shared_ptr<BucketSet>> sets(
      m, "BucketSet", "Parameters whose gradients are reduced together, and their buckets.");
  sets.def(py::init(&make_set), py::arg("parameters"), py::arg("names"), py::arg("sparse"),
           py::arg("buckets"), py::arg("group"), py::arg("averages"), py::arg("factor"),
           py::arg("own_bytes"), py::arg("finds_unused"))
      .def_property_readonly("parameters", py::cpp_function(&parameters_of, Released()))
      .def("set_hook", &set_hook, py::arg("state"), py::arg("hook"), py::arg("in_turn"))
      .def("set_group", &BucketSet::set_group, py::arg("group"), py::arg("averages"),
           py::arg("own_bytes"), Released())
      .def("set_factors", &BucketSet::set_factors, py::arg("factors"), Released())
      .def("set_divisor", &set_divisor, py::arg("ranks"), Released())
      .def("set_static_graph", &set_static_graph, Released())
      .def("set_shards", &BucketSet::set_shards, py::arg("shards"), py::arg("per_rank"), Released())
      .def("mixed", &BucketSet::mixed, Released());
  bind_counting(sets);
  py::class_<ShardedGradients, std::shared_ptr<ShardedGradients>>(
      m, "ShardedGradients", "Gradients of which each rank keeps its rows alone.")
      .def(py::init(&shard_gradients), py::arg("set"), py::arg("stage"), py::arg("sum_types"),
           py::arg("stand_ins"), py::arg("heaps"))
      .def("reduced", &ShardedGradients::reduced, Released())
      .def(
          "reduced_as",
          [](const ShardedGradients& self, const std::vector<at::Tensor>& likes) {
            return placed_as(self.reduced(), likes);
          },
          py::arg("likes"), Released())
      .def("memory", &ShardedGradients::memory, py::arg("index"), Released())
      .def("agree", &ShardedGradients::agree, py::arg("digest") = 0, Released())
      .def("hold", &ShardedGradients::hold, py::arg("flags"), Released())
      .def("hold_gradients", &ShardedGradients::hold_gradients, Released())
      .def("note_seen", &ShardedGradients::note_seen, Released())
      .def("changed", &ShardedGradients::changed, Released())
      .def("end", &ShardedGradients::end, Released());
  py::class_<OptimizerPass>(m, "OptimizerPass", "An optimizer's steps over the ranks' heaps.")
      .def(py::init<std::shared_ptr<BucketSet>, std::vector<std::optional<at::Tensor>>,
                    std::vector<std::vector<at::Tensor>>>(),
           py::arg("set"), py::arg("masters"), py::arg("states"), Released())
      .def("step", &step, py::arg("rules"), py::arg("rule_of"), py::arg("reduces"), Released());
}

/// A pass on another thread may hold the lock of the hooks' set while it waits for the GIL.
struct EndsReleased {
  void operator()(PassHooks* hooks) const {
    const py::gil_scoped_release release;
    delete hooks;
  }
};

void bind_passes(py::module_& m) {
  py::class_<BackwardPass, std::shared_ptr<BackwardPass>>(
      m, "BackwardPass", "Reduces a module's gradients in backward passes.", py::dynamic_attr())
      .def(py::init([](std::shared_ptr<BucketSet> set, GradientOrder::Replan replan,
                       std::function<void()> mixed, std::function<void()> unchecked,
                       std::function<void(bool)> finished, std::function<void()> starting) {
             return std::make_shared<BackwardPass>(
                 std::move(set),
                 BackwardPass::Callbacks{std::move(replan), std::move(mixed), std::move(unchecked),
                                         std::move(finished), std::move(starting)});
           }),
           py::arg("set"), py::arg("replan"), py::arg("mixed"), py::arg("unchecked"),
           py::arg("finished") = py::none(), py::arg("starting") = py::none())
      .def("enter", &BackwardPass::on_output, Released())
      .def_property("sync", py::cpp_function(&BackwardPass::sync, Released()),
                    py::cpp_function(&BackwardPass::set_sync, Released()))
      .def("check_planned", &BackwardPass::check_planned, Released())
      .def("recover", &BackwardPass::recover, Released())
      .def("reduce_now", &BackwardPass::reduce_now, Released())
      .def("reduce_zeros", &BackwardPass::reduce_zeros, Released())
      .def("begin_shards", &BackwardPass::begin_shards, Released())
      .def("begin_shard", &BackwardPass::begin_shard, Released())
      .def("end_shard", &BackwardPass::end_shard, Released())
      .def("leave_shards", &BackwardPass::leave_shards, Released())
      .def("missing_shards", &BackwardPass::missing_shards, Released())
      .def("launched", &BackwardPass::launched, Released())
      .def("await_launched", &BackwardPass::await_launched, py::arg("count"), Released())
      .def("relearn", &BackwardPass::relearn, Released())
      .def("report", &report_of);
  py::class_<PassHooks, std::unique_ptr<PassHooks, EndsReleased>>(
      m, "PassHooks", "The hooks of a pass on its parameters.")
      .def(py::init<std::shared_ptr<BackwardPass>>(), py::arg("backward"), Released())
      .def("detach", &PassHooks::detach, Released())
      .def("await_backward", &PassHooks::await_backward, py::arg("outputs"), Released())
      .def_static("pass_of", &PassHooks::pass_of, py::arg("parameter"));
}

}  // namespace

void bind_buckets(pybind11::module_& m) {
  m.def("block_squares", &block_squares, py::arg("flat"), py::arg("low"), py::arg("high"),
        Released());
  m.def(
      "owns_memory", [](const at::Tensor& tensor) { return owns_memory(tensor); },
      py::arg("tensor"));
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
  m.def("rows_of_rank", &rows_of, py::arg("rows"), py::arg("world"), py::arg("rank"));
  m.def("gather_rows", &gather_rows, py::arg("group"), py::arg("wholes"), Released());
  m.def("any_of", &any_of, py::arg("group"), py::arg("flags"), Released());
  bind_sets(m);
  bind_passes(m);
}

}  // namespace dreamcomm
