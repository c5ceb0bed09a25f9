"""Running statistics of batch norm that are updated once a step, from all shards in order.

Each shard is normalised by its own statistics. A rank sees those of its own shards alone, so ranks
exchange them after a step. Then every rank makes the updates of all shards itself, as one process
does that runs the shards one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dreamcomm._torch.batch_norm import (
    STATISTICS,
    BatchStatistics,
    batch_statistics,
    is_batch_norm,
)
from dreamcomm.ranks.agree import gather_numbers

__all__ = ["RunningStatistics"]


class _Layer(NamedTuple):
    """A layer of a step, and its buffers when the step began with their versions."""

    name: str
    module: _BatchNorm
    before: list[tuple[Tensor | None, int]]

    @property
    def channels(self) -> int:
        assert self.module.running_mean is not None
        return self.module.running_mean.numel()


class RunningStatistics:
    """Updates the running statistics of batch norm layers from all shards of a step.

    A call of a layer within :meth:`at` counts, also one that a checkpoint repeats, as in one
    process. Layers keep their running statistics until :meth:`commit`. Those in evaluation mode or
    without running statistics run as they are, and so does ``InstanceNorm``.

    Example::

        with statistics.step():
            for shard in local:
                with statistics.at(shard):
                    loss_of(module, shard).backward()
        statistics.commit(group, local, shards)

    Args:
        module: may get further layers between steps. All ranks have the same.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: dict[_BatchNorm, _Layer] = {}
        self._changed = 0
        self._found: dict[tuple[int, _BatchNorm], list[Tensor]] = {}
        self._shard: int | None = None
        self._in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keeps the layers' buffers as they are within the context, also after an error.

        What runs within it but outside of :meth:`at` is in no shard and counts nowhere.

        Raises:
            RuntimeError: if the context is entered within itself.
        """
        if self._in_step:
            raise RuntimeError("step() cannot be entered within another step()")
        self._discard()
        self._layers = _layers_of(self._module)
        self._in_step = True
        try:
            with batch_statistics(self._layers, self._note):
                yield
            self._changed = _first_changed(list(self._layers.values()))
        except BaseException:
            self._discard()
            raise
        finally:
            self._in_step = False

    @contextmanager
    def at(self, shard: int) -> Iterator[None]:
        """Collects within the context, for the shard of this number."""
        before, self._shard = self._shard, shard
        try:
            yield
        finally:
            self._shard = before

    def commit(self, group: dist.ProcessGroup, local: range, shards: int) -> None:
        """Updates the running statistics with what all ranks have collected. Collective.

        Makes a call for the numbers of calls, and one for the statistics. It makes none if the
        module has no layer with running statistics. One rank alone computes the same.

        Args:
            group: of the ranks, which have equally many shards, rank 0 the first ones.
            local: this rank's shards.
            shards: of all ranks.

        Raises:
            RuntimeError: on all ranks, if a layer changed its own running statistics in the step.
        """
        layers, found, changed = list(self._layers.values()), self._found, self._changed
        self._discard()
        if not layers:
            return
        own = [(shard, one.module) for shard in local for one in layers]
        numbers = [changed, *(len(found.get(key, ())) for key in own)]
        everyone = gather_numbers(group, numbers, torch.device("cpu"))
        _check(everyone, layers)
        counts = [numbers[1:] for numbers in everyone]
        assert sum(map(len, counts)) == shards * len(layers)
        parts = [part for key in own for part in found.get(key, ())]
        batches = _exchange(group, parts, counts, layers)
        for alike in _alike(layers, batches).values():
            _update([layers[one].module for one in alike], [batches[one] for one in alike])

    def _note(self, layer: _BatchNorm, batch: BatchStatistics) -> None:
        if self._shard is not None:
            both = torch.cat((batch.mean, batch.variance))
            self._found.setdefault((self._shard, layer), []).append(both)

    def _discard(self) -> None:
        self._found, self._layers, self._changed = {}, {}, 0


def _layers_of(module: nn.Module) -> dict[_BatchNorm, _Layer]:
    """The layers with running statistics, by themselves."""
    return {
        one: _Layer(name, one, _buffers_of(one))
        for name, one in module.named_modules()
        if is_batch_norm(one)
        and one.track_running_stats
        and one.running_mean is not None
        and one.running_var is not None
    }


def _buffers_of(layer: _BatchNorm) -> list[tuple[Tensor | None, int]]:
    buffers = [layer._buffers.get(name) for name in STATISTICS]
    return [(one, 0 if one is None or one.is_inference() else one._version) for one in buffers]


def _first_changed(layers: Sequence[_Layer]) -> int:
    """The number, from 1 on, of a layer whose own buffers are not as they were; 0 if none."""
    for number, layer in enumerate(layers, 1):
        now = _buffers_of(layer.module)
        for (one, version), (other, before) in zip(now, layer.before, strict=True):
            if one is not other or version != before:
                return number
    return 0


def _check(everyone: Sequence[Sequence[int]], layers: Sequence[_Layer]) -> None:
    for rank, (changed, *_) in enumerate(everyone):
        if changed:
            raise RuntimeError(
                f"batch norm layer {layers[changed - 1].name!r} on rank {rank} changed its running "
                "statistics within a step, so they depend on the shards that the rank runs; "
                "call the layer as a module, do not compile it, and load its state between steps"
            )


def _exchange(
    group: dist.ProcessGroup,
    parts: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    layers: Sequence[_Layer],
) -> list[list[Tensor]]:
    """Gathers the statistics of all calls: for each layer, in the order of shards. Collective.

    Args:
        group: of the ranks.
        parts: this rank's, in the order of its shards, then layers, then calls.
        counts: for each rank, how many calls each shard made of each layer.
        layers: of the step.
    """
    sizes = [2 * layer.channels for layer in layers]
    lengths = [
        [size for number, count in enumerate(own) for size in [sizes[number % len(layers)]] * count]
        for own in counts
    ]
    batches: list[list[Tensor]] = [[] for _ in layers]
    longest = max(map(sum, lengths))
    if longest == 0:
        return batches
    every = _gather(group, parts, longest, _type_of(layers))
    for flat, own, split in zip(every, counts, lengths, strict=True):
        pieces = iter(torch.split(flat[: sum(split)], split))
        for number, count in enumerate(own):
            batches[number % len(layers)] += [next(pieces) for _ in range(count)]
    return batches


def _type_of(layers: Sequence[_Layer]) -> torch.dtype:
    """A type that holds every buffer's numbers exactly."""
    types = [layer.module.running_mean.dtype for layer in layers]  # type: ignore[union-attr]
    *_, widest = accumulate(types, torch.promote_types, initial=torch.float32)
    return widest


