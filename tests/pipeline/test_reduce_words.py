"""The words of a pipeline's reduce=, and those of them that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.pipeline import Pipeline, PipelineError
from helpers.pool import Pool
from pipeline.pipe_models import FEATURES, make
from pipeline.token_pipes import batch, close, made, step, summed

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")

CASE = "uneven"


def not_counting(options: dict[str, Any], name: str) -> tuple[str, str]:
    """Of count(), and of a step under a wrapper that counts."""
    way = made("alone", summed, **options)
    with pytest.raises(RuntimeError) as caught:
        way.pipe.count(3)
    under = made(name, summed, **options)
    x, y, weights = batch(CASE, under.share, 0)
    with pytest.raises(PipelineError) as failed:
        under.pipe.step(x, target=(y, weights))
    assert all(one.grad is None for one in under.pipe.parameters())
    return str(caught.value), str(failed.value)


@pytest.mark.parametrize("name", ["ddp-tokens", "zero2-tokens"])
@pytest.mark.parametrize("options", [{"reduce": "mean"}, {"scale_grads": False}])
def test_a_pipeline_without_counts(pool: Pool, options: dict[str, Any], name: str) -> None:
    owner = "the wrapper" if name.startswith("ddp") else "ZeroOptimizer(stage=2)"
    for own, text in pool.run(not_counting, options, name, world=4):
        assert 'it is for reduce="tokens"' in own
        assert (
            f"{owner} of this rank's stages divides gradients by counts, with reduce=\"tok" in text
        )


def of_options(options: dict[str, Any], own: dict[int, dict[str, Any]]) -> str:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"reduce|differ") as caught:
        Pipeline(module, 2, loss_fn=summed, **(options | own.get(dist.get_rank(), {})))
    dist.barrier()  # the group is whole
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "own", "words"),
    [
        ({"reduce": "token"}, {}, 'expected reduce "mean", "sum" or "tokens"'),
        ({"reduce": "tokens", "scale_grads": True}, {}, "is scale_grads='count'"),
        ({"reduce": "tokens", "scale_grads": False}, {}, "is scale_grads='count'"),
        ({"reduce": "mean", "scale_grads": "count"}, {}, "is scale_grads=True"),
        ({"reduce": "sum", "scale_grads": True}, {}, "is scale_grads=False"),
        ({"reduce": "tokens"}, {1: {"reduce": "sum"}}, "ask for different"),
        ({"reduce": "tokens"}, {1: {"reduce": None}}, "ask for different"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(
    pool: Pool, options: dict[str, Any], own: dict[int, dict[str, Any]], words: str
) -> None:
    for text in pool.run(of_options, options, own):
        assert words in text


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"reduce": "mean"}, 0.5),
        ({"reduce": "sum"}, 1.0),
        ({"reduce": "sum", "scale_grads": False}, 1),
    ],
)
def test_other_words(pool: Pool, options: dict[str, Any], factor: float) -> None:
    module = make("mlp", torch.float64)
    x, y, weights = batch(CASE, 0, 0)
    (summed(module(x), (y, weights)) * factor).backward()
    expected = dict(module.named_parameters())
    for found in pool.run(of_words, options):
        for name, gradient in found.items():
            close(gradient, expected[name].grad)


def of_words(options: dict[str, Any]) -> dict[str, Tensor | None]:
    way = made("alone", summed, **options)
    step(way, CASE, 0, False, reduces=True)
    return {name: one.grad for name, one in way.pipe.named_parameters()}
