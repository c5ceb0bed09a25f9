"""Predictions of the cost model for collectives, and for training steps made of them.

Collectives are predicted by the model by which groups choose their algorithms
(csrc/internode/cost/model.cc). For large messages it is the latency-bandwidth model of Hockney
(1994), with stages that overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.tools.simulate.cluster import Cluster

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier",
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """One collective: how it would be carried out, and its time in seconds."""

    way: str
    seconds: float


def ways(op: str, nbytes: int, cluster: Cluster) -> list[Forecast]:
    """All ways to carry out a call on the cluster, the selected one first.

    Args:
        nbytes: bytes of one rank's block; a barrier has 0.

    Raises:
        ValueError: the operation is no collective; the model does not predict messages.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is no collective: choose from {', '.join(COLLECTIVES)}")
    from dreamcomm._C import predict_between

    found = predict_between(
        op, nbytes, list(cluster.ranks_on), cluster.here, cluster.wire.numbers()
    )
    return [Forecast(_words(leaders, chunk), seconds) for leaders, chunk, seconds in found]


def collective(op: str, nbytes: int, cluster: Cluster) -> Forecast:
    """The selected way. Raises ValueError as :func:`ways`."""
    return ways(op, nbytes, cluster)[0]


def _words(leaders: bool, chunk: int) -> str:
    if leaders:
        return "leaders"
    return f"carriers, {chunk >> 10} KiB at a time" if chunk else "shared memory"


def ring_all_reduce(nbytes: int, cluster: Cluster) -> float:
    """Seconds of one flat ring over all ranks, as in libraries that do not distinguish hosts.

    2 (N - 1) steps, each of a message of ``nbytes / N`` (Patarasuk and Yuan, 2009): at large sizes
    independent of N, at small ones growing with it.
    """
    from dreamcomm._C import predict_flat_ring

    return predict_flat_ring(nbytes, list(cluster.ranks_on), cluster.here, cluster.wire.numbers())


@dataclass(frozen=True)
class Training:
    """A data parallel step as torch's DDP makes it (Li et al., 2020).

    gradients: bytes of all gradients. bucket: bytes that are reduced together.
    forward, backward: seconds of a rank's own work; gradients are ready evenly over the backward
        pass.
    """

    gradients: int
    bucket: int = 25 << 20
    forward: float = 0.01
    backward: float = 0.02


@dataclass(frozen=True)
class Step:
    """seconds: time of the step. efficiency: share of a rank's own work in it, from 0 to 1."""

    seconds: float
    efficiency: float


def ddp_step(training: Training, cluster: Cluster) -> Step:
    """Buckets are reduced in turn, each as soon as its gradients are ready."""
    own = training.forward + training.backward
    if cluster.size == 1:
        return Step(own, 1.0)
    full, rest = divmod(training.gradients, training.bucket)
    end = training.forward
    if full:
        apart = training.backward * training.bucket / training.gradients
        each = collective("all_reduce", training.bucket, cluster).seconds
        # Equal buckets: either each waits for the previous one, or each for its own gradients.
        end += max(apart + full * each, full * apart + each)
    if rest:
        end = max(end, own) + collective("all_reduce", rest, cluster).seconds
    return Step(max(end, own), own / max(end, own))
