#include "c10d/python/module_messages.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend/header_channel.h"
#include "c10d/backend/placed_message.h"

namespace dreamcomm {
namespace {

namespace py = pybind11;
using Keys = std::array<std::int64_t, KeyedHeader::kKeys>;

bool send(HeaderChannel& channel, int peer, const Keys& key, const py::bytes& description,
          std::vector<std::int64_t> offsets) {
  KeyedHeader header;
  header.key = key;
  std::string text = description;
  header.size = static_cast<std::uint32_t>(text.size());
  const bool inside = HeaderChannel::fits(text.size(), offsets.size());
  if (inside) header.description = std::move(text);
  header.offsets = std::move(offsets);
  const py::gil_scoped_release release;
  channel.send(peer, header);
  return inside;
}

/// None, or (sender, key, description or its size where it follows, offsets).
py::object next(HeaderChannel& channel, int milliseconds) {
  std::optional<std::pair<int, KeyedHeader>> found;
  {
    const py::gil_scoped_release release;
    found = channel.next(std::chrono::milliseconds(milliseconds));
  }
  if (!found) return py::none();
  const KeyedHeader& header = found->second;
  const bool inside = header.description.size() == header.size;
  py::object text =
      inside ? py::object(py::bytes(header.description)) : py::object(py::int_(header.size));
  return py::make_tuple(found->first, py::tuple(py::cast(header.key)), std::move(text),
                        py::tuple(py::cast(header.offsets)));
}

}  // namespace

void bind_messages(py::module_& m) {
  py::class_<PlacedMessage>(m, "PlacedMessage",
                            "A tensor of a message in the sender's heap, until it is taken.")
      .def_property_readonly("offset", &PlacedMessage::offset)
      .def_property_readonly("nbytes", &PlacedMessage::bytes)
      .def_property_readonly("taken", &PlacedMessage::taken);
  py::class_<HeaderChannel>(m, "HeaderChannel", "Short messages with a key, from all peers.")
      .def(py::init<c10::intrusive_ptr<DreamBackend>, int>(), py::arg("backend"), py::arg("tag"))
      .def_static("fits", &HeaderChannel::fits, py::arg("description"), py::arg("offsets"))
      .def("send", &send, py::arg("peer"), py::arg("key"), py::arg("description"),
           py::arg("offsets"))
      .def("next", &next, py::arg("milliseconds"))
      .def("pending", &HeaderChannel::pending, py::call_guard<py::gil_scoped_release>())
      .def("cancel", &HeaderChannel::cancel, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dreamcomm
