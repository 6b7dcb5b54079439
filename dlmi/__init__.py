"""Find the prompt that makes a frozen language model say exactly this.

Public names are imported when they are first used: `import dlmi` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dlmi.version import __version__

if TYPE_CHECKING:  # at run time `__getattr__` imports them
    from dlmi.errors import InputError as InputError
    from dlmi.invert_text import Progress as Progress
    from dlmi.invert_text import invert as invert
    from dlmi.lm.frozen_lm import FrozenLM as FrozenLM
    from dlmi.lm.loading import load_lm as load_lm
    from dlmi.methods import *  # noqa: F403
    from dlmi.rows import Inversion as Inversion
    from dlmi.rows import read_rows as read_rows
    from dlmi.run.data import TargetDataModule as TargetDataModule
    from dlmi.run.inverter import Inverter as Inverter
    from dlmi.targets.target import Target as Target
    from dlmi.tokens.vocabulary import Vocabulary as Vocabulary

_METHODS = (
    *("ADC", "ARCA", "AutoPrompt", "DLMI", "GBDA", "GCG", "MAC", "PEZ", "PGD"),
    *("REINFORCE", "RandomSearch", "Refined", "SODA", "SwapSearch"),
)
_HOME = {
    **dict.fromkeys(_METHODS, "dlmi.methods"),
    **dict.fromkeys(("Inversion", "read_rows"), "dlmi.rows"),
    **dict.fromkeys(("Progress", "invert"), "dlmi.invert_text"),
    "FrozenLM": "dlmi.lm.frozen_lm",
    "InputError": "dlmi.errors",
    "Inverter": "dlmi.run.inverter",
    "Target": "dlmi.targets.target",
    "TargetDataModule": "dlmi.run.data",
    "Vocabulary": "dlmi.tokens.vocabulary",
    "load_lm": "dlmi.lm.loading",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dlmi' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
