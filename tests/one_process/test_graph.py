"""The backward pass below one node: second derivatives, hooks, checkpoints, and who has memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dreamcomm
from one_process.models import batch, gradients, loss_of, make


def close(mine: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


class Calls(nn.Module):
    """Calls a function with its parameter."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(*(shape or (4,))))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def test_each_replica_runs_both_passes_on_its_own_thread() -> None:
    seen: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        name = threading.current_thread().name
        seen["forward"].add(name)
        out = x * weight
        out.register_hook(lambda _: seen["backward"].add(threading.current_thread().name))
        return out

    dreamcomm.DataParallel(Calls(forward), 3)(torch.ones(6, 4)).sum().backward()
    assert len(seen["forward"]) == 3
    assert all("dreamcomm-replica" in name for name in seen["forward"])
    assert seen["backward"] == seen["forward"]


def test_first_and_second_derivatives() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    wrapped = dreamcomm.DataParallel(module, 2)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(wrapped, (x,))
    assert torch.autograd.gradgradcheck(wrapped, (x,))

    loss_of(wrapped(x)).backward(create_graph=True)
    assert all(p.grad is not None and p.grad.requires_grad for p in module.parameters())


def test_a_gradient_penalty() -> None:
    module = make("mlp")
    x = batch("mlp").requires_grad_()

    def penalised(call: Any) -> list[Tensor | None]:
        module.zero_grad()
        out = call(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (out.sum() + slope.square().sum()).backward()
        return gradients(module)

    close(penalised(dreamcomm.DataParallel(module, 3)), penalised(module))


def test_a_third_derivative() -> None:
    cube = Calls(lambda x, weight: (x * weight) ** 4)
    x = torch.full((4, 4), 0.5, requires_grad=True)

    def third(call: Any) -> Tensor:
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(second.sum(), cube.weight)
        return found

    torch.testing.assert_close(third(dreamcomm.DataParallel(cube, 2)), third(cube))


def test_a_graph_is_kept_or_freed_as_asked() -> None:
    module = make("mlp")
    loss = loss_of(dreamcomm.DataParallel(module, 2)(batch("mlp")))
    loss.backward(retain_graph=True)
    once = gradients(module)
    loss.backward()
    close(gradients(module), [None if one is None else 2 * one for one in once])
    with pytest.raises(RuntimeError, match="freed"):
        loss.backward()


def test_hooks_of_parameters_run_once_with_the_sum() -> None:
    module = make("mlp")
    seen: list[Tensor] = []
    after: list[int] = []
    module[0].weight.register_hook(lambda grad: seen.append(grad.clone()) or 3 * grad)
    module[0].weight.register_post_accumulate_grad_hook(lambda p: after.append(id(p)))
    loss_of(dreamcomm.DataParallel(module, 2)(batch("mlp"))).backward()
    assert len(seen) == 1
    assert after == [id(module[0].weight)]
    torch.testing.assert_close(module[0].weight.grad, 3 * seen[0])


def test_rows_may_be_changed_in_place_without_a_graph() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        x.mul_(2)
        return x * weight

    module = Calls(forward)
    wrapped = dreamcomm.DataParallel(module, 2)
    found = []
    for call in (module, wrapped):
        x = torch.arange(24.0).view(6, 4)
        with torch.no_grad():
            found.append((call(x), x))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    for x in (torch.ones(6, 4), torch.ones(6, 4, requires_grad=True) * 1):
        with pytest.raises(
            RuntimeError, match=r"argument 0 of shape \[6, 4\].*clone it in forward"
        ):
            wrapped(x)


@pytest.mark.parametrize("view", [False, True])
def test_no_gradient_is_written_into_another_tensors_memory(view: bool) -> None:
    """A parameter's gradient can be the very gradient that came in."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (weight.view(2, 2).view(4) if view else weight) + x.mean(0)

    module = Calls(forward)
    wrapped = dreamcomm.DataParallel(module, 2)
    out = wrapped(torch.ones(4, 4))
    assert out.shape == (8,)
    given = torch.arange(8.0)
    alias, clone = given.view(2, 4), given.clone()
    out.backward(given, retain_graph=True)
    assert torch.equal(given, clone)
    assert torch.equal(alias.flatten(), clone)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, clone[:4] + clone[4:])
    first = module.weight.grad.clone()
    out.backward(given)
    assert torch.equal(module.weight.grad, 2 * first)
    assert torch.equal(given, clone)


def test_gradients_that_hooks_keep_stay_as_they_are() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        scaled = weight * 1
        scaled.register_hook(lambda grad: kept.append((grad, grad.clone())))
        return x * scaled

    module = Calls(forward)
    loss_of(dreamcomm.DataParallel(module, 3)(torch.randn(6, 4))).backward()
    assert len(kept) == 3
    assert all(torch.equal(one, clone) for one, clone in kept)


def test_outputs_may_be_inputs_or_parameters_and_come_twice() -> None:
    def forward(x: Tensor, weight: Tensor) -> Any:
        out = x * weight
        return x, weight, out, out

    module = Calls(forward)
    x = torch.randn(4, 4, requires_grad=True)
    same, weights, one, other = dreamcomm.DataParallel(module, 2)(x)
    assert torch.equal(same, x)
    assert torch.equal(weights, torch.cat([module.weight, module.weight]))
    (same.sum() + weights.sum() + one.sum() + 2 * other.sum()).backward()
    torch.testing.assert_close(x.grad, 1 + 3 * module.weight.detach().expand(4, 4))
    torch.testing.assert_close(module.weight.grad, 2 + 3 * x.detach().sum(0))


def test_an_output_without_a_gradient_is_left_out() -> None:
    module = Calls(lambda x, weight: (x * weight, weight.square(), x.argmax(-1), x.detach()))
    parts = dreamcomm.DataParallel(module, 2)(torch.randn(4, 4))
    assert [one.requires_grad for one in parts] == [True, True, False, False]
    parts[1].sum().backward()
    torch.testing.assert_close(module.weight.grad, 4 * module.weight.detach())


def test_tensors_that_are_no_parameters_get_gradients_in_replica_order() -> None:
    other = nn.Parameter(torch.full((4,), 3.0))
    module = Calls(lambda x, weight: x * weight * other)
    module.in_a_list = [nn.Linear(4, 4)]
    inner = module.in_a_list[0]
    module.function = lambda x, weight: inner(x * weight * other)
    x = torch.randn(6, 4)

    def step(call: Any) -> list[Tensor | None]:
        for one in (module.weight, other, *inner.parameters()):
            one.grad = None
        loss_of(call(x)).backward()
        return [module.weight.grad, other.grad, *(p.grad for p in inner.parameters())]

    wrapped = dreamcomm.DataParallel(module, 3)
    expected = step(module)
    found = step(wrapped)
    close(found, expected)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(step(wrapped), found, strict=True))  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(loss_of(wrapped(x)), other)
    torch.testing.assert_close(slope, expected[1])
    assert torch.equal(other.grad, found[1]), "torch.autograd.grad changes no grad"  # type: ignore[arg-type]
    hook = other.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"shape \[4\].*is no parameter or buffer.*has hooks"):
        wrapped(x)
    hook.remove()
    wrapped(x)


def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    kept: list[Tensor] = []

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x * weight
        kept.append(hidden)
        return hidden.detach() + weight

    module = Calls(forward)
    out = dreamcomm.DataParallel(module, 2)(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="did not return"):
        (out.sum() + kept[0].sum()).backward()
    x = torch.ones(4, 4, requires_grad=True)
    module.weight.requires_grad_(False)
    kept.clear()
    out = dreamcomm.DataParallel(module, 2)(x)
    with pytest.raises(RuntimeError, match="did not return"):
        kept[0].sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_checkpoints(reentrant: bool, chance: float) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 5)
            self.recompute = False

        def inner(self, x: Tensor) -> Tensor:
            return F.dropout(self.second(F.dropout(x, chance).relu()), chance)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if not self.recompute:
                return self.inner(x)
            found: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return found

    torch.manual_seed(1)
    module = Segments()
    wrapped = dreamcomm.DataParallel(module, 3)
    found = []
    for module.recompute in (False, True):
        torch.manual_seed(8)
        module.zero_grad()
        loss = loss_of(wrapped(batch("mlp")))
        torch.rand(3)  # torch's generator has moved on
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        found.append([loss.detach(), *gradients(module)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_sparse_gradients() -> None:
    module = nn.Embedding(10, 5, sparse=True)
    rows = torch.randint(10, (12, 3))
    module(rows).square().sum().backward()
    assert module.weight.grad is not None
    expected = module.weight.grad.to_dense()
    module.zero_grad()
    dreamcomm.DataParallel(module, 3)(rows).square().sum().backward()
    assert module.weight.grad.is_sparse
    torch.testing.assert_close(module.weight.grad.to_dense(), expected)


def test_an_error_in_a_backward_pass_names_the_replica() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if grad.flatten()[0] < 0:
                raise ArithmeticError("in the middle")
            return grad

    module = Calls(lambda x, weight: Fails.apply(x * weight))  # type: ignore[no-untyped-call]
    wrapped = dreamcomm.DataParallel(module, 2)
    out = wrapped(torch.ones(4, 4))
    with pytest.raises(
        ArithmeticError, match=r"replica 1 of 2 .*backward pass(.|\n)*in the middle"
    ):
        out.backward(torch.ones(4, 4) - 2 * torch.tensor([0.0, 0, 1, 1])[:, None])
    assert module.weight.grad is None
    wrapped(torch.ones(4, 4)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((4,), 4.0))  # type: ignore[arg-type]


def test_saved_tensors_are_freed_by_the_backward_pass() -> None:
    import gc
    import weakref

    dead: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x * weight
        dead.append(weakref.ref(hidden))
        return hidden.exp()

    gc.collect()
    gc.disable()
    try:
        module = Calls(forward)
        out = dreamcomm.DataParallel(module, 2)(torch.ones(4, 4))
        out.sum().backward()
        assert [one() for one in dead] == [None, None]
        del out
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_backward_pass_that_failed_leaves_nothing_for_the_next_one() -> None:
    fails: list[int] = []

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        def hook(_: Tensor) -> None:
            if fails:
                fails.pop()
                raise ArithmeticError

        hidden = x * weight
        hidden.register_hook(hook)
        return hidden + weight

    module = Calls(forward)
    x = torch.ones(4, 4, requires_grad=True)

    def run(call: Any) -> list[Tensor]:
        loss = (call(x) * torch.arange(4.0)).sum()
        fails[:] = [1]
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        module.zero_grad()
        x.grad = None
        loss.backward()
        return [one.grad for one in (module.weight, x) if one.grad is not None]

    assert all(map(torch.equal, run(dreamcomm.DataParallel(module, 2)), run(module)))


def test_a_history_that_is_no_arguments_is_refused() -> None:
    module = Calls(lambda x, weight: x * weight * held[0])
    held = [torch.ones(4, requires_grad=True) * 2]
    wrapped = dreamcomm.DataParallel(module, 2)
    with pytest.raises(RuntimeError, match="with a history that is no argument of it"):
        wrapped(torch.ones(4, 4))
    held[0] = held[0].detach()
    wrapped(torch.ones(4, 4)).sum().backward()


def test_a_gradient_that_a_hook_of_forward_keeps_stays_as_it_is() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        kept.append((parameter.grad, parameter.grad.clone()))

    def forward(x: Tensor, weight: nn.Parameter) -> Tensor:
        weight.register_post_accumulate_grad_hook(keep)
        return x * weight

    module = Calls(forward)
    loss_of(dreamcomm.DataParallel(module, 2)(torch.randn(4, 4))).backward()
    assert len(kept) == 2
    assert all(torch.equal(one, clone) for one, clone in kept)


def test_checkpoints_around_the_wrapper() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    x = batch("mlp").requires_grad_()
    loss_of(wrapped(x)).backward()
    expected = gradients(module)
    module.zero_grad()
    loss_of(checkpoint(wrapped, x, use_reentrant=True)).backward()
    assert all(map(torch.equal, gradients(module), expected))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="checkpoint parts inside of the module"):
        checkpoint(wrapped, x, use_reentrant=False)


def test_transforms_and_tangents_are_refused() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    for transform in (torch.func.grad(lambda x: wrapped(x).sum()), torch.func.vmap(wrapped)):
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func do not reach threads"):
            transform(batch("mlp"))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch("mlp"), batch("mlp"))
        with pytest.raises(RuntimeError, match="tangents of forward-mode"):
            wrapped(dual)
        wrapped(batch("mlp"))
    out = wrapped(batch("mlp").requires_grad_())
    with pytest.raises(RuntimeError, match="gradients in batches"):
        torch.autograd.grad(out, module[0].weight, torch.ones(2, *out.shape), is_grads_batched=True)


def test_a_replica_that_calls_its_own_wrapper_is_an_error() -> None:
    wrapped: list[Any] = []
    module = Calls(lambda x, weight: wrapped[0](x))
    wrapped.append(dreamcomm.DataParallel(module, 2))
    with pytest.raises(RuntimeError, match="calls its own wrapper"):
        wrapped[0](torch.ones(4, 4))


def test_wrappers_within_wrappers() -> None:
    module = make("mlp")
    nested = dreamcomm.DataParallel(nn.Sequential(dreamcomm.DataParallel(module, 2)), 2)
    loss_of(nested(batch("mlp"))).backward()
    found = gradients(module)
    module.zero_grad()
    loss_of(module(batch("mlp"))).backward()
    close(found, gradients(module))


def test_what_no_loss_uses_has_no_gradient() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    module = Heads()
    dreamcomm.DataParallel(module, 2)(torch.ones(4, 4))[0].sum().backward()
    assert module.first.weight.grad is not None
    assert module.second.weight.grad is None
