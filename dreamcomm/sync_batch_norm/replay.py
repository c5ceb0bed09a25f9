"""A rank without data repeats the calls of its last step, with no rows, while others train on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dreamcomm.sync_batch_norm.calls import Kind, LayerCalls

__all__ = ["Recorder"]


@dataclass
class Recorder:
    """The calls of a step's layers, in their order.

    Attributes:
        calls: each one's layer, and the kind of a forward call; None is a backward call.
    """

    calls: list[tuple[LayerCalls, Kind | None]] = field(default_factory=list)

    def note_forward(self, calls: LayerCalls, kind: Kind) -> None:
        self.calls.append((calls, kind))

    def note_backward(self, calls: LayerCalls) -> None:
        self.calls.append((calls, None))

    def replay(self) -> None:
        """Makes the same calls without rows. Collective with the other ranks' step.

        Raises:
            RuntimeError: as :meth:`LayerCalls.gather` and :meth:`LayerCalls.add`.
        """
        for calls, kind in self.calls:
            if kind is None:
                calls.add(torch.zeros(2 * calls.channels, dtype=torch.float64, device="cpu"))
            else:
                calls.gather(kind, 0)
