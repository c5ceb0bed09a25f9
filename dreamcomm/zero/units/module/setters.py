"""What torch's FSDPModule methods do in the own forms, for the documentation and a test of it.

No streams run beside each other, the library fetches and frees by itself, and large gradients are
reduced out of the memory where autograd makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["METHODS", "Effect", "Method", "markdown", "names"]


class Effect(Enum):
    """What a call does in the own form."""

    OWN = "takes effect"
    NONE = "does nothing"


@dataclass(frozen=True)
class Method:
    """A public method of torch's FSDPModule.

    Attributes:
        name: torch's.
        effect: in the own form.
        why: one line.
    """

    name: str
    effect: Effect
    why: str


METHODS = (
    Method("unshard", Effect.OWN, "ranks begin to read, and whole parameters are registered"),
    Method("reshard", Effect.OWN, "DTensors are registered, and at the root ranks end reading"),
    Method("reset_iter_state", Effect.OWN, "a pass that an error has ended is forgotten"),
    Method("set_is_last_backward", Effect.OWN, "ranks read until the last one has ended"),
    Method("set_requires_gradient_sync", Effect.OWN, "gradients stay each rank's; as `no_sync()`"),
    Method("set_reshard_after_forward", Effect.OWN, "what is registered between the passes"),
    Method("set_reshard_after_backward", Effect.OWN, "what is registered between steps"),
    Method("set_gradient_divide_factor", Effect.OWN, "what sums of gradients are divided by"),
    Method("set_reduce_scatter_divide_factor", Effect.OWN, "torch's old name of the same"),
    Method(
        "set_modules_to_forward_prefetch",
        Effect.NONE,
        "parameters are in place, or the next unit is gathered in the order of the first step",
    ),
    Method("set_modules_to_backward_prefetch", Effect.NONE, "nor ahead of a backward pass"),
    Method("set_custom_all_gather", Effect.NONE, "the group gathers parameters itself, if at all"),
    Method(
        "set_custom_reduce_scatter", Effect.NONE, "gradients are reduced without copies in or out"
    ),
    Method("set_all_reduce_hook", Effect.OWN, "runs on a unit's rows after they are reduced"),
    Method("set_post_optim_event", Effect.NONE, "CPUs have no streams to wait with"),
    Method(
        "set_force_sum_reduction_for_comms",
        Effect.NONE,
        "ranks are summed and divided in one pass either way",
    ),
    Method("set_requires_all_reduce", Effect.OWN, "sums wait for the other replicas', if not"),
    Method(
        "set_reduce_scatter_unused_params",
        Effect.NONE,
        "always on: a gradient that some rank does not have counts as zeros there",
    ),
    Method("set_reduce_scatter_max_input_buffers", Effect.NONE, "reductions have no input buffers"),
    Method(
        "set_separate_reduce_scatter_group",
        Effect.NONE,
        "always on: units are gathered in another group than gradients are reduced in",
    ),
    Method("set_unshard_in_backward", Effect.NONE, "a backward pass gathers those it goes through"),
    Method(
        "set_allocate_memory_from_process_group_for_comm",
        Effect.NONE,
        "parameters and gradients lie in the group's memory already",
    ),
    Method("set_symm_mem_for_comm", Effect.NONE, "it is NCCL's memory, for GPUs"),
)


def names(effect: Effect) -> list[str]:
    """The methods with an effect, in the table's order."""
    return [one.name for one in METHODS if one.effect is effect]


def markdown() -> str:
    """The table of ``docs/fully_shard.md``: one row a method, without a line break at the end."""
    rows = [f"| `{one.name}` | {one.effect.value} | {one.why} |" for one in METHODS]
    return "\n".join(["| method | in the own form | why |", "|---|---|---|", *rows])
