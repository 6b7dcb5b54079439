"""The methods, an equation a file. Importing them here makes their short names valid in configs."""

from dlmi.methods.adc import ADC
from dlmi.methods.dlmi import DLMI
from dlmi.methods.gbda import GBDA
from dlmi.methods.gcg import GCG
from dlmi.methods.pez import PEZ
from dlmi.methods.refined import Refined
from dlmi.methods.reinforce import REINFORCE
from dlmi.methods.soda import SODA
from dlmi.methods.swap_search import SwapSearch

__all__ = ["ADC", "DLMI", "GBDA", "GCG", "PEZ", "REINFORCE", "SODA", "Refined", "SwapSearch"]
