"""Replicas of a module: modules of their own, with Parameters of their own on the same memory.

One module called from two threads is a race: a forward pass reads the parameters that it finds at
that moment, and autograd adds the gradients of both to the same tensors in either order. So each
replica has its own tree of modules, as torch's DataParallel makes it; hooks and other attributes
are the original's. Buffers of replica 0 are the module's own, those of the others copies.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dreamcomm.one_process.scatter import version_of

__all__ = ["Replica", "Replicas"]

DDP = nn.parallel.DistributedDataParallel
HOLDERS = (list, tuple, dict, MethodType, partial)
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
OF_TORCH = frozenset(vars(nn.Module()))  # the attributes of any module: parameters, hooks, ...
LONGEST = 1000  # items of a list that may hold modules: data sets are longer
MAKE_REPLICA = cast(Any, nn.Module)._replicate_for_data_parallel


@dataclass
class Replica:
    """A copy of the module.

    Attributes:
        modules: its modules by their names; "" is the whole.
        leaves: its tensors that need gradients, each with the module's own one.
        buffers: what it was given as buffers, by their names.
    """

    modules: dict[str, nn.Module]
    leaves: list[tuple[Tensor, Tensor]]
    buffers: dict[str, Tensor]


class Replicas:
    """The copies of a module for one call.

    Args:
        module: the original; all its parameters and buffers are on CPUs.
        count: how many.

    Raises:
        RuntimeError: it holds what cannot stand in two threads.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        self._modules = dict(module.named_modules())
        for name, one in self._modules.items():
            _check_module(name, one)
        self._parameters = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            _check_tensor("parameter", name, parameter)
        for name, buffer in module.named_buffers():
            _check_tensor("buffer", name, buffer)
        self._versions = _versions(self._parameters)
        self.each = [self._copy(index) for index in range(count)]
        self._given = [_versions(replica.buffers) for replica in self.each]

    def _copy(self, index: int) -> Replica:
        made: dict[int, Tensor] = {}  # by the original's id: tied ones stay tied
        leaves: list[tuple[Tensor, Tensor]] = []
        buffers: dict[str, Tensor] = {}
        copies = {id(one): _empty_copy(one) for one in self._modules.values()}

        def own(source: Tensor, *, of_buffer: bool) -> Tensor:
            if id(source) not in made:
                alone = source.clone() if of_buffer and index else source
                made[id(source)] = _own(source, alone.detach() if source.requires_grad else alone)
                if made[id(source)].requires_grad and torch.is_grad_enabled():
                    leaves.append((made[id(source)], source))
            return made[id(source)]

        for name, one in self._modules.items():
            copy = copies[id(one)]
            for key, child in one._modules.items():
                copy._modules[key] = None if child is None else copies[id(child)]
            for key, parameter in one._parameters.items():
                if isinstance(parameter, nn.Parameter):
                    _set_parameter(copy, key, cast(nn.Parameter, own(parameter, of_buffer=False)))
                elif parameter is None:
                    copy._parameters[key] = None
                else:  # functional_call has put a tensor there
                    copy._parameters[key] = cast(Any, own)(parameter, of_buffer=False)
            for key, buffer in one._buffers.items():
                if buffer is not None:
                    copy._buffers[key] = buffers[f"{name}.{key}".lstrip(".")] = own(
                        buffer, of_buffer=True
                    )
        own_things = {**copies, **made}
        for one in self._modules.values():
            _follow(one, copies[id(one)], own_things)
        return Replica(
            {name: copies[id(one)] for name, one in self._modules.items()}, leaves, buffers
        )

    def check_parameters(self) -> None:
        """Raises RuntimeError if a forward pass has changed a parameter, or put another there."""
        for name, parameter in self._parameters.items():
            if version_of(parameter) != self._versions[name]:
                raise RuntimeError(
                    f"DataParallel: forward has changed parameter {name!r} in place, while the "
                    "other replicas read it; change parameters outside of forward"
                )
            owner, _, key = name.rpartition(".")
            for replica in self.each:
                now = replica.modules[owner]._parameters.get(key)
                if now is None or now.data_ptr() != parameter.data_ptr():
                    raise RuntimeError(
                        f"DataParallel: forward has put another tensor in the place of parameter "
                        f"{name!r}, which is lost with its replica; change parameters outside of "
                        "forward, or take a buffer"
                    )

    def keep_buffers(self) -> list[str]:
        """Gives the module the buffers that replica 0 has put in the place of others.

        Returns:
            The names of buffers that other replicas have changed: these changes are lost.
        """
        lost: dict[str, None] = {}
        for replica, versions in zip(self.each, self._given, strict=True):
            for owner, module in replica.modules.items():
                for key, now in module._buffers.items():
                    name = f"{owner}.{key}".lstrip(".")
                    given = replica.buffers.get(name)
                    if replica is self.each[0]:
                        if now is not given:
                            kept = None if now is None else now.detach()
                            self._modules[owner]._buffers[key] = kept
                    elif now is not given or (
                        given is not None and version_of(given) != versions[name]
                    ):
                        lost[name] = None
        return list(lost)


