"""Nulls in settings: jsonargparse takes them for a value of any type."""

import dataclasses
import importlib
import inspect
from typing import Any

from jsonargparse import Namespace

from dlmi.errors import InputError


def refuse_nulls(config: Namespace, **sections: type) -> None:
    """Raise `InputError` for a null where there must be a value.

    Args:
        config: As parsed.
        sections: Names of its sections, and the class that each is made into.
    """
    for name, cls in sections.items():
        _refuse(config[name], cls, name)


def _refuse(settings: Any, cls: type, name: str) -> None:
    if not isinstance(settings, Namespace):
        return
    parameters = inspect.signature(cls).parameters
    for key, value in settings.items(branches=True, nested=False):
        parameter = parameters.get(key)
        if parameter is None:
            continue
        if value is None and parameter.default is not None:
            raise InputError(
                f"Expected `{name}.{key}` to have a value, but got null. Leave it out."
            )
        if isinstance(value, Namespace) and "class_path" in value:
            made_of = value.get("init_args")
            _refuse(made_of, _class_of(value.class_path), f"{name}.{key}")
        elif dataclasses.is_dataclass(default := parameter.default):
            _refuse(value, type(default), f"{name}.{key}")


def _class_of(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
