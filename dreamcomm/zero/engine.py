"""The bucket engine of a sharded optimizer: its own, or that of a DistributedDataParallel."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dreamcomm._torch.groups import ours
from dreamcomm.buckets.averages import AVERAGE, Averages
from dreamcomm.buckets.engine import BucketEngine, Caps
from dreamcomm.buckets.found import engines_of
from dreamcomm.ranks.parameters import TrainedParameter
from dreamcomm.zero.sharded_gradient import ShardedGradient
from dreamcomm.zero.shards import ParameterShard

__all__ = [
    "BUCKET_BYTES",
    "WHAT",
    "engine_of",
    "found_engine",
    "shard_engine",
]

MIB = 1 << 20
# Buckets are small: at stage 2 gradients of two are there at a time. A call costs some 20 us.
BUCKET_BYTES = 4 * MIB
WHAT = "ZeroOptimizer"


def found_engine(parameters: Sequence[torch.nn.Parameter]) -> BucketEngine | None:
    """The engine of the DistributedDataParallel that holds all of the parameters, or None.

    Raises:
        ValueError: one holds a part of them, or others beside them.
    """
    trained = [one for one in parameters if one.requires_grad]
    engines, alone = engines_of(trained)
    if not engines:
        return None
    (engine, *others) = engines
    theirs = {id(one.parameter) for one in engine.trained}
    if others or alone or not theirs <= {id(one) for one in parameters}:
        raise ValueError(
            f"{WHAT}: got {len(trained)} parameters that require a gradient, and a "
            f"DistributedDataParallel reduces {len(theirs)}, not all of them the same: give all "
            "parameters of the wrapped module, and no others"
        )
    if engine.sharded_by:
        gc.collect()  # another one may be garbage that still lives, as one with a scheduler
    if engine.sharded_by:
        raise ValueError(
            f"{WHAT}: another {engine.sharded_by} has these parameters already: delete it first"
        )
    return engine


def engine_of(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    group: dist.ProcessGroup,
    averages: Averages | None,
) -> BucketEngine:
    """An engine of these parameters alone; None: gradients are reduced elsewhere."""
    trained = [TrainedParameter(name, parameter) for name, parameter in named]
    try:
        return BucketEngine(
            trained,
            group,
            Caps(BUCKET_BYTES, MIB),
            averages=averages or AVERAGE,
            hooked=averages is not None,
            holds_frozen=True,
        )
    except ValueError as error:
        if "already reduced by another wrapper" not in str(error):
            raise
        raise ValueError(
            f"{WHAT}: {error}; under torch's DistributedDataParallel pass reduce=False, as it "
            "averages gradients itself"
        ) from None


def shard_engine(
    engine: BucketEngine, shards: dict[int, ParameterShard], *, stage: int, in_heaps: bool
) -> list[ParameterShard]:
    """Has the engine keep this rank's rows of the gradients alone.

    Args:
        shards: by the ids of parameters.
        stage: 1: backward passes leave gradients as they are; 2: they reduce and free them.
        in_heaps: parameters lie in memory that the ranks share.

    Returns:
        The shards in the order of the engine's parameters.
    """
    ordered = [shards[id(one.parameter)] for one in engine.trained]
    stand_ins = [
        ShardedGradient(one.parameter, one.name, engine, number) if stage == 2 else None
        for number, one in enumerate(ordered)
    ]
    backend = ours(engine.group, ordered[0].parameter.device) if in_heaps else None
    engine.shard(stage, [one.sum_dtype for one in ordered], stand_ins, backend)
    return ordered
