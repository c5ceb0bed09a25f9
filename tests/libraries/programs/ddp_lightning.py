"""Lightning over gloo with torch's DistributedDataParallel, or over dreamcomm with dreamcomm's."""

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from model import CLASSES, ROWS, WIDTH, make_dataset, report
from torch import nn

import dreamcomm

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])


class DreamStrategy(DDPStrategy):
    def _setup_model(self, model):
        devices = self.determine_ddp_device_ids()
        return dreamcomm.DistributedDataParallel(model, device_ids=devices, **self._ddp_kwargs)


class Classifier(lightning.LightningModule):
    """Its first gradient is as large as those that are reduced where they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(WIDTH, 1024), nn.BatchNorm1d(1024), nn.ReLU())
        self.head = nn.Linear(1024, CLASSES)
        self.wrappers = set()

    def loss(self, batch):
        rows, labels = batch
        return nn.functional.cross_entropy(self.head(self.body(rows)), labels)

    def training_step(self, batch, _):
        self.wrappers.add(type(self.trainer.strategy.model))
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("validated", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ByHand(Classifier):
    """Steps two optimizers in turn, each after a backward pass that the other has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        self.wrappers.add(type(self.trainer.strategy.model))
        for part, optimizer in zip((self.body, self.head), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.5, "norm")
            assert all(weight.grad is not None for weight in part.parameters())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


def fit(module, checkpoint=None, strategy=None, **settings):
    """The weights, and what was logged. Running statistics differ between ranks."""
    kind = DreamStrategy if BACKEND == "dreamcomm" else DDPStrategy
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kind(process_group_backend=BACKEND, **(strategy or {})),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    data = torch.utils.data.DataLoader(make_dataset(2), ROWS)
    trainer.fit(module, data, data, ckpt_path=checkpoint)
    if checkpoint is None:
        trainer.save_checkpoint(FOLDER / "saved")
    (wrapper,) = module.wrappers
    assert (wrapper is dreamcomm.DistributedDataParallel) == (BACKEND == "dreamcomm"), wrapper
    return [*module.parameters(), *trainer.callback_metrics.values()]


def main() -> None:
    found = fit(Classifier(), max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    names = torch.load(FOLDER / "saved", weights_only=True)["state_dict"]
    assert set(names) == set(Classifier().state_dict())
    found += fit(Classifier(), FOLDER / "saved", max_epochs=2, accumulate_grad_batches=2)
    found += fit(Classifier(), max_epochs=1, precision="bf16-mixed")
    found += fit(ByHand(), strategy={"find_unused_parameters": True}, max_epochs=2)
    report(dist.get_backend(), found)


main()
