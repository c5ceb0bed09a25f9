#include "c10d/python/module_optimizer.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <variant>
#include <vector>

#include "c10d/base/check_args.h"
#include "c10d/base/convert.h"
#include "c10d/buckets/moves/step_rows.h"
#include "kernels/optimizer/optimizer.h"

namespace dreamcomm {
namespace {

using at::Tensor;
using States = std::vector<std::optional<Tensor>>;

/// Torch's own kernel, below its dispatcher: no mode of the calling thread is asked.
void torch_roots(DType type, std::byte* data, std::size_t count) {
  const auto options =
      at::TensorOptions().dtype(type == DType::kFloat32 ? at::kFloat : at::kDouble);
  Tensor tile = at::from_blob(data, {static_cast<std::int64_t>(count)}, options);
  at::cpu::sqrt_(tile);
}

/// Torch's square roots are correctly rounded unless they are MKL's.
SquareRoots roots_as_torch(bool wanted) { return wanted && at::hasMKL() ? &torch_roots : nullptr; }

AdamRule make_adam(double decay, double weight_decay, double lerp_weight, double beta2,
                   double square_weight, double bias_correction2_sqrt, double eps, double step_size,
                   bool amsgrad, bool maximize, bool as_torch) {
  return {.decay = decay,
          .weight_decay = weight_decay,
          .lerp_weight = lerp_weight,
          .beta2 = beta2,
          .square_weight = square_weight,
          .bias_correction2_sqrt = bias_correction2_sqrt,
          .eps = eps,
          .step_size = step_size,
          .amsgrad = amsgrad,
          .maximize = maximize,
          .roots = roots_as_torch(as_torch)};
}

SgdRule make_sgd(double lr, double weight_decay, double momentum, double dampening, bool nesterov,
                 bool maximize, bool first) {
  return {.lr = lr,
          .weight_decay = weight_decay,
          .momentum = momentum,
          .dampening = dampening,
          .nesterov = nesterov,
          .maximize = maximize,
          .first = first};
}

void require_row(const std::string& argument, const Tensor& tensor, const Tensor& parameter) {
  const char* const call = "optimizer_step: expected '";
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided, call, argument,
                    "' to be a dense CPU tensor, got one of layout ", tensor.layout(), " on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), call, argument, "' to be contiguous, got shape ",
                    tensor.sizes(), " with strides ", tensor.strides());
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble, call, argument,
                    "' of type float32 or float64, got ", type_name(type));
  TORCH_CHECK_VALUE(type == parameter.scalar_type(), call, argument, "' of type ",
                    type_name(parameter.scalar_type()), " like 'parameter', got ", type_name(type));
  TORCH_CHECK_VALUE(tensor.numel() == parameter.numel(), call, argument, "' with ",
                    parameter.numel(), " elements like 'parameter', got ", tensor.numel());
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, call, argument,
                    "' to have memory, got a tensor whose storage was given back");
}

std::size_t states_of(const OptimizerRule& rule) {
  if (const auto* adam = std::get_if<AdamRule>(&rule)) return adam->amsgrad ? 3 : 2;
  return std::get<SgdRule>(rule).momentum != 0 ? 1 : 0;
}

void take_step(const OptimizerRule& rule, const Tensor& parameter, const States& state,
               const Tensor& gradient) {
  require_row("parameter", parameter, parameter);
  require_row("gradient", gradient, parameter);
  const std::size_t states = states_of(rule);
  TORCH_CHECK_VALUE(state.size() >= states, "optimizer_step: expected ", states,
                    " tensors in 'state', got ", state.size());
  OptimizerMemory memory;
  memory.parameter = static_cast<std::byte*>(parameter.data_ptr());
  std::vector<Tensor> rows{gradient, parameter};
  for (std::size_t s = 0; s < states; ++s) {
    const std::string argument = "state[" + std::to_string(s) + "]";
    TORCH_CHECK_VALUE(state[s], "optimizer_step: expected '", argument,
                      "' to be a tensor, got None");
    require_row(argument, *state[s], parameter);
    memory.state[s] = static_cast<std::byte*>(state[s]->data_ptr());
    rows.push_back(*state[s]);
  }
  TORCH_CHECK_VALUE(!any_overlap(rows),
                    "optimizer_step: expected tensors that share no memory, got two that do");
  optimizer_step(rule, to_dtype(parameter.scalar_type()), memory,
                 static_cast<const std::byte*>(gradient.const_data_ptr()),
                 static_cast<std::size_t>(parameter.numel()));
  // All except the gradient have changed, which is reported to autograd, as by operations in place.
  for (const Tensor& row : at::ArrayRef<Tensor>(rows).slice(1)) {
    if (!row.is_inference()) row.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void bind_optimizer(pybind11::module_& m) {
  py::class_<AdamRule>(m, "AdamRule", "The numbers of one step of Adam or AdamW.")
      .def(py::init(&make_adam), py::kw_only(), py::arg("decay") = 1.0,
           py::arg("weight_decay") = 0.0, py::arg("lerp_weight") = 0.0, py::arg("beta2") = 0.0,
           py::arg("square_weight") = 0.0, py::arg("bias_correction2_sqrt") = 1.0,
           py::arg("eps") = 0.0, py::arg("step_size") = 0.0, py::arg("amsgrad") = false,
           py::arg("maximize") = false, py::arg("torch_roots") = true)
      .def_readwrite("decay", &AdamRule::decay)
      .def_readwrite("weight_decay", &AdamRule::weight_decay)
      .def_readwrite("lerp_weight", &AdamRule::lerp_weight)
      .def_readwrite("beta2", &AdamRule::beta2)
      .def_readwrite("square_weight", &AdamRule::square_weight)
      .def_readwrite("bias_correction2_sqrt", &AdamRule::bias_correction2_sqrt)
      .def_readwrite("eps", &AdamRule::eps)
      .def_readwrite("step_size", &AdamRule::step_size)
      .def_readwrite("amsgrad", &AdamRule::amsgrad)
      .def_readwrite("maximize", &AdamRule::maximize)
      .def_property(
          "torch_roots", [](const AdamRule& self) { return self.roots != nullptr; },
          [](AdamRule& self, bool wanted) { self.roots = roots_as_torch(wanted); });
  py::class_<SgdRule>(m, "SgdRule", "The numbers of one step of SGD.")
      .def(py::init(&make_sgd), py::kw_only(), py::arg("lr") = 0.0, py::arg("weight_decay") = 0.0,
           py::arg("momentum") = 0.0, py::arg("dampening") = 0.0, py::arg("nesterov") = false,
           py::arg("maximize") = false, py::arg("first") = false)
      .def_readwrite("lr", &SgdRule::lr)
      .def_readwrite("weight_decay", &SgdRule::weight_decay)
      .def_readwrite("momentum", &SgdRule::momentum)
      .def_readwrite("dampening", &SgdRule::dampening)
      .def_readwrite("nesterov", &SgdRule::nesterov)
      .def_readwrite("maximize", &SgdRule::maximize)
      .def_readwrite("first", &SgdRule::first);
  m.def("optimizer_step", &take_step, py::arg("rule"), py::arg("parameter"), py::arg("state"),
        py::arg("gradient"), py::call_guard<py::gil_scoped_release>());
  m.def("step_rows", &step_rows, py::arg("rules"), py::arg("rule_of"), py::arg("rows"),
        py::arg("gradients"), py::arg("states"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
