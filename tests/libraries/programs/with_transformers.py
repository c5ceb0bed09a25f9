import sys

import torch
import torch.distributed as dist
from model import report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

dist.init_process_group(sys.argv[1])  # before TrainingArguments, which would choose gloo
torch.manual_seed(1)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
rows = torch.Generator().manual_seed(2)
texts = torch.randint(50, (32, 12), generator=rows)
samples = [{"input_ids": text, "labels": int(text.sum()) % 2} for text in texts]
arguments = TrainingArguments(
    output_dir=sys.argv[2],
    use_cpu=True,
    per_device_train_batch_size=4,
    num_train_epochs=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=samples).train()
report(dist.get_backend(), model.parameters())
dist.destroy_process_group()