def _empty_copy(module: nn.Module) -> nn.Module:
    """A module with the same attributes, without parameters; its dicts are its own.

    It is what ``_replicate_for_data_parallel`` makes, which some classes have their own of, in a
    third of the time.
    """
    kind: Any = type(module)
    if kind._replicate_for_data_parallel is not MAKE_REPLICA:
        return cast(nn.Module, cast(Any, module)._replicate_for_data_parallel())
    copy: nn.Module = kind.__new__(kind)
    attributes = vars(copy)
    attributes.update(vars(module))
    attributes["_parameters"] = {}
    attributes["_buffers"] = module._buffers.copy()
    attributes["_modules"] = module._modules.copy()
    attributes["_is_replica"] = True  # has zero_grad() warn
    return copy


def _set_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Gives a copy a parameter; an RNN keeps a list of them besides."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[key] = parameter
    else:
        setattr(module, key, parameter)


def _follow(module: nn.Module, copy: nn.Module, own: dict[int, Any]) -> None:
    """Has attributes that hold modules, parameters or methods of the tree hold the copy's own.

    Otherwise a list of layers, or a patched forward, would run the original in each replica.
    """
    attributes = vars(copy)
    for key, value in vars(module).items():
        if key not in OF_TORCH and type(value) not in PLAIN:
            followed = _followed(value, own)
            if followed is not value:
                attributes[key] = followed


def _followed(value: Any, own: dict[int, Any]) -> Any:
    """The value itself, or one that holds the copy's own things in place of the module's."""
    if id(value) in own:
        return own[id(value)]
    kind = type(value)
    if kind is MethodType:
        return (
            MethodType(value.__func__, own[id(value.__self__)])
            if id(value.__self__) in own
            else value
        )
    if kind is partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        found = [_followed(one, own) for one in parts]
        if all(map(operator.is_, found, parts)):
            return value
        split = 1 + len(value.args)
        return partial(
            found[0], *found[1:split], **dict(zip(value.keywords, found[split:], strict=True))
        )
    if kind not in HOLDERS or len(value) > LONGEST:
        return value
    parts = list(value.values()) if kind is dict else list(value)
    found = [_followed(one, own) for one in parts]
    if all(map(operator.is_, found, parts)):
        return value
    return dict(zip(value, found, strict=True)) if kind is dict else kind(found)


def _own(source: Tensor, memory: Tensor) -> Tensor:
    """A tensor of the source's class and attributes on this memory, without its history."""
    if isinstance(source, nn.Parameter):
        subclass = cast(Any, torch.Tensor)._make_subclass  # of memory.detach()
        made: Tensor = subclass(type(source), memory, source.requires_grad)
        if vars(source):
            vars(made).update(vars(source))
        return made
    return memory.requires_grad_() if source.requires_grad else memory


def _check_module(name: str, module: nn.Module) -> None:
    """Refuses what cannot stand in two threads."""
    wrong = None
    if isinstance(module, torch.jit.ScriptModule):
        wrong = "is of torch.jit, which has no replicas on CPUs"
    elif module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        wrong = (
            "is compiled, and would run the original's parameters in each replica; compile "
            "functions inside of it instead"
        )
    elif isinstance(module, DDP):
        wrong = (
            "is a DistributedDataParallel, whose calls a rank makes once; wrap the other way "
            "around: DistributedDataParallel(DataParallel(module))"
        )
    elif any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__):
        wrong = (
            "is a SyncBatchNorm, whose calls the replicas would make in any order; keep BatchNorm "
            "here, or train in ranks"
        )
    elif parametrize.is_parametrized(module) and cast(Any, parametrize)._cache_enabled:
        wrong = (
            "is parametrized, and parametrize.cached() keeps weights by the address of modules, "
            "which replicas of several calls may have in common; leave it out"
        )
    if wrong:
        raise RuntimeError(f"DataParallel: {f'module {name!r}' if name else 'the module'} {wrong}")


def _check_tensor(kind: str, name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise RuntimeError(
            f"DataParallel: {kind} {name!r} has no shape yet; call the module itself once before"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise RuntimeError(
            f"DataParallel: {kind} {name!r} is a {type(tensor).__name__}, and replicas share plain "
            "tensors only"
        )
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"DataParallel: {kind} {name!r} is on {tensor.device}, and its replicas are on CPUs; "
            "move the module, or give GPUs as device_ids"
        )


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: version_of(one) for name, one in tensors.items()}
