"""Find the prompt that makes a frozen language model say exactly this."""

from dlmi.data import TargetDataModule
from dlmi.errors import InputError
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
    "FrozenLM",
    "InputError",
    "Inversion",
    "Inverter",
    "Target",
    "TargetDataModule",
    "Vocabulary",
    "__version__",
    "load_lm",
    "read_rows",
]
