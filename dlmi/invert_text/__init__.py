"""For one text: find its prompt, in one call or one command, with no files."""

from dlmi.invert_text.found import FoundPrompt
from dlmi.invert_text.one_call import invert
from dlmi.invert_text.search import Progress

__all__ = ["FoundPrompt", "Progress", "invert"]
