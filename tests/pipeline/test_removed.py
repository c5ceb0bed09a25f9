"""Each message and each reduction is needed: without it a step fails, or gradients are wrong."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm.buckets.engine import BucketEngine
from dreamcomm.pipeline import Pipeline
from dreamcomm.pipeline.messages.agreement import Verdict
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.pipeline.tied import TiedWeights
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make, next_token

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")


def without(slot: Slot, number: int) -> Any:
    """Loses the message of this kind that is sent as so manyth."""
    send, seen = Channel.send, [0]

    def lossy(channel: Channel, peer: int, key: Key, value: Any, **more: Any) -> None:
        if key.slot is slot:
            seen[0] += 1
            if seen[0] == number:
                return
        send(channel, peer, key, value, **more)

    return mock.patch.object(Channel, "send", lossy)


def step_without(slot: str, number: int, schedule: str) -> str:
    pipe = Pipeline(make("gpt"), 2, schedule=schedule, loss_fn=next_token)
    x, y = MODELS["gpt"][2](0, 4, torch.float32)
    pipe.step(x, target=y)
    if slot == "ERROR":
        module = next(iter(pipe.module.children()))
        module.register_forward_hook(_raise)
    begin = time.monotonic()
    with without(Slot[slot], number):
        try:
            pipe.step(x, target=y)
        except RuntimeError as error:
            return f"{time.monotonic() - begin > 1.0} {error}"
    return ""


def _raise(*_: Any) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("asked to fail")


@pytest.mark.parametrize("schedule", ["1f1b"])
@pytest.mark.parametrize(
    ("slot", "number"),
    [("FORWARD", 1), ("BACKWARD", 2), ("DONE", 1), ("VERDICT", 1), ("TIED", 1)],
)
def test_a_lost_message_is_missed(pool: Pool, slot: str, number: int, schedule: str) -> None:
    texts = pool.run(step_without, slot, number, schedule, group_timeout=2.0)
    assert any("has waited 2." in text for text in texts), texts
    assert all(text.startswith("True") or not text for text in texts), texts


def gradients_without(what: str) -> tuple[dict[str, Tensor], float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    counted = what == "count"
    loss = (lambda out, y: (next_token(out, y) * 3, torch.tensor(3))) if counted else next_token
    module = make("gpt")
    if what == "weights" and mesh.get_local_rank("pipe") == 1:
        with torch.no_grad():
            module.embedding.weight.mul_(2.0)  # type: ignore[operator, union-attr]
    removed = {
        "nothing": mock.patch.object(Channel, "unused", None, create=True),
        "tied": mock.patch.object(TiedWeights, "add_gradients", return_value=None),
        "weights": mock.patch.object(TiedWeights, "copy_weights", return_value=None),
        "reduction": mock.patch.object(BucketEngine, "reduce_gradients", return_value=None),
        "count": mock.patch.object(Verdict, "__setstate__", _half, create=True),
        "norm": mock.patch("dreamcomm.pipeline.clip.gathered", _own),
    }[what]
    with removed:
        pipe = Pipeline(
            module, 2, loss_fn=loss, mesh=mesh, scale_grads="count" if counted else True
        )
        keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=group)
        x, y = (one.chunk(2)[share] for one in MODELS["gpt"][2](0, 8, torch.float32))
        pipe.step(x, target=y)
        norm = float(pipe.clip_grad_norm_(float("inf")))
    del keep
    return {n: one.grad.clone() for n, one in pipe.named_parameters()}, norm  # type: ignore[union-attr]


def _half(self: Verdict, state: dict[str, Any]) -> None:
    """A verdict as it would be if one pipeline's count were missing."""
    self.__dict__.update(state)
    if self.count is not None:
        self.count /= 2


def _own(mine: Tensor, lengths: list[int], group: Any) -> list[Tensor]:
    return [mine for _ in lengths]


@pytest.mark.parametrize("what", ["nothing", "tied", "weights", "reduction", "count", "norm"])
def test_a_removed_reduction_makes_a_difference(pool: Pool, what: str) -> None:
    reference = OneProcess("gpt")
    reference.gradients(0, 4, 2, shares=2)
    expected = {n: one.grad for n, one in reference.module.named_parameters()}
    norm = float(torch.nn.utils.get_total_norm([g for g in expected.values() if g is not None]))
    equal = []
    for gradients, found in pool.run(gradients_without, what, world=4):
        equal += [torch.allclose(gradients[n], expected[n], 1e-4, 1e-7) for n in gradients]
        equal.append(found == pytest.approx(norm, rel=1e-5))
    assert all(equal) == (what == "nothing")
