"""A module of this rank's parts, under their names in the whole module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["NamedParts"]


class NamedParts(nn.Module):
    """Parameters, buffers and submodules of a pipeline's rank, with the whole module's names.

    It is what optimizers, wrappers and checkpoints are given. It has no forward of its own: the
    pipeline runs the parts.

    Args:
        whole: the module that they are of; it gets the mode of this one. None: a list of stages.
        units: submodules by their names in the whole module.
        tensors: parameters and buffers outside of them.
    """

    def __init__(
        self,
        whole: nn.Module | None,
        units: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple: it is no part of this one
        kept_out = set() if whole is None else _not_saved(whole)
        for name, unit in units.items():
            folder, last = _folder(self, name)
            if last not in folder._modules:
                folder.add_module(last, unit)
        present = {name for name, _ in _everything(self)}
        self._outside = [name for name in tensors if name not in present]
        for name, tensor in tensors.items():
            if name in present:
                continue
            folder, last = _folder(self, name)
            if isinstance(tensor, nn.Parameter):
                folder.register_parameter(last, tensor)
            else:
                folder.register_buffer(last, tensor, persistent=name not in kept_out)
        if whole is not None:
            self.training = whole.training
        self._latest = {name: _owner(self, name)[name.rpartition(".")[2]] for name in self._outside}

    def train(self, mode: bool = True) -> NamedParts:
        """Sets the mode of the parts, and of the whole module, whose forwards may ask for it."""
        super().train(mode)
        if self._whole[0] is not None:
            self._whole[0].train(mode)
        return self

    def put_back(self) -> None:
        """Gives the whole module the tensors outside of units that this one has now.

        They are others after to_empty(), or load_state_dict(assign=True). Where the whole module's
        alone is another, it was replaced there, and this one takes it.
        """
        whole = self._whole[0]
        if whole is None:
            return
        for name in self._outside:
            last = name.rpartition(".")[2]
            here, there = _owner(self, name), _owner(whole, name)
            if here[last] is self._latest[name]:
                here[last] = there[last]
            else:
                there[last] = here[last]
            self._latest[name] = here[last]

    def forward(self, *_: object, **__: object) -> None:
        """Raises: call the pipeline's step().

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the module of a pipeline's rank is run by Pipeline.step() and eval()")


class Folder(nn.Module):
    """Holds submodules under a name of the whole module."""


def _folder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the name's last part, made where it is not there."""
    *path, last = name.split(".")
    here = root
    for part in path:
        child = here._modules.get(part)
        if child is None:
            child = Folder()
            here.add_module(part, child)
        here = child
    return here, last


def _owner(root: nn.Module, name: str) -> dict[str, Any]:
    """The parameters, or buffers, among which a module has the tensor of this name."""
    path, _, last = name.rpartition(".")
    module = root.get_submodule(path)
    tensors: list[dict[str, Any]] = [module._parameters, module._buffers]
    for one in tensors:
        if last in one:
            return one
    raise RuntimeError(f"the parameter or buffer {name!r} was removed after the Pipeline was made")


def _not_saved(whole: nn.Module) -> set[str]:
    """The names of buffers that are left out of state dicts."""
    return {
        f"{path}.{name}" if path else name
        for path, module in whole.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _everything(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
