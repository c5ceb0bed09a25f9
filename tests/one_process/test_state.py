"""What threads take over from the caller: modes, dtypes, threads, cores, random numbers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import dreamcomm
from dreamcomm.one_process import random_numbers
from one_process.models import batch, gradients, loss_of, make, one_thread


class Calls(nn.Module):
    """Calls a function with a parameter."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_grad_modes() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x @ weight

    module = Calls(look)
    wrapped = dreamcomm.DataParallel(module, 2)
    x = torch.ones(4, 4, requires_grad=True)
    for mode, expected in (
        (torch.enable_grad(), (True, False)),
        (torch.no_grad(), (False, False)),
        (torch.inference_mode(), (False, True)),
    ):
        seen.clear()
        with mode:
            out = wrapped(x)
            torch.testing.assert_close(out, module(x))
        assert seen[:2] == [expected] * 2
        assert out.requires_grad == expected[0]


def test_a_module_with_buffers_in_inference_mode() -> None:
    module = make("cnn")
    with torch.inference_mode():
        dreamcomm.DataParallel(module, 2)(batch("cnn"))
    dreamcomm.DataParallel(module.eval(), 2)(batch("cnn"))


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    found = []
    with one_thread():
        for call in (module, wrapped, wrapped):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                out = call(batch("mlp"))
            assert out.dtype == torch.bfloat16
            loss_of(out.float()).backward()
            found.append([out, *gradients(module)])
    for mine, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-3)
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))  # type: ignore[arg-type]
    with torch.no_grad(), torch.autocast("cpu"):
        first = wrapped(batch("mlp"))
        module[0].weight.mul_(2)
        assert not torch.equal(wrapped(batch("mlp")), first), "no cast of an earlier call is left"


def test_the_default_dtype(default_dtype: None) -> None:
    torch.set_default_dtype(torch.float64)
    out = dreamcomm.DataParallel(Calls(lambda x, weight: torch.ones(len(x))), 2)(torch.ones(4, 4))
    assert out.dtype == torch.float64


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anomaly_mode() -> None:
    module = Calls(lambda x, weight: (x * weight[0] * 0).sqrt())
    wrapped = dreamcomm.DataParallel(module, 2)
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.raises(RuntimeError, match=r"replica 0 of 2(.|\n)*Backward0.* returned nan"),
    ):
        wrapped(torch.ones(4, 4)).sum().backward()


def test_saved_tensor_hooks() -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    loss_of(wrapped(batch("mlp"))).backward()
    expected = gradients(module)
    module.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = loss_of(wrapped(batch("mlp")))
    loss.backward()
    assert len(packed) > 10
    for mine, other in zip(gradients(module), expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_modes_of_python() -> None:
    names: set[str] = set()

    class Names(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    wrapped = dreamcomm.DataParallel(Calls(lambda x, weight: (x @ weight).erf()), 2)
    with Names():
        wrapped(torch.ones(4, 4))
    assert "erf" in names
    with FlopCounterMode(display=False) as flops:
        wrapped(torch.ones(4, 4))
    assert flops.get_total_flops() == 2 * 4 * 4 * 4


def test_the_profiler_sees_operators_of_replicas() -> None:
    wrapped = dreamcomm.DataParallel(Calls(lambda x, weight: (x @ weight).erf()), 2)
    with torch.profiler.profile() as profile:
        wrapped(torch.ones(4, 4))
    (row,) = [one for one in profile.key_averages() if one.key == "aten::erf"]
    assert row.count == 2


def counts(replicas: Any) -> list[int]:
    """The threads of operators, and the cores, that each replica has."""
    found: dict[str, tuple[int, set[int]]] = {}

    def look(x: Tensor, weight: Tensor) -> Tensor:
        name = threading.current_thread().name
        found[name] = torch.get_num_threads(), os.sched_getaffinity(0)
        return x

    wrapped = dreamcomm.DataParallel(Calls(look), replicas)
    wrapped(torch.ones(12, 4))
    if not isinstance(replicas, int):
        assert [found[name][1] for name in sorted(found)] == [set(one) for one in replicas]
    return [found[name][0] for name in sorted(found)]


def test_replicas_share_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        assert counts(2) == [3, 3]
        assert counts(3) == [2, 2, 2]
        assert counts(12) == [1] * 12
        assert torch.get_num_threads() == 6
        thread_counts: list[int] = []
        one = threading.Thread(target=lambda: thread_counts.append(torch.get_num_threads()))
        one.start()
        one.join()
        assert thread_counts == [6], "other threads have what they had"
        torch.set_num_threads(4)
        assert counts(2) == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core here")
    mine = os.sched_getaffinity(0)
    assert counts([[cores[0]], (cores[1],)]) == [1, 1]
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "device_ids=0: a number of CPU replicas is 1 or more"),
        (True, "device_ids=True: give a number"),
        ([], r"device_ids=\[\]: give a number"),
        ("cpu", "device_ids='cpu': give a number"),
        ([0, 1], r"device_ids=\[0, 1\] names GPUs, and torch finds none here"),
        (["cuda:0", "cuda:1"], "names GPUs, and torch finds none here"),
        ([[0], []], "each replica needs cores of its own"),
        ([[0], [0]], "each replica needs cores of its own"),
        ([[0], [4000]], r"out of those that this process may use: \[0"),
    ],
)
def test_devices_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dreamcomm.DataParallel(nn.Linear(2, 2), given)


