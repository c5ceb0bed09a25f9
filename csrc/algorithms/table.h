// The list of algorithms. The row with the least predicted time wins, among those that suit a call;
// if several are equal, the first.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "algorithms/cost/costs.h"
#include "algorithms/primitives.h"
#include "core/request.h"

namespace dreamcomm {

/// The arguments on which the choice depends: the same on every rank.
struct CallShape {
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  std::size_t bytes = 0;    // of one block; all_to_all: that this rank gives to all
  int size = 1;             // ranks
  std::size_t room = 0;     // bytes of a page
  bool in_heap = false;     // the inputs that are read lie in their ranks' heaps
  bool out_heap = false;    // the outputs that peers write do
  bool along_tree = false;  // as in Reduction

  bool operator==(const CallShape&) const = default;
};

struct Row {
  Kind kind;
  std::string_view name;
  bool fixed_order;  // false: reduces in an order that depends on rank and size
  bool (*suits)(const CallShape& call);
  void (*run)(Primitives& prims, const Request& request);
  CostTerms (*cost_terms)(const CallShape& call);
  std::string_view why;  // a description for explain()
};

std::span<const Row> algorithm_table();

/// True if the row works on tensors in heaps.
bool is_in_heaps(const Row& row);

/// How the user constrains the choice, and the costs that decide it.
struct Preference {
  std::string_view algorithm = "auto";  // or a row's name
  bool fixed_order = true;
  const Costs* costs = &Costs::fixed();
};

/// Returns why `row` is not taken for `call`, or "" if it may be.
std::string_view objection(const Row& row, const CallShape& call, const Preference& preference);

/// Seconds of the row for the call.
double predict(const Row& row, const CallShape& call, const Costs& costs);

/// The index of the row for `call`: the named one if it may be taken, else the one
/// with the least predicted time that may. Every collective has a row that suits all
/// calls; messages have none, and the answer is the table's size.
std::size_t pick(const CallShape& call, const Preference& preference);

/// True if it is worth a turn to find out whose tensors lie in heaps: a row for heaps, if all lie
/// there, takes less time than the best of the others.
bool asks_for_heaps(const CallShape& call, const Preference& preference);

}  // namespace dreamcomm