def _gather(
    group: dist.ProcessGroup, parts: Sequence[Tensor], numel: int, dtype: torch.dtype
) -> list[Tensor]:
    """A flat tensor of each rank, of equal sizes as gathering wants them. Collective."""
    own = torch.zeros(numel, dtype=dtype, device="cpu")
    if parts:
        joined = torch.cat(list(parts))
        own[: joined.numel()] = joined
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return every


def _alike(
    layers: Sequence[_Layer], batches: Sequence[Sequence[Tensor]]
) -> dict[tuple[object, ...], list[int]]:
    """The numbers of the layers with updates, grouped by all that their factors depend on."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, (layer, found) in enumerate(zip(layers, batches, strict=True)):
        if found:
            one = layer.module
            mean, seen = one.running_mean, one.num_batches_tracked
            assert mean is not None
            key = (mean.dtype, one.momentum, None if seen is None else int(seen), len(found))
            groups.setdefault(key, []).append(number)
    return groups


@torch.no_grad()
def _update(layers: Sequence[_BatchNorm], batches: Sequence[Sequence[Tensor]]) -> None:
    """Makes the updates that the layers make themselves in forward passes, one after the other.

    Products and sums are float64 and separate operations: a fused one would round an element by
    its place in a vector. Each update is rounded to the buffers' type.

    Args:
        layers: alike; their elements are updated together.
        batches: for each layer, mean and variance of each call.
    """
    buffers = [
        buffer
        for one in layers
        for buffer in (one.running_mean, one.running_var)
        if buffer is not None
    ]
    tracked, momentum = layers[0].num_batches_tracked, layers[0].momentum
    running = torch.cat(buffers).double()
    for number, calls in enumerate(zip(*batches, strict=True)):
        factor = momentum
        if factor is None:
            factor = 0.0 if tracked is None else 1.0 / (int(tracked) + number + 1)
        running = torch.cat(calls).double() * factor + running * (1.0 - factor)
        running = running.to(buffers[0].dtype).double()
    for buffer, new in zip(
        buffers, torch.split(running, [one.numel() for one in buffers]), strict=True
    ):
        buffer.copy_(new)
    for layer in layers:
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(len(batches[0]))
