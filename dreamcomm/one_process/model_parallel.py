"""model_parallel: parts of a module on different devices, in one process."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["model_parallel"]

Device = torch.device | str | int


def model_parallel(
    module: nn.Module, devices: Mapping[str, Device], output_device: Device | None = None
) -> nn.Module:
    """Moves parts of a module to devices, and from then on tensors where they enter a part.

    A part is a submodule; its arguments are moved to the device where its parameters are at that
    moment. What is in no part stays where it is, and tensors that enter it are moved there, too.
    Autograd moves gradients back. Kernels of a GPU run behind the caller's back, so that branches
    on different GPUs overlap. Operators in forward that join tensors of two devices need a ``to``,
    or a module of their own. Call it before the optimizer is made, as ``module.to``.

    Args:
        module: the model. It is changed in place.
        devices: the device of each part, by the submodule's name, as
            ``{"encoder": "cuda:0", "decoder": "cpu"}``.
        output_device: where tensors in the module's output go; None leaves them where they are.

    Returns:
        The module.

    Raises:
        ValueError: nothing has been changed: there is no such part or device, a part is inside
            another, or two of them have a parameter or buffer in common.
    """
    parts = _read_parts(module, devices)
    for part in parts:
        _check_device(f"part {part.name!r}", part.device)
    if output_device is not None:
        _check_device("output_device", torch.device(output_device))
    rest = [_Part(name, one, _device_of(one)) for name, one in _rest(module, parts)]
    _check_apart(parts, module)

    for one in module.modules():
        for hooks in (one._forward_pre_hooks, one._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Entry | _Exit)]:
                del hooks[key]
                one._forward_pre_hooks_with_kwargs.pop(key, None)
    for part in parts:
        part.module.to(part.device)
    for part in (*parts, *rest):
        if part.device is not None:
            for one in _called(part.module):
                one.register_forward_pre_hook(_Entry(part.device), prepend=True, with_kwargs=True)
    if output_device is not None:
        module.register_forward_hook(_Exit(torch.device(output_device)))
    return module


@dataclass(frozen=True)
class _Part:
    """A submodule, and its device; None for one of the rest without tensors."""

    name: str
    module: nn.Module
    device: Any


class _Entry:
    """A hook that moves a part's arguments to its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, module: nn.Module, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        device = _device_of(module) or self._device  # module.to() may have moved it since
        return _moved(inputs, device), _moved(kwargs, device)


class _Exit:
    """A hook that moves a module's output."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return _moved(output, self._device)


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(device), values)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _called(module: nn.Module) -> list[nn.Module]:
    """The modules whose forward is called: this one, or the children of a container."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    return [inner for child in module.children() for inner in _called(child)]


def _device_of(module: nn.Module) -> torch.device | None:
    return next((one.device for _, one in _tensors(module)), None)


def _read_parts(module: nn.Module, devices: Mapping[str, Device]) -> list[_Part]:
    if not devices:
        raise ValueError('model_parallel: name at least one part, as {"encoder": "cuda:0"}')
    known = dict(module.named_modules(remove_duplicate=False))
    parts: list[_Part] = []
    for name, device in devices.items():
        if not name or name not in known:
            children = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"model_parallel: the module has no part {name!r}; its children are: {children}"
            )
        try:
            parts.append(_Part(name, known[name], torch.device(device)))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"model_parallel: part {name!r}: {_first_line(error)}") from error
    return parts


def _check_device(what: str, device: torch.device) -> None:
    """Raises ValueError if no tensor can be made there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # by the kind of device
        raise ValueError(
            f"model_parallel: {what} cannot be on {device}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return textwrap.shorten(str(error).partition("\n")[0], 200, placeholder=" ...")


def _rest(module: nn.Module, parts: list[_Part]) -> list[tuple[str, nn.Module]]:
    """The largest submodules that are in no part, and hold none."""
    chosen = {id(part.module) for part in parts}
    found: list[tuple[str, nn.Module]] = []

    def walk(name: str, one: nn.Module) -> None:
        if id(one) in chosen:
            return
        if any(id(inner) in chosen for inner in one.modules()):
            for key, child in one.named_children():
                walk(f"{name}.{key}" if name else key, child)
        else:
            found.append((name, one))

    walk("", module)
    return found


def _check_apart(parts: list[_Part], module: nn.Module) -> None:
    """Raises ValueError if parts have a module or a tensor in common."""
    for one, other in combinations(parts, 2):
        for inner, outer in ((one, other), (other, one)):
            if any(inner.module is each for each in outer.module.modules()):
                raise ValueError(
                    f"model_parallel: part {inner.name!r} is inside part {outer.name!r}; name "
                    "parts that do not overlap"
                )
    owner: dict[int, tuple[_Part, str]] = {}
    for part in parts:
        for name, tensor in _tensors(part.module):
            first, first_name = owner.setdefault(id(tensor), (part, name))
            if first is not part:
                raise ValueError(
                    f"model_parallel: {first.name}.{first_name} and {part.name}.{name} are one "
                    "tensor, which can be in one part only: untie them, or put both modules into "
                    "one part"
                )
    for name, tensor in _all_names(module):
        if id(tensor) in owner and not any(name.startswith(f"{part.name}.") for part in parts):
            within, key = owner[id(tensor)]
            if within.device != tensor.device:
                raise ValueError(
                    f"model_parallel: {name}, which is in no part and on {tensor.device}, is one "
                    f"tensor with {within.name}.{key} of part {within.name!r} on "
                    f"{within.device}: put both modules into one part"
                )


def _all_names(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all names that they have."""
    return chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
