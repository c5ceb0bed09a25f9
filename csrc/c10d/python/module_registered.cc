#include "c10d/python/module_registered.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>

namespace dreamcomm {
namespace {

/// The parameter that a module's dict has under the name; null: none.
PyObject* registered_in(const py::handle& own, const py::handle& name) {
  if (PyDict_Check(own.ptr()) == 0) throw py::type_error("expected dicts of parameters");
  PyObject* const found = PyDict_GetItemWithError(own.ptr(), name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

void require_length(const py::list& list, std::size_t length) {
  if (list.size() != length) throw py::value_error("expected lists of one length");
}

const at::Tensor& tensor_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected tensors");
  return THPVariable_Unpack(object.ptr());
}

/// Registers `after` where `before` is registered; scripts freeze what is registered.
void register_instead(const py::list& owns, const py::list& names, const py::list& before,
                      const py::list& after) {
  const std::size_t count = owns.size();
  for (const py::list& one : {names, before, after}) require_length(one, count);
  for (std::size_t i = 0; i < count; ++i) {
    const py::handle old = before[i];
    if (registered_in(owns[i], names[i]) != old.ptr()) continue;
    const py::handle now = after[i];
    const bool requires_grad = tensor_of(old).requires_grad();
    const at::Tensor& tensor = tensor_of(now);
    if (PyDict_SetItem(owns[i].ptr(), py::handle(names[i]).ptr(), now.ptr()) != 0)
      throw py::error_already_set();
    if (tensor.requires_grad() != requires_grad) tensor.set_requires_grad(requires_grad);
  }
}

/// True if each dict has the whole parameter, or the DTensor on its local tensor.
bool are_registered(const py::list& owns, const py::list& names, const py::list& wholes,
                    const py::list& sharded, const py::list& locals) {
  const std::size_t count = owns.size();
  for (const py::list& one : {names, wholes, sharded, locals}) require_length(one, count);
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* const now = registered_in(owns[i], names[i]);
    if (now == py::handle(wholes[i]).ptr()) continue;
    const py::handle form = sharded[i];
    if (now != form.ptr()) return false;
    const py::object local = form.attr("_local_tensor");
    if (local.ptr() != py::handle(locals[i]).ptr()) return false;
  }
  return true;
}

}  // namespace

void bind_registered(pybind11::module_& m) {
  m.def("register_instead", &register_instead, py::arg("owns"), py::arg("names"), py::arg("before"),
        py::arg("after"));
  m.def("are_registered", &are_registered, py::arg("owns"), py::arg("names"), py::arg("wholes"),
        py::arg("sharded"), py::arg("locals"));
}

}  // namespace dreamcomm
