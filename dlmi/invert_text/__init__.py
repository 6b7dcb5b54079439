"""Finds the prompt of one text, in one call or one command, without files."""

from dlmi.invert_text.progress import Progress
from dlmi.invert_text.search import invert

__all__ = ["Progress", "invert"]
