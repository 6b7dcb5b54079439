"""Where a run was measured, and what makes it the same run when it goes on."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from dlmi.errors import InputError
from dlmi.lm.frozen_lm import FrozenLM
from dlmi.rows import Inversion
from dlmi.version import __version__

_FORMAT = 2  # of checkpoints; those without a number were of methods that were LightningModules


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


def run_identity(
    method: str, settings: dict[str, Any], environment: Mapping[str, Any], allowed_ids: str
) -> dict[str, Any]:
    """What must be the same for a run to go on; slots and workers may differ."""
    return {
        "format": _FORMAT,
        "method": method,
        **{f"model.{name}": value for name, value in settings.items()},
        "model.allowed_tokens as ids": allowed_ids,
        "data.lm fingerprint": environment["fingerprint"],
        "data.dtype": environment["dtype"],
        "targets": environment["target_set"],
    }


def check_checkpoint(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise `InputError` unless the identity that a checkpoint holds is that of the run."""
    if saved.get("format") != _FORMAT:
        raise InputError(
            "Expected `ckpt_path` to come from this version of dlmi, but it was made by an earlier "
            "one. Finish that run with its own version, or start anew without `ckpt_path`."
        )
    way_out = "Resume with the run's own config.yaml, or start anew without `ckpt_path`."
    _check_same(saved, identity, "`ckpt_path`", way_out)


def check_row(row: Inversion, identity: dict[str, Any]) -> None:
    """Raise `InputError` unless a row of the run's folder could have come from this run."""
    allowed_ids = identity["model.allowed_tokens as ids"]  # not in a row
    found = run_identity(row.method, row.settings, vars(row), allowed_ids)
    found = _as_asked(found, identity)
    what = f"the row of {row.target_id} in the run's folder"
    _check_same(found, identity, what, "Go on with the run's own settings, or in another folder.")


def _as_asked(found: Any, asked: Any) -> Any:
    """Values with `auto` where that was asked for: a row holds what was chosen."""
    if isinstance(found, dict) and isinstance(asked, dict):
        return {name: _as_asked(value, asked.get(name)) for name, value in found.items()}
    return asked if asked == "auto" else found


def _check_same(found: dict[str, Any], identity: dict[str, Any], what: str, way_out: str) -> None:
    for name, value in identity.items():
        if found.get(name) != value:
            raise InputError(
                f"Expected {what} to come from a run with {name} = {value!r}, but it was made "
                f"with {found.get(name)!r}. {way_out}"
            )
