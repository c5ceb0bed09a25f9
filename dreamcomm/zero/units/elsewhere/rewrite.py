"""Lets one rank write whole parameters that are DTensors, and gives all ranks their shards.

    all ranks       full_tensor() of a parameter after the other; the writer keeps them
    writer          has whole, plain Parameters registered, and writes them
    all ranks       tell each other of errors: all go on, or none
    all ranks       get a whole parameter after the other, and copy their shard of it

The writer is the first rank of the mesh. It has one whole copy at most, and others one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dreamcomm.ranks.agree import Failed, gather_objects, text_of
from dreamcomm.ranks.errors import Error
from dreamcomm.zero.units.elsewhere.state import fsdp_modules, groups_of
from dreamcomm.zero.units.parameters.whole import own_shard, told, whole_of

__all__ = ["RewriteError", "rewriting"]


class RewriteError(Error, RuntimeError):
    """A rank has failed in ``rewrite()``. No parameter has changed on any rank."""


@contextmanager
def rewriting(module: nn.Module) -> Iterator[bool]:
    """Gives the parameters of a tree to its first rank, to write. Collective.

    Args:
        module: sharded by torch's ``fully_shard``, or with such modules below.

    Yields:
        Whether this rank writes.

    Raises:
        RewriteError: another rank has failed, or parameters cannot be written.
        Exception: what the body has raised on this rank.
    """
    work = _Rewrite(module)
    work.agree(None, work.obstacle())
    work.begin()
    error: Exception | None = None
    wrong = ""
    try:
        with torch.no_grad():
            yield work.writes
    except Exception as raised:  # what a user's code raises
        error = raised
    finally:  # Ctrl-C, too, leaves the module as it was, and leaves at once
        wrong = work.put_back()
    work.agree(error, wrong)
    work.spread()


class _Rewrite:
    """Parameters of a tree while its first rank writes them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.units: list[Any] = list(fsdp_modules(module))
        self.parameters = [one for group in groups_of(module) for one in group.fsdp_params]
        for unit in self.units:
            unit.reshard()
        self.sharded: list[DTensor] = [one.sharded_param for one in self.parameters]
        self.meshes = list(dict.fromkeys(one.device_mesh for one in self.sharded))
        firsts = [int(mesh.mesh.flatten()[0]) for mesh in self.meshes] or [0]
        self.writer, self.has_one_writer = firsts[0], len(set(firsts)) == 1
        self.rank = dist.get_rank()
        self.writes = self.rank == self.writer
        self.whole: list[Tensor] = []

    def obstacle(self) -> str:
        """Why parameters cannot be written; empty: they can be."""
        if any(getattr(unit, "_is_rewritten", False) for unit in self.units):
            return "it runs within another rewrite() of the same parameters; use the outer one"
        for one, sharded in zip(self.parameters, self.sharded, strict=True):
            if sharded.device.type == "meta":
                return (
                    f"parameter {self._name(one)!r} is on the meta device: call "
                    "module.to_empty(device=...) before"
                )
        if not self.has_one_writer:
            return (
                "expected one first rank for all meshes of its parameters, got meshes that begin "
                "with different ranks; call rewrite() on modules below it that have one mesh"
            )
        return ""

    def begin(self) -> None:
        """Registers whole parameters on the writer. Collective."""
        for unit in self.units:
            unit._is_rewritten = True
        for one, sharded in zip(self.parameters, self.sharded, strict=True):
            whole = whole_of(sharded)
            if not self.writes:
                continue
            one._setattr_on_modules(nn.Parameter(whole, requires_grad=sharded.requires_grad))
            # torch expects DTensors after a load_state_dict().
            one.reset_sharded_param = _nothing

    def put_back(self) -> str:
        """Registers the shards again. Returns what is wrong with the whole parameters."""
        for unit in self.units:
            del unit._is_rewritten
        wrong = ""
        for one, sharded in zip(self.parameters, self.sharded, strict=True):
            if not self.writes:
                break
            found = getattr(one._module_info.module, one._module_info.param_name, None)
            wrong = wrong or self._wrong(one, found, sharded)
            nothing = torch.empty(0, device="cpu")
            self.whole.append(found.detach() if isinstance(found, Tensor) else nothing)
            one._setattr_on_modules(sharded)
            one.__dict__.pop("reset_sharded_param", None)
        for unit in self.units:
            unit.reshard()  # after a pass that the body has run
        return wrong

    def _wrong(self, one: Any, found: object, sharded: DTensor) -> str:
        expected = f"expected a whole Parameter of shape {tuple(sharded.shape)} at the end, got "
        name = f"parameter {self._name(one)!r}: "
        if not isinstance(found, Tensor) or isinstance(found, DTensor):
            return name + expected + f"{type(found).__name__}; write values in place, run no passes"
        if found.shape != sharded.shape:
            return name + expected + f"{tuple(found.shape)}; write values in place"
        return ""

    def agree(self, error: Exception | None, wrong: str) -> None:
        """Raises on all ranks where any has failed. Collective."""
        mine = None
        if error is not None:
            mine = Failed(self.rank, type(error).__name__, text_of(error))
        elif wrong:
            mine = Failed(self.rank, RewriteError.__name__, wrong)
        first = _first_failed(self.meshes, mine)
        if error is not None:
            raise error
        if first is not None:
            raise RewriteError(
                f"rank {self.rank}: rewrite() of {type(self.module).__name__} failed on rank "
                f"{first.rank}: {first.kind}: {first.text}. No parameter has changed on any rank"
            )

    @torch.no_grad()
    def spread(self) -> None:
        """Copies the writer's values into all shards. Collective."""
        self.whole.reverse()
        for sharded in self.sharded:
            mine = self.whole.pop() if self.writes else None
            sharded.to_local().copy_(own_shard(told(mine, sharded), sharded))

    def _name(self, one: Any) -> str:
        for name, module in self.module.named_modules():
            if module is one._module_info.module:
                return f"{name}.{one._module_info.param_name}".lstrip(".")
        return str(one._module_info.param_name)


def _nothing() -> None:
    pass


def _first_failed(meshes: Sequence[DeviceMesh], mine: Failed | None) -> Failed | None:
    """The failure of the lowest rank of all that has one. Collective."""
    first = mine
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            found = gather_objects(mesh.get_group(dimension), first)
            first = min(filter(None, found), key=lambda one: one.rank, default=None)
    return first
