"""The public name of :mod:`dreamcomm.ddp.hooks`."""

from dreamcomm.ddp.hooks import State, average, bf16, bf16_feedback, fp16, fp16_feedback
from dreamcomm.ddp.hooks import __doc__ as __doc__
from dreamcomm.ddp.int8 import int8_feedback

__all__ = ["State", "average", "bf16", "bf16_feedback", "fp16", "fp16_feedback", "int8_feedback"]
