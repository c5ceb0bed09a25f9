"""What a module may hold: buffers, RNNs, hooks, patched methods; and what is refused."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import warnings
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import dreamcomm
from one_process.models import batch, in_parts, loss_of, make, one_thread, same_bits, step_of


class Counts(nn.Module):
    """Counts its rows in a buffer, in place or by another tensor."""

    def __init__(self, *, in_place: bool, requires_grad: bool = False) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, requires_grad=requires_grad))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.rows
        with torch.no_grad():
            if self.in_place:
                self.rows += len(x)
            else:
                self.rows = self.rows + len(x)
        return out


@pytest.mark.parametrize("in_place", [True, False])
def test_changes_of_buffers_stay_if_replica_0_makes_them(in_place: bool) -> None:
    module = Counts(in_place=in_place)
    before = module.rows
    wrapped = dreamcomm.DataParallel(module, 3)
    with pytest.warns(UserWarning, match="has changed buffer 'rows', and only the changes of rep"):
        wrapped(torch.ones(7, 1))
    assert module.rows.item() == 3
    assert (module.rows is before) == in_place
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = wrapped(torch.ones(7, 1))  # it is told once
    assert module.rows.item() == 6
    assert torch.equal(out, torch.full((7, 1), 4.0)), "each replica reads the buffer as it was"


def test_buffers_without_changes_are_not_told() -> None:
    module = make("cnn").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dreamcomm.DataParallel(module, 2)(batch("cnn"))


def test_buffers_get_gradients() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(5, dtype=torch.float64, requires_grad=True))
            self.register_buffer("shift", torch.randn(5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    module = Scales()
    wrapped = dreamcomm.DataParallel(module, 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda _: wrapped(x), (module.scale,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns(kind: Any) -> None:
    torch.manual_seed(1)
    module = kind(6, 8, 2, batch_first=True, bidirectional=True)
    wrapped = dreamcomm.DataParallel(module, 2)
    x = torch.randn(6, 4, 6)
    with one_thread():
        found = step_of(lambda x: wrapped(x)[0], module, x)

        class Output(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = module

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.rnn(x)[0]
                return out

        assert same_bits(found, in_parts(Output(), x, 2))


def test_parametrizations() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(10, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.orthogonal(nn.Linear(6, 5)),
    )
    wrapped = dreamcomm.DataParallel(module, 2)
    with one_thread():
        expected = in_parts(module, batch("mlp"), 2)
        with pytest.warns(UserWarning, match=r"changed buffer '1\.parametrizations"):
            found = step_of(wrapped, module, batch("mlp"))
        assert same_bits(found, expected)
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"parametrize.cached\(\)"):
        wrapped(batch("mlp"))


def test_parameters_of_a_replica() -> None:
    """They are Parameters, on the module's memory, with its attributes and its ties."""
    module = make("tied")
    module.embed.weight.mark = "mine"
    seen: list[Any] = []

    def look(replica: Any, *_: Any) -> None:
        seen.append((replica, dict(replica.named_parameters())))

    module.register_forward_pre_hook(look)
    dreamcomm.DataParallel(module, 2)(batch("tied"))
    expected = dict(module.named_parameters())
    for replica, parameters in seen:
        assert replica is not module
        assert type(replica) is type(module)
        assert replica.head.weight is replica.embed.weight
        assert replica.embed.weight.mark == "mine"
        assert list(parameters) == list(expected)
        for name, one in parameters.items():
            assert isinstance(one, nn.Parameter)
            assert one is not expected[name]
            assert one.is_leaf
            assert one.requires_grad == expected[name].requires_grad
            assert one.data_ptr() == expected[name].data_ptr()
    assert seen[0][1]["embed.weight"] is not seen[1][1]["embed.weight"]


def test_forward_sees_the_parameters_of_its_replica_and_zero_grad_warns() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return super().forward(x.to(next(self.parameters()).dtype))

    with pytest.warns(UserWarning, match="zero_grad"):
        dreamcomm.DataParallel(Looks(3, 3).double(), 2)(torch.ones(4, 3))


def test_a_patched_forward_runs_on_the_replica() -> None:
    module = make("mlp")
    plain = module.forward
    module.forward = MethodType(lambda self, x: nn.Sequential.forward(self, 2 * x), module)
    with one_thread():
        found = step_of(dreamcomm.DataParallel(module, 2), module, batch("mlp"))
        module.forward = plain
        assert same_bits(
            found, step_of(dreamcomm.DataParallel(module, 2), module, 2 * batch("mlp"))
        )


def test_a_parameter_that_forward_changes_is_an_error() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias.clamp_(0, 1)
            return super().forward(x)

    with pytest.raises(RuntimeError, match=r"forward has changed parameter '0\.bias' in place"):
        dreamcomm.DataParallel(nn.Sequential(Clamps(3, 3)), 2)(torch.ones(4, 3))


