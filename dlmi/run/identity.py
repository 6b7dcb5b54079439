"""What makes a run the same run: a checkpoint, or rows on disk, of another are refused."""

from typing import TYPE_CHECKING, Any

from dlmi.errors import InputError
from dlmi.methods.base import settings_of
from dlmi.rows import Inversion
from dlmi.targets.target import fingerprint_targets

if TYPE_CHECKING:  # only for annotations: the inverter imports this module
    from dlmi.run.inverter import Inverter

_FORMAT = 2  # of checkpoints; before it was counted, methods were LightningModules themselves


def run_settings(module: "Inverter") -> dict[str, Any]:
    """The arguments of a run and of its method as a JSON file has them, and what it trained in.

    Values that the run takes from its method are filled in. `precision` is that of the training
    passes, None for the LM's own dtype, which all measurements are in.
    """
    method = settings_of(module.method)
    own_scale = method.get("norm_gradient_scale", 1.0)
    precision = module.trainer.precision
    return {
        **method,
        "prompt_length": module.prompt_length,
        "steps": module.budget.steps,
        "token_budget": module.budget.token_passes,
        "eval_every": module.eval_every,
        "prompt_bos": module.prompt_bos,
        "allowed_tokens": module.allowed_tokens,
        "forbid_target_tokens": module.forbid_target_tokens,
        "fluency": module.fluency,
        "norm_gradient_scale": (
            own_scale if module.norm_gradient_scale is None else module.norm_gradient_scale
        ),
        "seed": module.seed,
        "precision": None if precision == "32-true" else precision,
    }


def run_identity(module: "Inverter") -> dict[str, Any]:
    """What must be the same for a checkpoint to be resumed; slots and workers may differ."""
    return {
        "format": _FORMAT,
        "method": type(module.method).__name__,
        **{f"model.{name}": value for name, value in run_settings(module).items()},
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
    if saved.get("format") != identity["format"]:
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


def check_row(row: Inversion, method: str, settings: dict[str, Any], **columns: str) -> None:
    """Raise `InputError` unless a row could have come from the run that is to go on.

    Args:
        row: From the run's folder.
        method: Name of the method.
        settings: Arguments of the run and its method.
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
