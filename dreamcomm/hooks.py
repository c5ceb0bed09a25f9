"""Communication hooks for torch's DistributedDataParallel: :mod:`dreamcomm.ddp.hooks`."""

from dreamcomm.ddp.hooks import State, average, bf16, bf16_feedback, fp16, fp16_feedback

__all__ = ["State", "average", "bf16", "bf16_feedback", "fp16", "fp16_feedback"]
