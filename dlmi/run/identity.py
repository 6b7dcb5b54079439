"""What makes a run the same run: a checkpoint, or rows on disk, of another are refused."""

from typing import Any

from dlmi.errors import InputError
from dlmi.rows import Inversion

_FORMAT = "format"
CHECKPOINT_FORMAT = 2  # before it was counted, methods were LightningModules themselves


def run_identity(
    method: str, settings: dict[str, Any], fingerprint: str | None, dtype: str, target_set: str
) -> dict[str, Any]:
    """What must be the same for a run to go on; slots and workers may differ.

    Args:
        method: Name of the method.
        settings: Arguments of the run and its method.
        fingerprint: Of the LM.
        dtype: Of the LM.
        target_set: Fingerprint of the targets.
    """
    return {
        "method": method,
        **{f"model.{name}": value for name, value in settings.items()},
        "data.lm fingerprint": fingerprint,
        "data.dtype": dtype,
        "targets": target_set,
    }


def check_checkpoint(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise `InputError` unless a checkpoint was made by the run that is to go on.

    Args:
        saved: The identity that the checkpoint holds.
        identity: That of the run.
    """
    if saved.get(_FORMAT) != identity[_FORMAT]:
        raise InputError(
            "Expected `ckpt_path` to come from this version of dlmi, but it was made by an earlier "
            "one, whose checkpoints cannot be continued. Finish that run with the version that "
            "began it, or start anew without `ckpt_path`."
        )
    for name, value in identity.items():
        if saved.get(name) != value:
            raise InputError(
                f"Expected `ckpt_path` to come from a run with {name} = {value!r}, but it was "
                f"made with {saved.get(name)!r}. Resume with the run's own config.yaml, or start "
                "anew without `ckpt_path`."
            )


def check_row(row: Inversion, identity: dict[str, Any]) -> None:
    """Raise `InputError` unless a row of the run's folder could have come from this run."""
    found = run_identity(row.method, row.settings, row.fingerprint, row.dtype, row.target_set)
    for name, value in identity.items():
        if found.get(name) != value:
            raise InputError(
                f"Expected the rows of the run's folder to have {name} = {value!r}, but that of "
                f"{row.target_id} has {found.get(name)!r}. Go on with the run's own settings, or "
                "choose another folder."
            )
