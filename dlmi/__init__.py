"""Find the prompt that makes a frozen language model say exactly this."""

from dlmi.data import TargetDataModule
from dlmi.errors import InputError
from dlmi.invert_text import FoundPrompt, Progress, invert
from dlmi.inverter import Inverter
from dlmi.lm import FrozenLM
from dlmi.methods import DLMI
from dlmi.models import load_lm
from dlmi.results import Inversion, read_rows
from dlmi.targets import Target
from dlmi.version import __version__
from dlmi.vocabulary import Vocabulary

__all__ = [
    "DLMI",
    "FoundPrompt",
    "FrozenLM",
    "InputError",
    "Inversion",
    "Inverter",
    "Progress",
    "Target",
    "TargetDataModule",
    "Vocabulary",
    "__version__",
    "invert",
    "load_lm",
    "read_rows",
]
