"""A rank of torchrun: trains, keeps a checkpoint, and once is killed in the middle.

torchrun ... elastic_worker.py BACKEND FOLDER KILL_AT [waits]

With "waits" rank 2 says that it is there, and waits until somebody else kills it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from training.models import STEPS, Mlp, adam, batch, loss_of, shard


def main(backend: str, folder: Path, kill_at: int, waits: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Mlp())
    optimizer = adam(model.parameters())
    point = folder / "point.pt"
    first, losses = 0, []
    if point.exists():
        state = torch.load(point)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["next"], state["losses"]
    for step in range(first, STEPS):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if step == kill_at and rank == (2 if waits else 1) and is_first:
            if waits:
                (folder / "waits").touch()
                time.sleep(300)
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = (shard(part, rank, world) for part in batch(step))
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "next": step + 1, "losses": losses}, folder / "new.pt")
            (folder / "new.pt").rename(point)
        dist.barrier()  # nobody goes on before the checkpoint is there
    if rank == 0:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        found = {"losses": losses, "resumed_at": first, "restarts": restarts}
        (folder / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), "waits" in sys.argv[4:])
