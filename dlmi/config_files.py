"""YAML that anyone may have written: refused before it is built where building it would not end.

jsonargparse loads it safely, with no Python objects, but follows aliases without end (a node within
itself, or one that unfolds into billions), and brackets by the ten thousand crash the interpreter.
"""

from typing import Any

import jsonargparse
import yaml

_DEEPEST = 64
_MOST_NODES = 100_000  # with every alias written out

_load = jsonargparse.get_loader("yaml")


def screen_yaml_files() -> None:
    """Have jsonargparse refuse such files and values, wherever it meets them."""
    jsonargparse.set_loader("yaml", _screened_load, exceptions=(yaml.YAMLError,))


def _screened_load(text: str) -> Any:
    check_yaml(text)
    return _load(text)


def check_yaml(text: str) -> None:
    """Raise `YAMLError` for text that nests too deeply, refers to itself or unfolds without end.

    >>> check_yaml("a: &a [*a]")
    Traceback (most recent call last):
    yaml.error.YAMLError: a node refers to itself, or to one that does not exist
    """
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and how many nodes there were before
    sizes: dict[str, int] = {}
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise yaml.YAMLError("a node refers to itself, or to one that does not exist")
            nodes += sizes[event.anchor]
        if len(open_nodes) > _DEEPEST or nodes > _MOST_NODES:
            raise yaml.YAMLError("it is nested too deeply, or unfolds into too many values")
