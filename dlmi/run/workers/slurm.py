"""SLURM: a job that is cut off puts itself back into the queue, and then goes on in its folder.

With `#SBATCH --signal=USR1@120` SLURM sends SIGUSR1 two minutes before the time is up. The run
saves itself and asks to be queued again; SLURM then runs the very same command, which finds the
folder of its first part by the job and the settings that are noted there.
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
    """The job that this process belongs to, as `scontrol` calls it; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    return found if found and re.fullmatch(r"[0-9]+(_[0-9]+)?", found) else None


def leave_note(folder: Path, settings: str) -> None:
    """Note in a run's folder which job and which settings it is of."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(json.dumps(_note(settings)) + "\n", encoding="utf-8")


def earlier_folder(runs: Path, settings: str) -> Path | None:
    """The folder that this job began with these settings before it was queued again."""
    if not int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0):
        return None
    notes = sorted(runs.glob(f"*/{_NOTE}"))
    return next((n.parent for n in notes if read_json_file(n) == _note(settings)), None)


def _note(settings: str) -> dict[str, str | None]:
    """The job, and a short hash of the settings: one job may run several commands."""
    return {"job": job_id(), "settings": hashlib.sha256(settings.encode()).hexdigest()[:16]}


def requeue() -> None:
    """Put this job back into the queue.

    Raises:
        RunStopped: If SLURM does not take it.
    """
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
