"""The methods. Importing them here makes their short names valid as `model.class_path`."""

from dlmi.methods.dlmi import DLMI

__all__ = ["DLMI"]
