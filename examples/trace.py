"""A timeline of all ranks: open the file in https://ui.perfetto.dev.

    python examples/trace.py run.json

Rank 1 is late on purpose: the picture and the table show how long rank 0 waited for it.
"""

import sys
import time

import torch
import torch.distributed as dist

import dreamcomm


def work(path: str) -> None:
    """Runs on every rank; the trace is written when the block ends."""
    tensor = torch.ones(1 << 16)
    with dreamcomm.trace(path):
        for _ in range(20):
            if dist.get_rank() == 1:
                time.sleep(0.002)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        dist.barrier()


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "run.json"
    # With a log, rank 0 also prints a table when the group ends.
    dreamcomm.spawn(work, 2, args=(path,), options=dreamcomm.Options(log=True))
    print(f"wrote {path}")
