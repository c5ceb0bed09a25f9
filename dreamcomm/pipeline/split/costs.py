"""Where to cut: what each unit costs, and the division with the cheapest slowest stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split.part import StagePart
from dreamcomm.pipeline.split.partition import partition
from dreamcomm.pipeline.split.stages import Splittable, check_cuts, make_parts, unit_names

__all__ = ["choose_cuts", "measure_costs", "parameter_costs"]

_EPSILON = 1e-3  # of a unit without parameters: among these, stages get equally many


def parameter_costs(units: Mapping[str, nn.Module] | Iterable[nn.Module]) -> list[float]:
    """Elements of each unit's parameters, as a stand-in for the time that it takes.

    Args:
        units: modules. An embedding counts as one without parameters: it reads few of its rows.
    """
    modules = units.values() if isinstance(units, Mapping) else units
    return [_EPSILON + sum(_elements(one) for one in _computing(module)) for module in modules]


def _computing(module: nn.Module) -> list[Tensor]:
    """Parameters of a module, each once, without those of embeddings."""
    lookups = [one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    left_out = {id(one.weight) for one in lookups}
    return [one for one in module.parameters() if id(one) not in left_out]


def _elements(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.numel()


def _part_cost(part: StagePart) -> float:
    tensors = sum(_elements(one) for one in part.tensors.values() if one.dim() > 1)
    return sum(parameter_costs(part.units)) + tensors


def choose_cuts(
    whole: Splittable,
    parts: int,
    split: str | Sequence[int] = "cost",
    costs: Sequence[float] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[int]:
    """Decides where parts begin.

    Args:
        whole: a module or a list of stages, as for ``make_parts``.
        parts: how many.
        split: "cost" makes the largest cost of a part as small as possible; a list is the answer,
            the first units of parts 1, 2, ...
        costs: of each unit, as ``measure_costs`` has them; None counts parameters.
        blocks: as for ``make_parts``.

    Returns:
        Indices of units, for ``make_parts``.

    Raises:
        ValueError: there are fewer units than parts, or a list does not fit.
    """
    names = unit_names(whole, blocks=blocks)
    _check_parts(parts, names)
    if not isinstance(split, str):
        cuts = check_cuts(split, len(names))
        if len(cuts) != parts - 1:
            raise ValueError(f"expected {parts - 1} cuts for {parts} stages, got {cuts}")
        return cuts
    if split != "cost":
        raise ValueError(f"expected split='cost' or a list of indices, got {split!r}")
    if costs is None:
        costs = [_part_cost(one) for one in make_parts(whole, blocks=blocks)]
    if len(costs) != len(names):
        raise ValueError(f"expected a cost for each of {len(names)} units, got {len(costs)}")
    return partition(costs, parts)


def _check_parts(parts: int, names: list[str]) -> None:
    if not 1 <= parts <= len(names):
        listed = ", ".join(names if len(names) <= 8 else [*names[:3], "...", names[-1]])
        raise ValueError(
            f"cannot make {parts} stages of {len(names)} units ({listed}): a stage has at least one"
        )


def measure_costs(
    whole: Splittable,
    *args: Any,
    repeats: int = 5,
    blocks: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Times each unit's forward and backward pass on a micro-batch.

    Gradients, buffers and random numbers are left as they are.

    Args:
        whole: a module or a list of stages, as for ``make_parts``.
        args, kwargs: arguments of the whole.
        repeats: the median of so many runs counts, after one that is not timed.
        blocks: as for ``make_parts``.

    Returns:
        Seconds of each unit. What a module does before its first block counts with that, what it
        does after its last block with that one.
    """
    parts = make_parts(whole, blocks=blocks)
    modules = [one for part in parts for one in part.units.values()]
    buffers = {id(one): one for module in modules for one in module.buffers()}
    before = {key: one.clone() for key, one in buffers.items()}
    with torch.random.fork_rng():
        runs = [_timed_run(parts, args, kwargs) for _ in range(repeats + 1)]
    with torch.no_grad():
        for key, one in before.items():
            buffers[key].copy_(one)
    return [median(times) for times in zip(*runs[1:], strict=True)]


def _timed_run(parts: list[StagePart], args: Any, kwargs: dict[str, Any]) -> list[float]:
    values: Any = args
    seconds = []
    for part in parts:
        own = {name: one for name, one in kwargs.items() if part.takes(name)}
        values = pytree.tree_map_only(Tensor, _as_leaf, values)
        begin = _now(values)
        outputs = part.run(values, own)
        _backward(part, values, outputs)
        seconds.append(_now(outputs) - begin)
        values = outputs
    return seconds


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _backward(part: StagePart, inputs: Any, outputs: Any) -> None:
    """A backward pass that leaves ``grad`` of the parameters as it is."""
    leaves = [one for one in pytree.tree_leaves(outputs) if isinstance(one, Tensor)]
    ends = [one for one in leaves if one.requires_grad]
    known = [*part.tensors.values(), *(p for one in part.units.values() for p in one.parameters())]
    known += [one for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)]
    begins = list({id(one): one for one in known if one.requires_grad}.values())
    if ends and begins:
        gradients = [torch.ones_like(one) for one in ends]
        torch.autograd.grad(ends, begins, gradients, allow_unused=True)


def _now(values: Any) -> float:
    """The time when what was started is done."""
    for one in pytree.tree_leaves(values):
        if isinstance(one, Tensor) and one.is_cuda:
            torch.cuda.synchronize(one.device)
            break
    return time.perf_counter()
