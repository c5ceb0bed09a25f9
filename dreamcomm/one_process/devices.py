"""The devices that a user gives to DataParallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Devices", "read_devices"]

DEFAULT_REPLICAS = 2


@dataclass(frozen=True)
class Devices:
    """Where replicas run.

    Attributes:
        replicas: how many in threads, on CPUs; 0 on GPUs.
        cores: those of each replica, or None.
        gpus: what torch's class is given.
    """

    replicas: int
    cores: list[list[int]] | None = None
    gpus: Any = None


def read_devices(given: Any, output_device: Any) -> Devices:
    """Reads the arguments ``device_ids`` and ``output_device``.

    Raises:
        ValueError: they name what is not there, or contradict each other.
    """
    devices = _read(given)
    if devices.replicas and output_device not in (None, -1, "cpu", torch.device("cpu")):
        raise ValueError(
            f"output_device={output_device!r}: outputs of CPU replicas are joined on the CPU; move "
            "them afterwards"
        )
    return devices


def _read(given: Any) -> Devices:
    if given is None:
        return Devices(0) if _has_gpus() else Devices(DEFAULT_REPLICAS)
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ValueError(f"device_ids={given}: a number of CPU replicas is 1 or more")
        return Devices(given)
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(
            f"device_ids={given!r}: give a number of CPU replicas, a list of cores for each, as "
            "[[0, 1], [2, 3]], or GPUs"
        )
    if all(
        isinstance(one, Sequence | set | frozenset) and not isinstance(one, str) for one in given
    ):
        return Devices(len(given), _read_cores(given))
    if all(not isinstance(one, int) and torch.device(one).type == "cpu" for one in given):
        return Devices(len(given))
    if not _has_gpus():
        raise ValueError(
            f"device_ids={given!r} names GPUs, and torch finds none here: give a number of CPU "
            "replicas, as 2, or a list of cores for each, as [[0, 1], [2, 3]]"
        )
    return Devices(0, gpus=given)


def _read_cores(given: Sequence[Any]) -> list[list[int]]:
    cores = [sorted(one) for one in given]
    flat = [core for one in cores for core in one]
    allowed = os.sched_getaffinity(0)
    if not all(cores) or len(set(flat)) != len(flat) or not set(flat) <= allowed:
        raise ValueError(
            f"device_ids={given!r}: each replica needs cores of its own, out of those that this "
            f"process may use: {sorted(allowed)}"
        )
    return cores


def _has_gpus() -> bool:
    return torch.accelerator.is_available()
