import sys
from pathlib import Path

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train_rank(config):
    sys.path.insert(0, config["folder"])
    from model import make_batches, make_model, result, train

    model = prepare_model(make_model())
    train(model, make_batches(dist.get_rank()))
    if dist.get_rank() == 0:
        Path(config["out"]).write_text(result(dist.get_backend(), model.parameters()))


if __name__ == "__main__":
    backend, out = sys.argv[1:]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train_rank,
        train_loop_config={"folder": str(Path(__file__).parent), "out": f"{out}/result"},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=out),
    ).fit()
    print(Path(out, "result").read_text())
