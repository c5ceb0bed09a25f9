"""Imports torch's own distributed tests so that a backend of any name may answer them.

The tests are the class ``_DistTestBase`` that ships inside every torch wheel. Most of
them carry a condition on the backend's name ("only gloo ...", "only mpi ...") that is
read while the module is imported. Here those conditions see a name that equals all of
``SHOWN``, so every backend is asked the same questions, while the ranks call
``init_process_group`` with the real name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import ModuleType

SHOWN = ("gloo", "mpi")


@dataclass(frozen=True)
class Case:
    """One run of the suite: who answers, in how large a world, with which devices."""

    backend: str
    world: int
    pretend_gpus: bool = False
    timeout: int = 60  # seconds for one test
    hosts: str = ""  # of the ranks, "a,a,b,b", or as found

    @property
    def plain(self) -> Case:
        """That of one host, which tells what has to pass."""
        return replace(self, hosts="")

    @property
    def label(self) -> str:
        label = f"world-{self.world}" + ("-pretend-gpus" if self.pretend_gpus else "")
        return f"{label}-hosts-{self.hosts.replace(',', '')}" if self.hosts else label


class BackendName(str):
    """A backend name that also equals some other names."""

    also: frozenset[str]

    def __new__(cls, name: str, also: tuple[str, ...] = ()) -> BackendName:
        self = super().__new__(cls, name)
        self.also = frozenset((name, *also))
        return self

    def __eq__(self, other: object) -> bool:
        return other in self.also

    def __ne__(self, other: object) -> bool:
        return other not in self.also

    __hash__ = str.__hash__


def import_suite(case: Case) -> ModuleType:
    """Returns torch's test module, its conditions answered for `case`."""
    os.environ["WORLD_SIZE"] = str(case.world)
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(case.timeout)

    from torch.testing._internal import common_distributed

    for feature in ("ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(case.backend)
    for name in list(common_distributed.TIMEOUT_OVERRIDE):
        common_distributed.TIMEOUT_OVERRIDE[name] = case.timeout

    suite = _import_showing(BackendName(SHOWN[0], SHOWN))
    # From here on the name is the real one, which still equals the ones shown.
    suite.BACKEND = BackendName(case.backend, SHOWN)
    # The variable is read again only to leave sub-group tests out of worlds under 8,
    # or odd ones, unless it says mpi; their groups need 3 ranks.
    os.environ["BACKEND"] = SHOWN[1] if case.world > 2 else case.backend
    # Profiler events are looked for with the backends of these lists only.
    for names in (
        suite.PROFILING_SUPPORTED_BACKENDS,
        suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append(case.backend)
    return suite


def _import_showing(shown: BackendName) -> ModuleType:
    """Imports the suite while os.environ["BACKEND"] reads as `shown`.

    os.environ holds plain strings only, so the lookup itself is replaced meanwhile.
    """
    environ = type(os.environ)
    getitem = environ.__getitem__

    def lookup(self: os._Environ[str], key: str) -> str:
        return shown if key == "BACKEND" else getitem(self, key)

    environ.__getitem__ = lookup  # type: ignore[method-assign]
    try:
        from torch.testing._internal.distributed import distributed_test
    finally:
        environ.__getitem__ = getitem  # type: ignore[method-assign]
    return distributed_test
