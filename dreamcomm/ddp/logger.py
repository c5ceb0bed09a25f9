"""The face of torch's Logger: what DistributedDataParallel's clients ask it for."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Logger"]


@dataclass
class Logger:
    """Settings of a wrapped module, by the names that torch's logging data has.

    Attributes:
        strs_map, ints_map: as torch's ``DDPLoggingData`` has them.
    """

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)

    def set_error_and_log(self, error: str) -> None:
        self.strs_map["error"] = error
        self.ints_map["has_error"] = 1

    def set_runtime_stats_and_log(self) -> None:
        """Does nothing: the reducer takes the times."""

    def _set_comm_hook_name(self, name: str) -> None:
        self.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> Logger:
        return self
