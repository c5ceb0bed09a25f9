"""The options of a pipeline that need no module: their types and values."""

from __future__ import annotations

from typing import Any

from dreamcomm.buckets.averages import TOKENS
from dreamcomm.buckets.scaling import GradScaler

__all__ = ["check_options", "check_types", "described_scaler", "scaling_of"]

COUNT = "count"
SCALES: dict[str, bool | str] = {"mean": True, "sum": False, TOKENS: COUNT}


def check_types(
    n_microbatches: Any, loss_fn: Any, accumulate: Any, checkpoint: Any, seed: Any, scaler: Any
) -> None:
    """Raises TypeError; every rank has the same arguments here, or a mistake that it sees first."""
    whole: list[tuple[str, Any]] = [("n_microbatches", n_microbatches), ("accumulate", accumulate)]
    for name, value in (*whole, *([] if seed is None else [("seed", seed)])):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"Pipeline: expected {name} to be a whole number, got {value!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"Pipeline: expected loss_fn to be callable or None, got {loss_fn!r}")
    if not isinstance(checkpoint, bool):
        raise TypeError(f"Pipeline: expected checkpoint True or False, got {checkpoint!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"Pipeline: expected scaler to be a dreamcomm.GradScaler or None, got {type(scaler)}: "
            "torch's would decide for one rank alone"
        )


def described_scaler(scaler: GradScaler | None) -> str:
    """What ranks have to have in common of their scalers."""
    if scaler is None or not scaler.is_enabled():
        return "none"
    numbers = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    return f"GradScaler{numbers}"


def scaling_of(reduce: Any, scale_grads: Any) -> bool | str:
    """What ``scale_grads`` is, where either of the two is given; wrong ones stay as they are."""
    if scale_grads is not None:
        return scale_grads  # type: ignore[no-any-return]
    return SCALES.get(reduce, True) if isinstance(reduce, str) else True


def check_options(reduce: Any, scale_grads: Any, accumulate: int, loss: str) -> None:
    """Raises ValueError, once all ranks have agreed on the options."""
    if reduce is not None and reduce not in list(SCALES):
        raise ValueError(f'expected reduce "mean", "sum" or "tokens", got {reduce!r}')
    if scale_grads is not None and not isinstance(scale_grads, bool) and scale_grads != COUNT:
        raise ValueError(f'expected scale_grads True, False or "count", got {scale_grads!r}')
    if None not in (reduce, scale_grads) and SCALES[reduce] != scale_grads:
        raise ValueError(
            f"reduce={reduce!r} is scale_grads={SCALES[reduce]!r}, got "
            f"scale_grads={scale_grads!r}, too: leave one of them out"
        )
    if accumulate < 1:
        raise ValueError(f"expected accumulate of at least 1, got {accumulate}")
    scales = scaling_of(reduce, scale_grads)
    if accumulate > 1 and scales is not True:
        raise ValueError(
            f"accumulate={accumulate} divides gradients that scale_grads=True scales; with "
            f"scale_grads={scales!r} leave it out"
        )
    if loss not in ("last", "all"):
        raise ValueError(f'expected loss "last" or "all", got {loss!r}')
