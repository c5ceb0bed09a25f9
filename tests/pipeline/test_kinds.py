"""Kinds of values between stages: classes that look at their tensors, and what cannot travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from dreamcomm.messages.codec import Codec, assembled, described
from dreamcomm.pipeline import Pipeline, PipelineError
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm's messages")


@dataclass
class Hidden:
    """A dataclass that pytree knows, and that looks at what it is made of."""

    states: Tensor

    def __post_init__(self) -> None:
        assert self.states.dim() == 2


class Pair(NamedTuple):
    states: Tensor
    number: int


class CheckedPair(Pair):
    def __new__(cls, states: Tensor, number: int) -> CheckedPair:
        assert states.dim() == 2
        return super().__new__(cls, states, number)


class Noted:
    """A registered class whose context is an object that each value has of its own."""

    def __init__(self, states: Tensor, notes: dict[str, int]) -> None:
        assert states.dim() == 2
        self.states, self.notes = states, notes


pytree.register_dataclass(Hidden)
pytree.register_pytree_node(
    Noted, lambda one: ([one.states], one.notes), lambda states, notes: Noted(*states, notes)
)

KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Hidden, lambda one: one.states),
    "named tuple": (
        lambda x: [CheckedPair(x, 3)],
        lambda one: one[0].states * (one[0].number == 3),
    ),
    "packed": (
        lambda x: {"packed": pack_sequence([*x])},
        lambda one: pad_packed_sequence(one["packed"], batch_first=True)[0],
    ),
    "node": (lambda x: Noted(x, {}), lambda one: one.states + len(one.notes)),
}


class Gives(nn.Linear):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


class Takes(nn.Linear):
    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__(4, 4)
        self.take = take

    def forward(self, value: Any) -> Tensor:
        states = self.take(value)
        if isinstance(value, Noted):
            value.notes["seen"] = 1  # the next micro-batch's notes are its own
        return super().forward(states)


def chain(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Gives(KINDS[kind][0]), Takes(KINDS[kind][1])]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def classes() -> dict[str, list[Tensor]]:
    found = {}
    for kind in KINDS:
        pipe = Pipeline(chain(kind), 3, loss_fn=F.mse_loss)
        pipe.step(X, target=X)
        found[kind] = [one.grad for one in pipe.parameters() if one.grad is not None]
    return found


def test_classes_that_look_at_their_tensors(pool: Pool) -> None:
    ranks = pool.run(classes)
    for kind in KINDS:
        first, second = chain(kind)
        for part in X.chunk(3):
            (F.mse_loss(second(first(part)), part) / 3).backward()
        for module, found in zip((first, second), ranks, strict=True):
            for parameter, gradient in zip(module.parameters(), found[kind], strict=True):
                torch.testing.assert_close(gradient, parameter.grad)


def test_a_message_makes_classes_once_of_its_tensors() -> None:
    codec, made = Codec(), []
    value = ({"hidden": Hidden(torch.ones(2, 3))}, pack_sequence([torch.ones(2)]), None, "word")
    for _ in range(2):
        data, tensors, simple = codec.encode(value)
        what = codec.decode(data, simple)
        assert [one.shape for one in what.metas] == [(2, 3), (2,), (2,)]
        made.append(assembled(what, [one.clone() for one in tensors]))
    one, other = made
    assert isinstance(one[1], PackedSequence)
    assert torch.equal(one[0]["hidden"].states, value[0]["hidden"].states)
    assert one[2:] == (None, "word")
    assert one[0]["hidden"] is not other[0]["hidden"]


# What cannot be sent, or made where it arrives.


class Sub(Tensor):
    """A tensor of a class of the user's."""


def fail(*_: Any) -> Any:
    raise ValueError("cannot be made here")


class NotUnpickled:
    def __reduce__(self) -> Any:
        return fail, ()


class NotPickled:
    def __reduce__(self) -> Any:
        fail()


class NoText:
    __repr__ = fail


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], int, str]] = {  # the rank, and its error
    "nested": (
        lambda x: {"n": torch.nested.nested_tensor([*x], layout=torch.jagged)},
        0,
        "value['n']: a nested tensor",
    ),
    "strided": (lambda x: torch.nested.nested_tensor([*x]), 0, "a nested tensor"),
    "subclass": (lambda x: (x, x.as_subclass(Sub)), 0, "value[1]: a Sub "),
    "quantized": (lambda x: [quantized(x)], 0, "value[0]: a quantized tensor of torch.qint8"),
    "sparse": (lambda x: [x.to_sparse()], 0, "value[0]: a tensor of layout torch.sparse_coo"),
    "meta": (lambda x: [x.to("meta")], 0, "value[0]: a tensor on the meta device"),
    "not pickled": (lambda x: (x, NotPickled()), 0, "a value cannot be sent: cannot be made here"),
    "not unpickled": (
        lambda x: (x, NotUnpickled()),
        1,
        "a value that was sent cannot be unpickled: ValueError: cannot be made here",
    ),
    "key": (
        lambda x: {"x": x, NotUnpickled(): 1},
        1,
        "a value that was sent cannot be unpickled: ValueError: cannot be made here",
    ),
    "no text": (lambda x: (x, NoText()), 1, "(stage 0 gave (float32 [2, 4], a NoText))"),
}


def refused() -> dict[str, tuple[str, int, Any]]:
    found = {}
    for kind, (make, _, _) in REFUSED.items():
        gives = Gives(make)
        pipe = Pipeline([gives, nn.Linear(4, 4)], 3, loss_fn=F.mse_loss)
        with pytest.raises(PipelineError) as caught:
            pipe.step(X, target=X)
        gives.make = lambda x: x
        pipe.step(X, target=X)  # messages that were not taken are out of the way
        found[kind] = str(caught.value), caught.value.rank, caught.value.stage
    return found


def test_what_cannot_travel_is_an_error_of_all_ranks(pool: Pool) -> None:
    first, second = pool.run(refused)
    assert first == second
    for kind, (_, rank, text) in REFUSED.items():
        assert first[kind][1:] == (rank, rank), first[kind]
        assert text in first[kind][0]


def test_words_for_any_value() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    words = described((nested, NoText(), {NoText(): 1}))
    assert words == "(float32 (nested), a NoText, {a NoText: 1})"
