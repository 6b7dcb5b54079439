"""SLURM: a job whose time is up is queued again and goes on in its folder.

With `#SBATCH --signal=USR1@120` SLURM sends SIGUSR1 two minutes before the time is up. The run
saves a checkpoint and asks to be queued again. SLURM then runs the same command, which finds the
folder of its first part by the job and the settings in a file there.
"""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

from dlmi.errors import RunStopped
from dlmi.jsonl import read_json_file

_NOTE = "slurm.json"


def job_id() -> str | None:
    """Id of the job of this process, as `scontrol` takes it; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    return found if found and re.fullmatch(r"[0-9]+(_[0-9]+)?", found) else None


def leave_note(folder: Path, settings: str) -> None:
    """Write the job and a hash of the settings to a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(json.dumps(_note(settings)) + "\n", encoding="utf-8")


def earlier_folder(runs: Path, settings: str) -> Path | None:
    """The folder of a run that this job began with these settings before it was queued again."""
    if not int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0):
        return None
    notes = sorted(runs.glob(f"*/{_NOTE}"))
    return next((n.parent for n in notes if read_json_file(n) == _note(settings)), None)


def _note(settings: str) -> dict[str, str | None]:
    """One job may run several commands, so their settings tell them apart."""
    return {"job": job_id(), "settings": hashlib.sha256(settings.encode()).hexdigest()[:16]}


def requeue() -> None:
    """Put this job back into the queue; `RunStopped` if SLURM refuses."""
    job = job_id()
    assert job is not None
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        raise RunStopped(
            f"the run is saved, but `scontrol requeue {job}` failed ({reason}). Submit it again "
            "with the command above."
        ) from error
