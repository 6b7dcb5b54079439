"""What makes a run the same run: a checkpoint, or rows on disk, of another are refused."""

from typing import TYPE_CHECKING, Any

from dlmi.errors import InputError
from dlmi.framed_targets import fingerprint_targets
from dlmi.results import Inversion

if TYPE_CHECKING:
    from dlmi.inverter import Inverter


def settings_of(module: "Inverter") -> dict[str, Any]:
    """A method's arguments as a JSON file has them: tuples are lists; and what it trained in.

    `precision` is that of the training passes, None for the LM's own dtype, which all measurements
    are in.
    """
    public = {name: value for name, value in module.hparams.items() if not name.startswith("_")}
    settings = {name: list(v) if isinstance(v, tuple) else v for name, v in public.items()}
    precision = module.trainer.precision
    return {**settings, "precision": None if precision == "32-true" else precision}


def run_identity(module: "Inverter") -> dict[str, Any]:
    """What must be the same for a checkpoint to be resumed; slots and ranks may differ."""
    return {
        "method": type(module).__name__,
        **{f"model.{name}": value for name, value in settings_of(module).items()},
        "model.allowed_tokens as ids": module.vocabulary.fingerprint(),
        "data.lm fingerprint": module.lm.fingerprint(),
        "data.dtype": module.lm.dtype_name,
        "targets": fingerprint_targets(module.data.targets),
    }


def check_checkpoint(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise `InputError` unless a checkpoint was made by the run that is to go on.

    Args:
        saved: The identity that the checkpoint holds.
        identity: That of the run.
    """
    for name, value in identity.items():
        if saved.get(name) != value:
            raise InputError(
                f"Expected `ckpt_path` to come from a run with {name} = {value!r}, but it was "
                f"made with {saved.get(name)!r}. Resume with the run's own config.yaml, or start "
                "anew without `ckpt_path`."
            )


def check_row(row: Inversion, method: str, settings: dict[str, Any], **columns: str) -> None:
    """Raise `InputError` unless a row could have come from the run that is to go on.

    Args:
        row: From the run's folder.
        method: Class of the inverter.
        settings: Its arguments.
        columns: Further columns that must be the same.
    """
    for name, value in {"method": method, **columns}.items():
        if getattr(row, name) != value:
            raise _foreign(row, name, value, getattr(row, name))
    for name, value in settings.items():
        if row.settings.get(name) != value:
            raise _foreign(row, f"model.{name}", value, row.settings.get(name))


def _foreign(row: Inversion, name: str, expected: Any, got: Any) -> InputError:
    return InputError(
        f"Expected the rows of the run's folder to have {name} = {expected!r}, but that of "
        f"{row.target_id} has {got!r}. Go on with the run's own settings, or choose another folder."
    )
