"""For one text: find its prompt, in one call or one command, with no files."""

from dlmi.invert_text.progress import Progress
from dlmi.invert_text.search import invert

__all__ = ["Progress", "invert"]