def test_an_optimizer_step_between_forward_and_backward_is_an_error() -> None:
    module = make("mlp")
    loss = loss_of(dreamcomm.DataParallel(module, 2)(batch("mlp")))
    with torch.no_grad():
        module[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.compile(), "the module is compiled"),
        (lambda module: module.append(torch.jit.script(nn.ReLU())), "module '5' is of torch.jit"),
        (lambda module: module.append(nn.SyncBatchNorm(5)), "module '5' is a SyncBatchNorm"),
        (lambda module: module.append(dreamcomm.SyncBatchNorm(5)), "module '5' is a SyncBatchNorm"),
        (lambda module: module.append(nn.LazyLinear(5)), "parameter '5.weight' has no shape yet"),
        (lambda module: module[0].to("meta"), "parameter '0.weight' is on meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_modules_that_are_refused(change: Any, words: str) -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    wrapped(batch("mlp"))
    change(module)
    with pytest.raises(RuntimeError, match=words):
        wrapped(batch("mlp"))


def test_copies_and_saved_ones_have_threads_of_their_own() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    with one_thread():
        expected = step_of(wrapped, module, batch("mlp"))
        buffer = io.BytesIO()
        torch.save(wrapped, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for one in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), loaded):
            assert one.replicas == 2
            assert same_bits(step_of(one, one.module, batch("mlp")), expected)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    assert isinstance(wrapped, nn.DataParallel)


def _in_a_fork(wrapped: Any, x: Tensor, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put(wrapped(x).tolist())


def test_a_process_that_is_forked_starts_threads_of_its_own() -> None:
    wrapped = dreamcomm.DataParallel(make("mlp"), 2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with one_thread(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        expected = wrapped(batch("mlp")).tolist()
        torch.set_num_threads(2)
        torch.ones(1 << 20).sum()  # starts a thread that the fork does not have
        child = context.Process(target=_in_a_fork, args=(wrapped, batch("mlp"), queue))
        child.start()
        try:
            assert queue.get(timeout=60) == expected
        finally:
            child.kill()
            child.join()


def test_two_threads_may_call_one_wrapper() -> None:
    from concurrent.futures import ThreadPoolExecutor

    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    with one_thread(), torch.no_grad():
        expected = [wrapped(batch("mlp", step)) for step in range(8)]
    with ThreadPoolExecutor(4) as pool:

        def run(step: int) -> Tensor:
            with torch.no_grad():
                found: Tensor = wrapped(batch("mlp", step))
                return found

        for mine, theirs in zip(pool.map(run, range(8)), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_within_torch_compile_it_runs_outside_of_graphs() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    compiled = torch.compile(lambda x: wrapped(x * 1.0) + 1, backend="eager")
    with one_thread():
        torch.testing.assert_close(compiled(batch("mlp")), wrapped(batch("mlp")) + 1)


def test_functional_call() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    x = batch("mlp")
    values = {f"0.module.{name}": 2 * p.detach() for name, p in module.named_parameters()}
    for one in values.values():
        one.requires_grad_()
    found = torch.func.functional_call(nn.Sequential(wrapped), values, (x,))
    plain = {name.removeprefix("0.module."): one for name, one in values.items()}
    expected = torch.func.functional_call(module, plain, (x,))
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(loss_of(found), list(values.values()))
    torch.testing.assert_close(grads, torch.autograd.grad(loss_of(expected), list(values.values())))


def test_lists_of_layers_are_followed() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(10, 5), nn.BatchNorm1d(5)
            self.stages = [self.linear, (self.norm, {"last": torch.tanh})]
            self.ways = {"scale": partial(self.scaled, by=2), "plain": self.plain}

        def scaled(self, x: Tensor, by: int) -> Tensor:
            return by * self.norm.bias + x

        def plain(self, x: Tensor) -> Tensor:
            return self.norm.weight * x

        def forward(self, x: Tensor) -> Tensor:
            linear, (norm, others) = self.stages
            out: Tensor = others["last"](norm(linear(x)))
            for way in self.ways.values():
                out = way(out)
            return out

    torch.manual_seed(2)
    module = Listed()
    first = copy.deepcopy(module)
    wrapped = dreamcomm.DataParallel(module, 2)
    with one_thread():
        expected = in_parts(module, batch("mlp"), 2)
        with pytest.warns(UserWarning, match=r"changed buffer 'norm\."):
            found = step_of(wrapped, module, batch("mlp"))
        assert same_bits(found, expected)
    assert module.norm.num_batches_tracked.item() == 1
    first(batch("mlp").chunk(2)[0])
    assert torch.equal(module.norm.running_mean, first.norm.running_mean)
    assert module.stages[0] is module.linear


def test_buffers_that_were_none_or_are_made_in_forward() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", None)
            self.register_buffer("dropped", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if self.first is None:
                self.first = x[:1].clone()
                self.register_buffer("second", x[:1] * 2)
                self.dropped = None
            return x

    module = Lazy()
    with pytest.warns(UserWarning, match="has changed buffer 'first' and 2 more"):
        dreamcomm.DataParallel(module, 2)(torch.arange(4.0))
    assert module.first.item() == 0
    assert module.second.item() == 0
    assert module.dropped is None


def test_another_tensor_in_a_parameters_place_is_an_error() -> None:
    class Normalises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.u.data = self.u.data / 2
            return x * self.u

    with pytest.raises(RuntimeError, match="in the place of parameter 'u', which is lost"):
        dreamcomm.DataParallel(Normalises(), 2)(torch.ones(4, 3))
