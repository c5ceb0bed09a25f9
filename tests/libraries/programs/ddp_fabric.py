"""Lightning Fabric over gloo with torch's DistributedDataParallel, or over dreamcomm with
dreamcomm's."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from model import ROWS, make_dataset, make_model, report

import dreamcomm

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])


class DreamFabricStrategy(DDPStrategy):
    def setup_module(self, module):
        devices = self._determine_ddp_device_ids()
        return dreamcomm.DistributedDataParallel(module, device_ids=devices, **self._ddp_kwargs)


def main() -> None:
    kind = DreamFabricStrategy if BACKEND == "dreamcomm" else DDPStrategy
    strategy = kind(process_group_backend=BACKEND)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    whole = make_model(hidden=1024)
    model, optimizer = fabric.setup(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(make_dataset(2), ROWS))
    for number, (rows, labels) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(torch.nn.functional.cross_entropy(model(rows), labels))
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(FOLDER / "saved", {"model": model})
    names = torch.load(FOLDER / "saved", weights_only=True)["model"]
    assert set(names) == set(whole.state_dict())
    wrapper = type(model._forward_module)
    assert (wrapper is dreamcomm.DistributedDataParallel) == (BACKEND == "dreamcomm"), wrapper
    report(dist.get_backend(), whole.parameters())


main()
