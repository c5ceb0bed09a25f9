"""Turns a module, or a list of stages, into the parts of a pipeline.

Three forms can be split:

- an nn.Sequential, between any two children;
- a list of stage modules, each of which gets what the one before returned: a tuple as positional
  arguments, anything else as one;
- any other module whose forward calls a list of blocks, before each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from dreamcomm.pipeline.split.chains import chain_parts, sequential_parts
from dreamcomm.pipeline.split.part import StagePart
from dreamcomm.pipeline.split.traced import TracedModule

__all__ = ["Splittable", "check_cuts", "make_parts", "unit_names"]

Splittable: TypeAlias = "nn.Module | Sequence[nn.Module]"


def unit_names(whole: Splittable, *, blocks: str | Sequence[str] | None = None) -> list[str]:
    """Names what can be cut between.

    Args:
        whole: the module, or the list of stages.
        blocks: name or names of the lists of blocks in a module; None finds the longest list.

    Returns:
        Names of children, stages or blocks, once for each call of them, in the order of the calls.

    Raises:
        ValueError: the module cannot be split.
    """
    children = _children(whole, blocks)
    if children is not None:
        return [name for name, _ in children]
    assert isinstance(whole, nn.Module)
    return list(TracedModule(whole, blocks).blocks)


def make_parts(
    whole: Splittable,
    cuts: Sequence[int] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[StagePart]:
    """Splits a module. The parts call its own submodules, there are no copies.

    Args:
        whole: the module, or the list of stages.
        cuts: indices in ``unit_names`` at which parts 1.. begin; None makes a part of each unit.
        blocks: as for ``unit_names``.

    Returns:
        The parts in order. Run one after another, they compute what the whole does.

    Raises:
        ValueError: the module cannot be split, or ``cuts`` do not increase or are out of range.
    """
    children = _children(whole, blocks)
    if children is not None:
        known = check_cuts(cuts, len(children))
        is_sequential = isinstance(whole, nn.Sequential)
        return (sequential_parts if is_sequential else chain_parts)(children, known)
    assert isinstance(whole, nn.Module)
    traced = TracedModule(whole, blocks)
    return traced.parts(check_cuts(cuts, len(traced.blocks)))


def check_cuts(cuts: Sequence[int] | None, units: int) -> list[int]:
    """The cuts as a list, or all of them where there are none given.

    Raises:
        ValueError: they do not increase, or are not in 1 ... units - 1.
    """
    known = list(range(1, units)) if cuts is None else list(cuts)
    if any(not 0 < one < units for one in known) or known != sorted(set(known)):
        raise ValueError(
            f"expected the first units of stages 1, 2, ... as increasing indices from 1 to "
            f"{units - 1}, as there are {units} units, got {known}"
        )
    return known


def _children(
    whole: Splittable, blocks: str | Sequence[str] | None
) -> list[tuple[str, nn.Module]] | None:
    """The modules of a chain by name; None for a module that has to be traced."""
    if isinstance(whole, nn.Module) and not isinstance(whole, nn.ModuleList):
        is_chain = isinstance(whole, nn.Sequential) and type(whole).forward is nn.Sequential.forward
        if blocks is not None or not is_chain:
            return None
        items = [(name, one) for name, one in whole._modules.items() if one is not None]
    else:
        if blocks is not None:
            raise ValueError("blocks= is for a module, not for a list of stages")
        items = [(str(number), one) for number, one in enumerate(whole)]
    if not items:
        raise ValueError("there are no stages to split")
    return items
