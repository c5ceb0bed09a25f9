"""A parameter of a unit: the whole one that passes read, and the shard that an optimizer steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dreamcomm.buckets.layout import is_replicated, shard_layout
from dreamcomm.zero.units.parameters.casts import Casts

if TYPE_CHECKING:
    from dreamcomm._C import Region

__all__ = ["Place", "UnitParameter", "distributed", "own_rows", "set_local", "sharded_parameter"]


@dataclass(frozen=True)
class Place:
    """Where a module has a parameter registered.

    Attributes:
        module: holds it; a weak reference, as a module holds its unit.
        name: in the module.
    """

    module: weakref.ref[nn.Module]
    name: str

    def registered(self) -> Any:
        """What the module has there now; None: nothing, or there is no such module any more."""
        module = self.module()
        return None if module is None else module._parameters.get(self.name)

    def swap(self, before: nn.Parameter, after: nn.Parameter) -> bool:
        """Registers ``after`` instead of ``before``. What a script has put there instead stays."""
        module = self.module()
        if module is None or module._parameters.get(self.name) is not before:
            return False
        if self.sets_itself():
            setattr(module, self.name, after)
        else:
            module._parameters[self.name] = after
        return True

    def sets_itself(self) -> bool:
        """Whether the module does more than to register, as nn.LSTM, which lists its weights."""
        module = self.module()
        return module is not None and type(module).__setattr__ is not nn.Module.__setattr__


@dataclass(eq=False)
class UnitParameter:
    """The forms of one parameter on this rank.

    Attributes:
        name: in the tree's root, for messages and buckets.
        whole: the plain Parameter that forward and backward passes use. It is the one that the
            module had before, with its hooks, where it was made on this device.
        sharded: the DTensor that is registered outside of passes.
        local: this rank's rows: the DTensor's memory.
        sent: what other ranks read of them, in the whole one's type: ``local``, unless they differ.
        region: where the rows of all ranks lie; None: a scalar, or on the meta device.
        divide_factor: of the unit that owns it.
        is_counted: sums are divided by counts, not by the factor or the number of ranks.
        shown: the gradient of ``sharded`` that lies on the sum's own memory, once there was one.
        partial: the one that stands there for a sum of this rank alone.
        given: a gradient that the script has put there, to which the next sum is added.
        shown_is_sum: the engine adds to it; else it is finished.
        hides_own: ``whole`` has a sum of this rank alone, and another gradient stands there, not 0.
        left_zero: with counts, the version of ``partial`` where a pass has left zeros there.
        is_partial: rows are summed over the shards alone, and wait for the replicas'.
        is_meta: whether it has no values yet.
    """

    name: str
    whole: nn.Parameter
    sharded: nn.Parameter
    local: Tensor
    sent: Tensor
    casts: Casts
    region: Region | None = None
    divide_factor: float = 0.0
    is_counted: bool = False
    shown: DTensor | None = None
    partial: DTensor | None = None
    given: Tensor | None = None
    shown_is_sum: bool = True
    hides_own: bool = False
    left_zero: int | None = None
    is_partial: bool = False
    is_meta: bool = field(init=False)
    _storage: Any = field(init=False)  # keeps its address from another one's use

    def __post_init__(self) -> None:
        self.is_meta = self.whole.device.type == "meta"
        self.note_storage()

    @property
    def spec(self) -> DTensorSpec:
        spec: DTensorSpec = self.sharded._spec  # type: ignore[attr-defined]
        return spec

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type of the gradient, until it is shown on ``sharded``."""
        return self.casts.sum_dtype(self.local.dtype)

    @property
    def is_replicated(self) -> bool:
        return is_replicated(tuple(self.whole.shape))

    def is_current(self, registered: object) -> bool:
        """Whether what a module has registered is one of the forms, unchanged."""
        if registered is self.whole:
            return True
        if registered is not self.sharded:
            return False
        return self.sharded._local_tensor is self.local  # type: ignore[attr-defined]

    def note_storage(self) -> None:
        """Takes the storage of ``sharded`` for its own: ``.data =`` is ignored from then on."""
        self._storage = self.sharded.untyped_storage()

    @property
    def storage(self) -> int:
        """The address of the storage of ``sharded``, which ``.data =`` would change."""
        address: int = self._storage._cdata
        return address

    def gradient(self, rows: Tensor) -> DTensor:
        """The reduced gradient as the DTensor's, on the sum's memory where that has its type.

        Args:
            rows: this rank's of the sum.
        """
        shown = self.shown
        if self.casts_sums:
            shown = self.shown = _dtensor(rows.to(self.local.dtype), self.spec)
        elif shown is None or shown._local_tensor.data_ptr() != rows.data_ptr():
            shown = self.shown = _dtensor(rows, self.spec)
        return shown

    @property
    def casts_sums(self) -> bool:
        """Whether gradients are summed in another type than the one that scripts see."""
        return self.sum_dtype != self.local.dtype

    def own_sum(self, gradient: Tensor) -> DTensor:
        """This rank's whole gradient, which is not reduced yet, as a part of all ranks' average."""
        partial = self.partial
        if self.casts_sums:
            gradient = gradient.to(self.local.dtype)
        if partial is None or partial._local_tensor is not gradient:
            is_average = self.divide_factor in (0.0, float(self.spec.mesh.size()))
            averages = is_average and not self.is_counted
            kind: Placement = Partial("avg" if averages else "sum")
            mesh = self.spec.mesh
            spec = DTensorSpec(mesh, (kind,) * mesh.ndim, tensor_meta=self.spec.tensor_meta)
            partial = self.partial = _dtensor(gradient, spec)
        return partial


def own_rows(whole: Tensor, world: int, rank: int) -> Tensor:
    """This rank's rows of a tensor, as a view."""
    shape = tuple(whole.shape)
    if is_replicated(shape):
        return whole
    (piece,) = shard_layout([shape], world, rank)
    return whole[piece.begin : piece.end]


def _dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Without autograd, and without a look at other ranks."""
    # DTensor's __init__ tells torch.compile alone of it, and takes as long again.
    made: DTensor = cast(Any, DTensor).__new__(DTensor, local, spec, requires_grad=False)
    return made


def distributed(local: Tensor, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Rows as a DTensor of the whole tensor's shape."""
    last: Placement = Replicate() if whole.dim() == 0 else Shard(0)
    placements = (*(Replicate() for _ in range(mesh.ndim - 1)), last)
    stride = torch.empty(whole.shape, device="meta").stride()
    meta = TensorMeta(whole.shape, stride, local.dtype)
    return _dtensor(local, DTensorSpec(mesh, placements, tensor_meta=meta))


def sharded_parameter(local: Tensor, whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The DTensor parameter on a rank's rows, with the attributes of the whole one."""
    made = nn.Parameter(distributed(local, whole, mesh), requires_grad=whole.requires_grad)
    set_local(made, local)
    made.__dict__.update(whole.__dict__)
    return made


def set_local(sharded: nn.Parameter, local: Tensor) -> None:
    """Gives a DTensor other memory."""
    sharded._local_tensor = local  # type: ignore[attr-defined]
