"""The state of a method as a checkpoint holds it: plain values that load with `weights_only`."""

import copy
import dataclasses
from typing import Any

import msgspec


def to_plain(state: Any) -> Any:
    """Dataclasses as dictionaries; tensors and numbers stay."""
    if not dataclasses.is_dataclass(state):
        return state
    return {f.name: to_plain(getattr(state, f.name)) for f in dataclasses.fields(state)}


def from_plain(kind: Any, plain: Any) -> Any:
    """The inverse, by the type that was made plain; shares no memory with what it is given."""
    return msgspec.convert(copy.deepcopy(plain), kind)
