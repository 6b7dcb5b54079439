"""A grid of methods, prompt lengths and seeds over one set of targets; each cell is a `fit`."""

from dlmi.compare.command import compare_command

__all__ = ["compare_command"]
