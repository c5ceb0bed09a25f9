"""A rank of torchrun: trains a sharded optimizer, keeps a checkpoint, and once is killed.

torchrun ... resuming_worker.py FOLDER KILL_AT HOW

HOW is as in checkpoints.build. Rank 1 is killed before it steps in step KILL_AT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from dreamcomm import zero
from zero.checkpoints import build, put, state_of, train

STEPS = 6


def main(folder: Path, kill_at: int, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("dreamcomm")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    module, optimizer = build("odd", "adamw", how)
    first, losses = 0, torch.zeros(STEPS, dist.get_world_size())
    point = folder / "point"
    if restarts > 0:
        state = {**state_of(module, optimizer), "next": 0, "losses": losses}
        zero.load(state, point)
        put(module, optimizer, state)
        first = state["next"]
    for step in range(first, STEPS):
        if step == kill_at and rank == 1 and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        (mine,) = train(module, optimizer, range(step, step + 1))
        every = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor([mine]))
        losses[step] = torch.cat(every)
        zero.save({**state_of(module, optimizer), "next": step + 1, "losses": losses}, point)
    if rank == 0:
        found = {"losses": losses.tolist(), "resumed_at": first, "restarts": restarts}
        (folder / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
