"""Groups of a form's own, beside the one that it was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dreamcomm._torch.groups import ours

__all__ = ["group_like"]


def group_like(
    group: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, desc: str
) -> dist.ProcessGroup:
    """Another group for CPU tensors, of the same backend, options and timeout. Collective.

    Args:
        group: whose ranks and options they are.
        ranks: of ``group``, those of the new one; None: all.
        desc: what the new one is for.
    """
    everyone = dist.get_process_group_ranks(group)
    device = torch.device("cpu")
    backend = ours(group, device)
    names = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    made: dist.ProcessGroup = dist.new_group(
        everyone if ranks is None else [everyone[one] for one in ranks],
        backend=f"cpu:{names['cpu']}",
        timeout=group._get_backend(device).options._timeout,
        pg_options=None if backend is None else backend.options,
        use_local_synchronization=True,
        group_desc=desc,
    )
    return made
