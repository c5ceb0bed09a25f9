#include "c10d/python/module_region.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/base/convert.h"
#include "c10d/region/many.h"
#include "c10d/region/region_tensors.h"
#include "core/request.h"
#include "transport/shm/region.h"

namespace dreamcomm {
namespace {

using RegionPtr = std::shared_ptr<Region>;

/// Calls `call` without the GIL; its errors are torch's.
template <typename Call>
auto call_released(Call&& call) {
  const py::gil_scoped_release release;
  try {
    return call();
  } catch (const Error&) {
    std::rethrow_exception(current_as_torch());
  }
}

std::unique_ptr<RegionOffer> make_offer(std::size_t bytes, bool protects,
                                        const RegionFolderPtr& folder) {
  return call_released([&] { return std::make_unique<RegionOffer>(bytes, protects, folder); });
}

RegionPtr make_own(std::size_t bytes, const RegionFolderPtr& folder) {
  TORCH_CHECK_VALUE(folder != nullptr, "make_own_region: expected a folder");
  return call_released([&] { return make_own_region(bytes, folder); });
}

RegionPtr take_within(const std::string& address, std::size_t bytes, bool protects,
                      double timeout_seconds, const RegionFolderPtr& folder) {
  TORCH_CHECK_VALUE(timeout_seconds >= 0, "take_region: expected a timeout from 0 on, got ",
                    timeout_seconds);
  constexpr double kLongest = 1e9;  // seconds
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(std::min(timeout_seconds, kLongest)));
  return call_released([&] {
    return take_region(address, bytes, protects, deadline_in(Clock::now(), timeout), folder);
  });
}

void allow_writes(const Region& region, bool allowed) {
  call_released([&] { region.allow_writes(allowed); });
}

void allow_rows(const Region& region, bool allowed) {
  call_released([&] { region.allow_rows(allowed); });
}

/// The path of the folder that a tensor's file lies in; none: it lies in no file.
std::optional<std::string> folder_of(const at::Tensor& tensor) {
  const RegionPtr region = region_of(tensor);
  if (region == nullptr || region->folder() == nullptr) return std::nullopt;
  return region->folder()->path();
}

/// One of the functions of many tensors that lie in files.
template <void (*kAct)(const std::vector<at::Tensor>&)>
void on_files(const std::vector<at::Tensor>& tensors) {
  call_released([&] { kAct(tensors); });
}

at::Tensor tensor_of(const RegionPtr& region, std::int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride, at::ScalarType dtype, bool writable) {
  return region_tensor(region, offset, size, stride, dtype, writable);
}

}  // namespace

void bind_region(pybind11::module_& m) {
  py::class_<RegionFolder, RegionFolderPtr>(m, "RegionFolder", "A folder of files that are mapped.")
      .def(py::init<std::string>(), py::arg("path"))
      .def_property_readonly("path", &RegionFolder::path)
      .def_property_readonly("bytes", &RegionFolder::bytes)
      .def_property_readonly("dropped", &RegionFolder::dropped);
  py::class_<Region, RegionPtr>(m, "Region", "Memory that the ranks of a host share.")
      .def_property_readonly("bytes", &Region::bytes)
      .def_property_readonly("protects", &Region::protects)
      .def_property_readonly("folder", &Region::folder)
      .def("allow_writes", &allow_writes, py::arg("allowed"))
      .def("allow_rows", &allow_rows, py::arg("allowed"))
      .def("tensor", &tensor_of, py::arg("offset"), py::arg("size"), py::arg("stride"),
           py::arg("dtype"), py::arg("writable"));
  py::class_<RegionOffer>(m, "RegionOffer", "Gives a new region to the other ranks of a host.")
      .def(py::init(&make_offer), py::arg("bytes"), py::arg("protects"),
           py::arg("folder") = RegionFolderPtr())
      .def_property_readonly("address", &RegionOffer::address)
      .def_property_readonly("region", &RegionOffer::region)
      .def("close", &RegionOffer::close, py::call_guard<py::gil_scoped_release>());
  m.def("take_region", &take_within, py::arg("address"), py::arg("bytes"), py::arg("protects"),
        py::arg("timeout_seconds"), py::arg("folder") = RegionFolderPtr());
  m.def("make_own_region", &make_own, py::arg("bytes"), py::arg("folder"));
  m.def("folder_of", &folder_of, py::arg("tensor"));
  m.def("write_files", &on_files<write_files>, py::arg("tensors"));
  m.def("drop_files", &on_files<drop_files>, py::arg("tensors"));
  m.def("read_files", &on_files<read_files>, py::arg("tensors"));
  m.def("versions_of", &versions_of, py::arg("tensors"));
  m.def("storages_of", &storages_of, py::arg("tensors"));
  m.def("share_version", &share_version, py::arg("tensor"), py::arg("owner"));
}

}  // namespace dreamcomm
