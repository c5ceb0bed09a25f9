"""Which optimizers may step a part of a parameter alone."""

from __future__ import annotations

import torch

__all__ = ["PER_ELEMENT", "check_per_element"]

# Each element's step depends on that element's own gradient and state, and on numbers that all
# elements of the parameter share.
PER_ELEMENT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_per_element(optimizer_class: object, per_element: bool, what: str) -> None:
    """Raises for an optimizer that needs whole parameters, or may."""
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        raise TypeError(
            f"{what}: expected optimizer_class to be a class of optimizers, such as "
            f"torch.optim.AdamW, got {optimizer_class!r}"
        )
    if optimizer_class in PER_ELEMENT or per_element:
        return
    raise ValueError(
        f"{what}: {optimizer_class.__name__} is not known to step each element by itself, and a "
        "rank has a part of each parameter only. Pass per_element=True if it does; an optimizer "
        "that needs whole parameters, such as LBFGS, Muon or Adafactor, cannot be sharded"
    )
