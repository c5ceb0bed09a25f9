// The list of algorithms. The first row that suits a call wins.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "algorithms/walk.h"
#include "core/request.h"

namespace dreamcomm {

/// What the choice depends on: the same on every rank.
struct Call {
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  std::size_t bytes = 0;  // of one block
  int size = 1;           // ranks
  std::size_t room = 0;   // bytes of a page
  bool in_heap = false;   // the inputs that are read lie in their ranks' heaps
  bool out_heap = false;  // the outputs that are written by peers do
};

struct Row {
  Kind kind;
  std::string_view name;
  bool fixed_order;  // false: reduces in an order that depends on rank and size
  bool (*suits)(const Call& call);
  void (*run)(Walk& walk, const Request& request);
  std::string_view why;  // in words, for explain()
};

std::span<const Row> algorithm_table();

/// Whether the row works on tensors in heaps.
bool is_in_heaps(const Row& row);

/// Whether a call is worth a turn to find out whose tensors lie in heaps.
bool asks_for_heaps(const Call& call);

/// How the user constrains the choice.
struct Preference {
  std::string_view algorithm = "auto";  // or a row's name
  bool fixed_order = true;
};

/// Why `row` is not taken for `call`, or empty if it may be.
std::string_view objection(const Row& row, const Call& call, const Preference& preference);

/// The index of the row for `call`: the named one if it may be taken, else the
/// first that may. Every kind has a row that suits all calls.
std::size_t pick(const Call& call, const Preference& preference);

}  // namespace dreamcomm
