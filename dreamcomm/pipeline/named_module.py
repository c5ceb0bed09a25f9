"""A module of this rank's parts, under their names in the whole module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

__all__ = ["NamedParts"]


class NamedParts(nn.Module):
    """Parameters, buffers and submodules of a pipeline's rank, with the whole module's names.

    It is what optimizers, wrappers and checkpoints are given. It has no forward of its own: the
    pipeline runs the parts.

    Args:
        units: submodules by their names in the whole module.
        tensors: parameters and buffers outside of them.
    """

    def __init__(self, units: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, unit in units.items():
            folder, last = _folder(self, name)
            if last not in folder._modules:
                folder.add_module(last, unit)
        present = {name for name, _ in _everything(self)}
        for name, tensor in tensors.items():
            if name in present:
                continue
            folder, last = _folder(self, name)
            if isinstance(tensor, nn.Parameter):
                folder.register_parameter(last, tensor)
            else:
                folder.register_buffer(last, tensor)

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


def _everything(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