def test_devices_that_are_taken() -> None:
    for given, count in ((None, 2), (3, 3), (["cpu", torch.device("cpu")], 2)):
        assert dreamcomm.DataParallel(nn.Linear(2, 2), given).replicas == count
    assert dreamcomm.DataParallel(nn.Linear(2, 2), output_device="cpu").replicas == 2
    with pytest.raises(ValueError, match="output_device=1: outputs of CPU replicas"):
        dreamcomm.DataParallel(nn.Linear(2, 2), output_device=1)


def test_an_error_names_the_replica_after_all_have_ended() -> None:
    ended: list[int] = []

    def function(x: Tensor, weight: Tensor) -> Tensor:
        if x[0, 0] == 1:
            raise KeyError("wonderful")
        ended.append(int(x[0, 0]))
        return x

    wrapped = dreamcomm.DataParallel(Calls(function), 3)
    x = torch.arange(3.0)[:, None].expand(3, 4)
    with pytest.raises(
        KeyError, match=r"KeyError in replica 1 of 3 of DataParallel.*(.|\n)*wonderful"
    ):
        wrapped(x)
    assert sorted(ended) == [0, 2]
    assert torch.equal(wrapped(torch.zeros(6, 4)), torch.zeros(6, 4))


class Draws(nn.Module):
    """Draws numbers in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, 2, dropout=0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Any:
        ways = [
            F.dropout(x, 0.5),
            torch.rand(len(x), 4),
            torch.randn_like(x),
            torch.randint(9, (len(x), 4)).float(),
            torch.randperm(64)[:4].expand(len(x), 4),
            torch.multinomial(x.abs() + 1, 4, replacement=True),
            torch.bernoulli(torch.full_like(x, 0.5)),
            torch.poisson(torch.full_like(x, 4.0)),
            torch.distributions.Gamma(1.0, 1.0).sample((len(x), 4)),
            F.rrelu(x - 2, training=True),
            F.gumbel_softmax(x),
            nn.init.normal_(torch.empty(len(x), 4)),
            self.rnn(x)[0],
            self.attention(x, x, x)[0],
            F.alpha_dropout(x, 0.5, training=True),
            torch.empty(len(x), 4).cauchy_(),
        ]
        return [one.detach() for one in ways]


def test_random_numbers_are_keyed_by_call_and_replica() -> None:
    torch.manual_seed(1)
    wrapped = dreamcomm.DataParallel(Draws(), 3)
    x = torch.ones(6, 4)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        return [*wrapped(x), *wrapped(x), torch.rand(2)]

    with one_thread():
        expected = run()
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    ways = (len(expected) - 1) // 2
    for way, (first, second) in enumerate(zip(expected[:ways], expected[ways:], strict=False)):
        assert not torch.equal(first, second), f"{way}: another call has others"
        parts = first.chunk(3)
        assert not torch.equal(parts[0], parts[1]), f"{way}: another replica has others"


def test_without_draws_the_callers_numbers_do_not_move() -> None:
    module = make("mlp")
    state = torch.get_rng_state()
    loss_of(dreamcomm.DataParallel(module, 2)(batch("mlp"))).backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_restored_state_gives_the_same_numbers() -> None:
    wrapped = dreamcomm.DataParallel(Calls(lambda x, weight: torch.rand(len(x), 4)), 2)
    wrapped(torch.ones(4, 4))
    state = torch.get_rng_state()
    first = wrapped(torch.ones(4, 4))
    torch.set_rng_state(state)
    assert torch.equal(wrapped(torch.ones(4, 4)), first)


def test_generators_that_a_module_brings_are_used() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        mine = torch.Generator().manual_seed(3)
        return torch.rand(len(x), 4, generator=mine)

    out = dreamcomm.DataParallel(Calls(function), 2)(torch.ones(4, 4))
    assert torch.equal(out[:2], out[2:])


def test_manual_seed_in_a_replica_is_its_own() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(5)
        with torch.random.fork_rng():
            torch.rand(100)
        assert torch.initial_seed() == 5
        return torch.rand(len(x), 4)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    out = dreamcomm.DataParallel(Calls(function), 2)(torch.ones(4, 4))
    torch.manual_seed(1)
    assert torch.equal(out[:2], out[2:])
    assert torch.initial_seed() == 1
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(out[:2], torch.rand(2, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_other_threads_draw_from_torchs_generator() -> None:
    """Also while replicas run."""
    started, done = threading.Barrier(3), threading.Event()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        started.wait(60)
        assert done.wait(60)
        return torch.rand(len(x), 4)

    def other() -> None:
        started.wait(60)
        torch.manual_seed(9)
        found.append(torch.rand(3))
        done.set()

    found: list[Tensor] = []
    thread = threading.Thread(target=other)
    thread.start()
    dreamcomm.DataParallel(Calls(function), 2)(torch.ones(4, 4))
    thread.join()
    torch.manual_seed(9)
    assert torch.equal(found[0], torch.rand(3))


def test_numbers_that_other_threads_draw_meanwhile_are_not_drawn_again() -> None:
    drawn, go = threading.Event(), threading.Event()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        go.set()
        assert drawn.wait(60)
        return F.dropout(x) if draws[0] else x

    def other() -> None:
        assert go.wait(60)
        found.append(torch.rand(6))
        drawn.set()

    draws = [False]
    found: list[Tensor] = []
    for draws[0] in (True, False):
        found.clear()
        drawn.clear()
        go.clear()
        torch.manual_seed(4)
        thread = threading.Thread(target=other)
        thread.start()
        dreamcomm.DataParallel(Calls(function), 2)(torch.ones(4, 4))
        thread.join()
        found.append(torch.rand(6))
        assert not set(found[0].tolist()) & set(found[1].tolist())


def test_calls_of_several_threads_have_their_own_numbers() -> None:
    wrapped = dreamcomm.DataParallel(Calls(lambda x, weight: torch.rand(len(x), 4)), 2)
    found: list[Tensor] = []

    def run() -> None:
        for _ in range(50):
            found.append(wrapped(torch.ones(2, 4)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len({tuple(one.flatten().tolist()) for one in found}) == 150


def test_torch_random_is_as_before_after_a_call() -> None:
    before = torch.random.default_generator
    dreamcomm.DataParallel(Calls(lambda x, weight: F.dropout(x)), 2)(torch.ones(4, 4))
    assert torch.random.default_generator is before


def test_autocast_keeps_its_bits_whatever_the_timing() -> None:
    """A weight that is used again is cast once, though another replica ends before."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(6):
            if slow and threading.current_thread().name.endswith(f"-{slow[0]}_0"):
                time.sleep(0.005)
            with torch.autocast("cpu", torch.bfloat16):
                x = (x @ weight).tanh()
        return x

    slow: list[int] = []
    module = Calls(function)
    wrapped = dreamcomm.DataParallel(module, 2)
    found = []
    with one_thread():
        for which in ([], [0], [1], [0], [1]):
            slow[:] = which
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = wrapped(torch.linspace(-1, 1, 32).view(8, 4))
            out.float().square().sum().backward()
            assert module.weight.grad is not None
            found.append(module.weight.grad)
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_context_variables_reach_the_replicas() -> None:
    scale: ContextVar[float] = ContextVar("scale", default=1.0)
    scale.set(5.0)
    wrapped = dreamcomm.DataParallel(Calls(lambda x, weight: x * scale.get()), 2)
    assert torch.equal(wrapped(torch.ones(4, 4)), torch.full((4, 4), 5.0))


