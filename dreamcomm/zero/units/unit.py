"""A unit: modules whose parameters are sharded by one call of fully_shard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dreamcomm._torch.ddp import find_tensors, unseen_by_dynamo
from dreamcomm.buckets.averages import Averages
from dreamcomm.zero.units.parameters.casts import Casts
from dreamcomm.zero.units.parameters.record import Place, UnitParameter
from dreamcomm.zero.units.parameters.registry import Contents, Registry
from dreamcomm.zero.units.tree.refusals import check_rows

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["KEY", "Unit", "Use", "unit_of"]

KEY = "_fully_sharded_unit"  # in a module's __dict__


@dataclass(eq=False)
class Use:
    """A forward pass of a unit, through which backward passes go.

    Attributes:
        entered: the number of the backward pass that goes through it now; 0: none.
    """

    entered: int = 0


class Unit:
    """The parameters of some modules, and where these have them registered.

    Args:
        roots: the modules that were given, mostly one. A unit has them and all modules below that
            are in no other unit.
        ignored: parameters that stay as they are.
        reshard_after_forward: whether the DTensors are registered again after a forward pass; None:
            they are, except in a tree's root.
        casts: of its parameters, arguments and outputs.
        averages: what gradients become; None: as the root says.
        seed: of random numbers in shards.

    Attributes:
        modules: all of them.
        name: of the first one in the tree's root, for messages.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        ignored: Iterable[nn.Parameter],
        reshard_after_forward: bool | None,
        casts: Casts,
        averages: Averages | None,
        seed: int,
    ) -> None:
        self.casts, self.averages, self.seed = casts, averages, seed
        self.name = ""
        self.roots = [weakref.ref(one) for one in roots]
        self.ignored = list(ignored)
        self.modules: list[weakref.ref[nn.Module]] = []
        self._contents: list[Contents] = []  # of the modules, when they were looked at last
        self._is_changed = False
        self._places: list[tuple[Place, UnitParameter]] = []
        self._registry = Registry([], [])
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduces = True
        self.divide_factor = 0.0
        self.all_reduces = True
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self.shows_whole = False
        self.copies_were_equal = True
        self.tree: Tree
        self._left_out: set[Place] = set()  # also what replaces an ignored parameter there
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._uses: list[Use] = []  # of the forward passes that run now, one in the other
        self.look_again()

    def hook(self) -> None:
        """Has the modules' forward passes read whole parameters."""
        for one in self.roots:
            module = one()
            assert module is not None
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)
        self.hook_states()

    def look_again(self) -> None:
        """Finds the modules that the unit has now."""
        modules = list(_below(one for root in self.roots if (one := root()) is not None))
        self.modules = [weakref.ref(one) for one in modules]
        self._contents = [Contents.of(one) for one in modules]
        self._is_changed = False

    @property
    def places(self) -> list[tuple[Place, UnitParameter]]:
        """Where modules have parameters, and their forms. A tied one may be of another unit."""
        return self._places

    @places.setter
    def places(self, places: list[tuple[Place, UnitParameter]]) -> None:
        self._places = places
        self._registry = Registry(self._contents, places)

    def differs(self) -> bool:
        """Whether any module has other parameters or modules than when it was looked at."""
        return self._is_changed or not self._registry.is_current()

    def forget_contents(self) -> None:
        """Has the modules count as changed."""
        self._is_changed = True

    def hook_states(self) -> None:
        """Has states be made of, and loaded into, the DTensors."""
        for one in self.modules:
            module = one()
            if module is not None and module not in self._hooked:
                self._hooked.add(module)
                hooked = cast(Any, module)
                hooked.register_state_dict_pre_hook(self._before_state)
                hooked.register_state_dict_post_hook(_after_state)
                hooked.register_load_state_dict_pre_hook(self._before_load)

    def registered(self) -> Iterator[tuple[Place, nn.Parameter]]:
        """Where the modules have parameters themselves, and which."""
        return self._registered_in(self.modules)

    def _registered_in(
        self, modules: Iterable[weakref.ref[nn.Module]]
    ) -> Iterator[tuple[Place, nn.Parameter]]:
        ignored = set(map(id, self.ignored))
        for reference in modules:
            module = reference()
            for name, one in {} if module is None else module._parameters.items():
                place = Place(reference, name)
                if id(one) in ignored:
                    self._left_out.add(place)
                elif one is not None and place not in self._left_out:
                    yield place, one

    @property
    def module(self) -> nn.Module | None:
        """The first module that was given, while it lives."""
        return self.roots[0]()

    @property
    def is_root(self) -> bool:
        return self.tree.root is self

    def parameters(self) -> Iterator[UnitParameter]:
        """Those that the places have now, each once."""
        seen = set()
        for _, one in self.places:
            if id(one) not in seen:
                seen.add(id(one))
                yield one

    # What is registered.

    def show_whole(self) -> None:
        """Registers the whole parameters."""
        self._registry.show_whole()
        self.shows_whole = True

    def show_sharded(self) -> None:
        """Registers the DTensors."""
        if self.shows_whole:
            self._registry.show_sharded()
            self.shows_whole = False

    @property
    def keeps_whole(self) -> bool:
        """Whether whole parameters stay registered after a forward pass."""
        if self.reshard_after_forward is None:
            return self.is_root
        return not self.reshard_after_forward

    def shard_new(self, module: nn.Module | None = None) -> None:
        """Registers DTensors for new parameters of the unit, or of one module below its roots."""
        if module is None or any(one() is module for one in self.roots):
            modules = list(_below(one for root in self.roots if (one := root()) is not None))
        else:
            modules = [module]
        self.tree.shard_new(self._registered_in(map(weakref.ref, modules)))

    def _before_state(self, module: nn.Module, *_: Any) -> None:
        if self.tree.rewrites is None:
            self.show_sharded()
            self.shard_new(module)

    def _before_load(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if self.tree.rewrites is None:
            self.tree.close()
            if any(one() is module for one in self.roots):  # of all modules, before any is loaded
                check_rows(state, self.tree.mesh)
            self.show_sharded()
            self.shard_new(module)

    # Forward passes.

    @unseen_by_dynamo
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.tree.enter_forward(self)
        self.show_whole()
        self._uses.append(Use())
        if self.tree.form.frees and torch.is_grad_enabled():
            self._await_inputs((args, kwargs), self._uses[-1])
        cast_args, cast_kwargs = self.casts.of_inputs(args, kwargs)
        return cast_args, cast_kwargs

    def _await_inputs(self, inputs: Any, use: Use) -> None:
        """Has the unit's backward pass end when the gradients of all inputs are made.

        Not those of leaves: autograd ends these before anything else that is ready.
        """
        tensors = [one for one in find_tensors(inputs) if one.grad_fn is not None]
        count = left = len(tensors)
        me = weakref.ref(self)

        def hook(gradient: Tensor) -> None:
            nonlocal left
            left -= 1
            unit = me()
            if left == 0 and unit is not None:
                left = count  # for another pass through a graph that is kept
                unit.tree.leave_backward_of(unit, use)

        for one in tensors:
            one.register_hook(hook)  # type: ignore[no-untyped-call]

    @unseen_by_dynamo
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = self.casts.of_output(output)
        use = self._uses.pop() if self._uses else Use()  # an error may have come before it
        if torch.is_grad_enabled():
            before = functools.partial(self.before_backward, use)
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(before)  # type: ignore[no-untyped-call]
        if not self.keeps_whole:
            self.show_sharded()
        self.tree.leave_forward(self)
        return output

    @unseen_by_dynamo
    def before_backward(self, use: Use, gradient: Tensor) -> None:
        """Before autograd goes through an output. As torch's, it registers whole parameters."""
        self.tree.enter_backward_of(self, use)
        self.show_whole()


def _after_state(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Has a write to a state's value count as one to the parameter, as in one process.

    torch.distributed.checkpoint loads into the rows themselves.
    """
    from dreamcomm import _C

    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, DTensor):
            rows = value._local_tensor
            if rows.data_ptr() == parameter._local_tensor.data_ptr():
                _C.share_version(rows, parameter)


def _below(roots: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules and those below, each once, except other units and what is below them."""
    waiting, seen = list(roots), set()
    given = set(map(id, waiting))
    waiting.reverse()
    while waiting:
        module = waiting.pop()
        if id(module) in seen or (unit_of(module) is not None and id(module) not in given):
            continue
        seen.add(id(module))
        yield module
        waiting.extend(reversed(list(module.children())))


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose root the module is, or None."""
    unit: Unit | None = module.__dict__.get(KEY)
    return unit
