"""A method's state on its way into a checkpoint and back: one function each, for all methods."""

import dataclasses
import types
from typing import Any, get_args, get_type_hints

from torch import Tensor


def to_plain(state: Any) -> Any:
    """Dataclasses as dictionaries; tensors and numbers stay. Loads with `weights_only=True`."""
    if not dataclasses.is_dataclass(state):
        return state
    return {f.name: to_plain(getattr(state, f.name)) for f in dataclasses.fields(state)}


def from_plain(kind: Any, plain: Any) -> Any:
    """The inverse, by the declared types.

    Args:
        kind: The type of what was made plain; a dataclass, an optional one, or anything else.
        plain: What `to_plain` gave.
    """
    if isinstance(kind, types.UnionType):
        [kind] = [k for k in get_args(kind) if k is not types.NoneType]
    if plain is None or not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
        return plain.clone() if isinstance(plain, Tensor) else plain
    hints = get_type_hints(kind)
    return kind(**{name: from_plain(hints[name], value) for name, value in plain.items()})
