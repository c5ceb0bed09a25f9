"""DataParallel: replicas of a module in threads of one process, or on GPUs by torch's class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dreamcomm._torch.ddp import unseen_by_dynamo
from dreamcomm.one_process.devices import read_devices
from dreamcomm.one_process.graph import ReplicaGraph, connect
from dreamcomm.one_process.modes import check_modes
from dreamcomm.one_process.random_numbers import CallNumbers
from dreamcomm.one_process.replicas import Replicas
from dreamcomm.one_process.scatter import Rows, gather, map_tensors
from dreamcomm.one_process.workers import Workers

__all__ = ["DataParallel"]


@unseen_by_dynamo
def _outside_of_graphs(wrapper: DataParallel, inputs: Any, kwargs: Any) -> Any:
    """Ends torch.compile's graph before the replicas."""
    return wrapper._forward(inputs, kwargs)


class DataParallel(nn.DataParallel[nn.Module]):
    """Runs a module on parts of a batch at once: on replicas in threads, or on several GPUs.

    On CPUs each replica is a module of its own, with Parameters of its own on the same memory. Its
    forward and its backward pass run on its thread, with a share of torch's threads. Gradients are
    added in replica order into the module's own parameters, so results have the same bits in every
    run. Grad mode, autocast and torch's other modes are those of the caller. Random numbers are
    keyed by the call and the replica.

    torch's threads within operators serve many models as well: `dreamcomm doctor` measures both.
    On GPUs this is torch's class. For more than one process take DistributedDataParallel.

    Args:
        module: the module; its parameters stay where they are.
        device_ids: the number of CPU replicas; or a list of cores for each of them, as
            ``[[0, 1], [2, 3]]``; or GPUs as for torch's class, or None for all GPUs there are. None
            without GPUs means 2.
        output_device: where outputs go; None or "cpu" for CPU replicas, else as for torch's class.
        dim: the dimension along which tensors are split and joined.

    Shape:
        Tensors in arguments, of any dtype, are split into parts of as many rows as torch.chunk
        makes, and outputs joined in order; scalar outputs become a vector, one element a replica.
        Fewer rows than replicas leave some without work.

    Raises:
        ValueError: devices or cores are not there; or, by a call, tensors cannot be split alike, or
            replicas return containers of different lengths or keys.
        RuntimeError: by a call: the module holds what cannot stand in two threads, or forward has
            changed a parameter.
        TypeError: by a call: an output is no tensor, None, or container of these.

    An error in a replica is raised in the caller, with the replica in its text. Changes of buffers
    stay if replica 0 makes them; a warning tells once that others are lost. Attributes that forward
    sets on a replica are lost. The form is that of torch.nn.DataParallel (Paszke et al. 2019).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: int | Sequence[Any] | None = 2,
        output_device: Any = None,
        dim: int = 0,
    ) -> None:
        devices = read_devices(device_ids, output_device)
        if not devices.replicas:
            super().__init__(module, devices.gpus, output_device, dim)
        else:
            nn.Module.__init__(self)
            self.module, self.device_ids, self.dim = module, [], dim
            self.output_device = cast(Any, torch.device("cpu"))  # torch's class says int
        self._devices = devices
        self._workers = Workers(devices.replicas, devices.cores)
        self._told = False

    @property
    def replicas(self) -> int:
        """The number of replicas in threads; 0 on GPUs."""
        return self._devices.replicas

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the replicas with parts of the arguments, and joins what they return."""
        if not self._devices.replicas:
            return super().forward(*inputs, **kwargs)
        if self._devices.replicas == 1:
            return self.module(*inputs, **kwargs)
        if torch.compiler.is_compiling():
            return _outside_of_graphs(self, inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(inputs)), **kwargs}
        check_modes(arguments, self.module)
        rows = Rows(arguments, self._devices.replicas, self.dim)
        count = rows.replicas if arguments else 1
        replicas = Replicas(self.module, count)
        calls = [_Call(one.modules[""], ReplicaGraph(one.leaves)) for one in replicas.each]
        numbers = CallNumbers(count)
        outputs = self._workers.run(
            "in its forward pass",
            [
                partial(call.run, *call.take(inputs, kwargs, rows, index))
                for index, call in enumerate(calls)
            ],
            numbers.generators,
        )
        numbers.finish()
        replicas.check_parameters()
        rows.check()
        self._tell(replicas.keep_buffers())
        connected = connect([call.graph for call in calls], self._workers, numbers.generators)
        return gather(
            [
                map_tensors(output, partial(call.replace, iter(call.marks), iter(made)))
                for call, output, made in zip(calls, outputs, connected, strict=True)
            ],
            self.dim,
        )

    def _tell(self, lost: list[str]) -> None:
        """Warns once about buffers."""
        if not lost or self._told:
            return
        self._told = True
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warnings.warn(
            f"DataParallel: each replica has changed buffer {lost[0]!r}{more}, and only the "
            "changes of replica 0 stay, as with torch.nn.DataParallel: running statistics of batch "
            "norm count its rows alone. Ranks with dreamcomm.SyncBatchNorm count all rows.",
            stacklevel=6,
        )


class _Call:
    """A replica's call: its module, and the graph that it makes."""

    def __init__(self, module: nn.Module, graph: ReplicaGraph) -> None:
        self._module, self.graph = module, graph
        self.marks: list[bool] = []  # whether each tensor of the output has a history
        self._grad_enabled = torch.is_grad_enabled()  # forward may leave another mode behind

    def take(self, inputs: Any, kwargs: Any, rows: Rows, index: int) -> tuple[Any, Any]:
        """The arguments with the replica's rows in place of tensors."""

        def own(tensor: Tensor) -> Tensor:
            part = rows.of(tensor, index)
            needs = part.requires_grad and self._grad_enabled
            return self.graph.enter(part) if needs else part

        return map_tensors(inputs, own), map_tensors(kwargs, own)

    def run(self, inputs: Any, kwargs: Any) -> Any:
        """Calls the module; its outputs end the graph."""
        output = self._module(*inputs, **kwargs)
        map_tensors(output, self._note)
        self.graph.end()
        return output

    @staticmethod
    def replace(marks: Iterator[bool], connected: Iterator[Tensor], output: Tensor) -> Tensor:
        """What the caller gets for an output."""
        return next(connected) if next(marks) else output

    def _note(self, output: Tensor) -> None:
        self.marks.append(output.requires_grad and self._grad_enabled)
        if self.marks[-1]:
            self.graph.outputs.append(output)
