"""transformers' Trainer over gloo with torch's DistributedDataParallel, or over dreamcomm with
dreamcomm's."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model import report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import dreamcomm

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])


class DreamTrainer(Trainer):
    def _wrap_model(self, model, training=True, dataloader=None):
        model = super()._wrap_model(model, training, dataloader)
        if not training or isinstance(model, dreamcomm.DistributedDataParallel):
            return model
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
        settings = self.accelerator.ddp_handler.to_kwargs()
        return dreamcomm.DistributedDataParallel(model, **settings)


def make_model():
    """A layer is as large as those that are reduced where they are."""
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=1024,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def make_samples():
    rows = torch.Generator().manual_seed(2)
    texts = torch.randint(50, (32, 12), generator=rows)
    return [{"input_ids": text, "labels": int(text.sum()) % 2} for text in texts]


def train(name, resume=False, **settings):
    """The weights at the end, and what was logged."""
    samples = make_samples()
    arguments = TrainingArguments(
        output_dir=str(FOLDER / name),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        ddp_bucket_cap_mb=1,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    kind = DreamTrainer if BACKEND == "dreamcomm" else Trainer
    trainer = kind(make_model(), arguments, train_dataset=samples, eval_dataset=samples)
    trainer.train(resume_from_checkpoint=str(FOLDER / name / "checkpoint-2") if resume else None)
    wrapper = type(trainer.model_wrapped)
    assert issubclass(wrapper, torch.nn.parallel.DistributedDataParallel)
    assert (wrapper is dreamcomm.DistributedDataParallel) == (BACKEND == "dreamcomm"), wrapper
    assert trainer.model_wrapped.bucket_bytes_cap == 1 << 20
    logged = [log[key] for log in trainer.state.log_history for key in LOGGED if key in log]
    assert len(logged) == 2 * trainer.state.global_step + 2
    return [*trainer.model.parameters(), torch.tensor(logged)]


LOGGED = ("loss", "grad_norm", "eval_loss")


def main() -> None:
    dist.init_process_group(BACKEND)  # before TrainingArguments, which would choose gloo
    found = train("float32")
    again = train("float32", resume=True)
    assert all(map(torch.equal, found, again))
    report(dist.get_backend(), found + train("bfloat16", bf16=True, gradient_checkpointing=True))
    dist.destroy_process_group()


main()
