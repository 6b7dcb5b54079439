"""Callbacks: what a run stores and shows. Leaving one out never changes a result."""

from dlmi.callbacks.base import InversionCallback
from dlmi.callbacks.checkpoint import RunCheckpoint
from dlmi.callbacks.gradients import GradientStudy
from dlmi.callbacks.progress import InversionProgress
from dlmi.callbacks.results import ResultWriter
from dlmi.callbacks.tensorboard import TensorBoardDetails

__all__ = [
    "GradientStudy",
    "InversionCallback",
    "InversionProgress",
    "ResultWriter",
    "RunCheckpoint",
    "TensorBoardDetails",
]
