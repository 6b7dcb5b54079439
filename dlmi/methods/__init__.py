"""The methods. Importing them here makes their short names valid as `model.class_path`."""

from dlmi.methods.adc import ADC
from dlmi.methods.dlmi import DLMI
from dlmi.methods.echo_search import EchoSearch
from dlmi.methods.gbda import GBDA
from dlmi.methods.gcg import GCG
from dlmi.methods.pez import PEZ
from dlmi.methods.reinforce import REINFORCE
from dlmi.methods.soda import SODA

__all__ = ["ADC", "DLMI", "GBDA", "GCG", "PEZ", "REINFORCE", "SODA", "EchoSearch"]