def test_an_interrupt_waits_for_the_replicas() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            for step in range(10):
                if step == 3 and x[0, 0] == 0:
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.02)
                self.count += 1
            return x

    module = Slow()
    with pytest.raises(KeyboardInterrupt):
        dreamcomm.DataParallel(module, 2)(torch.arange(2.0)[:, None])
    assert module.count.item() == 10


def test_grad_mode_that_forward_leaves_changed() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        out = x * weight.sum()
        torch.set_grad_enabled(False)
        return out

    module = Calls(function)
    out = dreamcomm.DataParallel(module, 2)(torch.ones(4, 4))
    assert torch.is_grad_enabled()
    out.sum().backward()
    assert module.weight.grad is not None


def test_a_number_drawn_beside_the_seeds_is_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Tensor] = []
    plain = random_numbers._draw

    def draw(count: int, generator: torch.Generator) -> Tensor:
        if generator is torch.default_generator:
            drawn.append(torch.rand(4))  # as another thread may
        return plain(count, generator)

    monkeypatch.setattr(random_numbers, "_draw", draw)
    dreamcomm.DataParallel(Calls(lambda x, weight: x), 2)(torch.ones(4, 4))
    assert not set(drawn[0].tolist()) & set(torch.rand(4).tolist())


def test_casts_of_former_calls_are_freed() -> None:
    """Within one scope of autocast: a cast of these weights takes 8 MiB a replica."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    wrapped = dreamcomm.DataParallel(nn.Linear(2048, 2048), 2)
    x = torch.ones(2, 2048)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            wrapped(x)
        before = resident()
        for _ in range(10):
            wrapped(x)
        assert resident() - before < 60 << 20
