"""Where a row was measured."""

import importlib.metadata
import platform
from typing import Any

from dlmi.lm.frozen_lm import FrozenLM
from dlmi.version import __version__


def describe_environment(lm: FrozenLM) -> dict[str, Any]:
    """The columns of a row that say where it was measured."""
    packages = ("torch", "lightning", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "model": lm.name,
        "revision": lm.revision,
        "fingerprint": lm.fingerprint(),
        "dtype": lm.dtype_name,
        "device": lm.device.type,
        "versions": {"dlmi": __version__, "python": platform.python_version(), **versions},
    }
