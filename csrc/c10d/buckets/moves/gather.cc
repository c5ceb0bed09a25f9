#include "c10d/buckets/moves/gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "c10d/buckets/layout.h"
#include "c10d/buckets/memory.h"

namespace dreamcomm {
namespace {

/// This rank's elements of a tensor, as a view.
at::Tensor own_elements(const GroupPtr& group, const at::Tensor& whole) {
  const RankRange own = elements_of_rank(whole.sizes(), group->getSize(), group->getRank());
  return in_memory_order(whole.detach()).narrow(0, own.begin, own.count);
}

}  // namespace

TensorList keep_rows(const GroupPtr& group, const TensorList& wholes) {
  TensorList rows;
  for (const at::Tensor& whole : wholes) rows.push_back(own_elements(group, whole).clone());
  return rows;
}

void put_rows(const GroupPtr& group, const TensorList& rows, const TensorList& wholes) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < wholes.size(); ++i) own_elements(group, wholes[i]).copy_(rows[i]);
}

void gather_rows(const GroupPtr& group, const TensorList& wholes) {
  if (wholes.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<c10::IntArrayRef> shapes;
  TensorList flat;
  for (const at::Tensor& whole : wholes) {
    shapes.push_back(whole.sizes());
    flat.push_back(in_memory_order(whole.detach()));
  }
  const Sections sections(std::move(shapes), group->getSize());
  const at::Tensor mine =
      at::zeros({sections.width()}, wholes.front().options().requires_grad(false));
  sections.of_rank(group->getRank(), [&](std::size_t i, std::int64_t place, const RankRange& rows) {
    mine.narrow(0, place, rows.count).copy_(flat[i].narrow(0, rows.begin, rows.count));
  });
  const TensorList every = all_gather(group, mine);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    if (rank == group->getRank()) continue;
    const at::Tensor& received = every[static_cast<std::size_t>(rank)];
    sections.of_rank(rank, [&](std::size_t i, std::int64_t place, const RankRange& rows) {
      flat[i].narrow(0, rows.begin, rows.count).copy_(received.narrow(0, place, rows.count));
    });
  }
}

}  // namespace dreamcomm
