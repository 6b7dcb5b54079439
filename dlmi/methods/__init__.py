"""The methods, an equation a file. Importing them here makes their short names valid in configs."""

from dlmi.methods.adc import ADC
from dlmi.methods.arca import ARCA
from dlmi.methods.autoprompt import AutoPrompt
from dlmi.methods.dlmi import DLMI
from dlmi.methods.gbda import GBDA
from dlmi.methods.gcg import GCG
from dlmi.methods.mac import MAC
from dlmi.methods.pez import PEZ
from dlmi.methods.pgd import PGD
from dlmi.methods.random_search import RandomSearch
from dlmi.methods.refined import Refined
from dlmi.methods.reinforce import REINFORCE
from dlmi.methods.soda import SODA
from dlmi.methods.swap_search import SwapSearch

__all__ = [
    "ADC",
    "ARCA",
    "DLMI",
    "GBDA",
    "GCG",
    "MAC",
    "PEZ",
    "PGD",
    "REINFORCE",
    "SODA",
    "AutoPrompt",
    "RandomSearch",
    "Refined",
    "SwapSearch",
]
