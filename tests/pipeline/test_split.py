"""A chain of parts computes what the whole module does, bit for bit."""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import Gpt
from dreamcomm.pipeline.split import (
    StagePart,
    make_parts,
    unit_names,
)
from pipeline.split_chain import floating, parameters, run, same
from pipeline.split_models import (
    CONTEXT,
    WIDTH,
    Block,
    Corners,
    HfLike,
    Keyword,
    MaskedGpt,
    NanoGpt,
    Takes,
    Tied,
    Unet,
    numbers,
    tokens,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
EXAMPLE = Path(__file__).parents[2] / "examples/zero.py"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on small tensors wait for each other long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(
    whole: Any, calls: list[Arguments], cuts: list[int], call: Callable[..., Any] | None = None
) -> list[StagePart]:
    """Runs several calls through one splitting, and through a copy of the module."""
    other = copy.deepcopy(whole)
    parts = make_parts(whole, cuts)
    assert len(parts) == len(cuts) + 1
    modules, others = ([one] if isinstance(one, nn.Module) else list(one) for one in (whole, other))
    for args, kwargs in calls:
        for module in (*modules, *others):
            module.zero_grad()
        torch.manual_seed(1)
        expected = call(other, *args, **kwargs) if call else other(*args, **kwargs)
        torch.autograd.backward(ends := floating(expected), [torch.ones_like(o) for o in ends])
        torch.manual_seed(1)
        same(run(parts, args, kwargs), expected)
        uses = Counter(id(one) for part in parts for one in part.tensors.values())
        for a, b in zip(parameters(modules), parameters(others), strict=True):
            if uses[id(a)] > 1 and a.grad is not None:  # its gradients are added in another order
                torch.testing.assert_close(a.grad, b.grad)
            else:
                same(a.grad, b.grad)
    return parts


def all_cuts(units: int) -> list[list[int]]:
    return [list(one) for n in range(units) for one in combinations(range(1, units), n)]


def zero_gpt() -> nn.Module:
    spec = importlib.util.spec_from_file_location("zero_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    module: nn.Module = example.GPT(11, 16)
    return module


MODELS: dict[str, tuple[Callable[[], nn.Module], int, list[Arguments]]] = {
    "nano": (
        NanoGpt,
        4,
        [
            ((tokens(2),), {}),
            ((tokens(3, 5),), {}),
            ((tokens(2, 4),), {"targets": tokens(2, 4, 1)}),
            ((tokens(2, 4), tokens(2, 4, 1)), {}),
            ((), {"idx": tokens(1, 3)}),
        ],
    ),
    "masked": (MaskedGpt, 3, [((tokens(2),), {}), ((tokens(1, 4),), {})]),
    "example": (zero_gpt, 2, [((tokens(2, 64),), {}), ((tokens(3, 64),), {})]),
    "ddp": (Gpt, 2, [((numbers(3, 12),), {}), ((numbers(2, 12),), {})]),
    "tied": (Tied, 3, [((tokens(2),), {}), ((tokens(3, 4),), {})]),
    "unet": (Unet, 4, [((numbers(2, 1, 8, 8),), {}), ((numbers(1, 1, 12, 6),), {})]),
    "hf": (
        HfLike,
        3,
        [
            ((numbers(2, 3),), {}),
            ((numbers(4, 3), numbers(4)), {}),
            ((numbers(4, 3),), {"mask": numbers(4), "scale": 0.5}),
            ((numbers(4, 3),), {"mask": None, "flip": True}),
        ],
    ),
    "keyword": (Keyword, 3, [((numbers(2, 8),), {"mask": numbers(2, 1)})]),
    "corners": (Corners, 3, [((numbers(4, 8),), {}), ((numbers(2, 8),), {})]),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_model_compute_what_it_does(name: str) -> None:
    make, units, calls = MODELS[name]
    torch.manual_seed(0)
    model = make()
    assert len(unit_names(model)) == units
    for cuts in all_cuts(units):
        parts = compare(model, calls, cuts)
        used = {id(p) for part in parts for one in part.units.values() for p in one.parameters()}
        used |= {id(one) for part in parts for one in part.tensors.values()}
        assert used == {id(one) for one in (*model.parameters(), *model.buffers())}
    model.eval()
    compare(model, calls, [1])


def test_parts_follow_a_change_of_mode() -> None:
    model = Corners()
    parts = make_parts(model, [1])
    for mode in (True, False, True):
        model.train(mode)
        torch.manual_seed(0)
        out = run(parts, (numbers(4, 8),), {})
        torch.manual_seed(0)
        same(out.logits, model(numbers(4, 8)).logits)


def test_parts_of_a_sequential_compute_what_it_does() -> None:
    twice = Block()
    model = nn.Sequential(nn.Linear(3, WIDTH), twice, nn.Tanh(), twice, nn.BatchNorm1d(WIDTH))
    for cuts in all_cuts(5):
        parts = compare(model, [((numbers(4, 3),), {}), ((numbers(2, 3),), {})], cuts)
        assert [name for part in parts for name in part.units] == ["0", "1", "2", "3", "4"]
        assert not any(part.takes("mask") or part.tensors for part in parts)
    with pytest.raises(TypeError, match="takes 1 positional argument, got 2"):
        make_parts(model)[0].run((1, 2), {})
    with pytest.raises(TypeError, match=r"takes no keyword arguments, got \['a'\]"):
        make_parts(model)[1].run(numbers(1, 3), {"a": 1})


def test_a_list_of_stages_spreads_tuples_and_takes_keywords() -> None:
    stages = [Takes(), Takes(), Takes()]

    def chain(stages: list[Takes], x: Tensor, y: Tensor, **kwargs: Any) -> Any:
        values = (x, y)
        for stage in stages:
            values = stage(*values, **kwargs)
        return values

    for cuts in all_cuts(3):
        pair = (numbers(2, 8), numbers(2, 8, seed=1))
        parts = compare(stages, [(pair, {}), (pair, {"shift": numbers(8)})], cuts, chain)
        assert all(part.takes("shift") and not part.takes("other") for part in parts)
    assert [list(part.units) for part in make_parts(stages)] == [["0"], ["1"], ["2"]]
    assert list(make_parts(nn.ModuleList(stages), [2])[0].units) == ["0", "1"]


def test_values_are_passed_over_stages_in_between() -> None:
    parts = make_parts(Unet(), [1, 2, 3])
    image = numbers(2, 1, 8, 8)
    values: Any = (image,)
    sent = []
    for part in parts[:-1]:
        values = part.run(values, {})
        assert any(one is image for one in values)  # which only the last stage uses
        sent.append(len(values))
    assert sent == [3, 3, 2]  # the image, the first skip where a later stage uses it, and a value


def test_a_mask_is_made_anew_in_each_stage() -> None:
    first, second, _ = make_parts(MaskedGpt(), [1, 2])
    values = first.run((tokens(2, 5),), {})
    assert [type(one) for one in values] in ([Tensor, int], [int, Tensor])
    assert 5 in values
    assert len(second.run(values, {})) == 2


def test_a_tied_parameter_is_in_two_stages_under_one_name() -> None:
    model = Tied()
    parts = make_parts(model, [1, 2])
    assert list(parts[0].units) == ["embedding", "blocks.0"]
    assert set(parts[0].tensors) == {"position"}
    assert parts[1].tensors == {}
    assert set(parts[2].tensors) == {"scale", "embedding.weight"}
    assert parts[2].tensors["embedding.weight"] is model.embedding.weight


def test_each_stage_takes_the_keyword_arguments_that_it_uses() -> None:
    parts = make_parts(NanoGpt(), [2])
    assert [part.takes("targets") for part in parts] == [True, True]
    assert [part.takes("idx") for part in parts] == [True, False]
    assert not parts[0].takes("other")
    values = parts[0].run((tokens(1),), {"targets": tokens(1)})
    with pytest.raises(ValueError, match="stage 1 uses the keyword argument 'targets', which only"):
        parts[1].run(values, {})


def test_an_assert_of_forward_is_kept() -> None:
    parts = make_parts(NanoGpt(), [1])
    with pytest.raises(AssertionError, match=r"t <= self\.block_size"):
        parts[0].run((tokens(1, CONTEXT + 1),), {})
