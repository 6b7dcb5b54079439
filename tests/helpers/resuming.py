"""Runs that were stopped and go on."""

import torch

from dlmi.rows import read_rows
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.run.callbacks.results import ResultWriter
from helpers.runs import StopAfter, comparable


def stop_and_resume(make_method, make_data, fit, folder, stop_after=5, slots=None):
    """Rows by target of a run that is stopped after some steps, then resumed.

    Args:
        make_method: Makes the inverter.
        make_data: Makes the data module, of `batch_size` slots where that is given.
        fit: The fixture.
        folder: Of the run.
        stop_after: Steps after which it is stopped.
        slots: How many the resumed run has; default: as many as before.
    """
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    stop = [ResultWriter(), RunCheckpoint(), StopAfter(stop_after)]
    fit(make_method(), make_data(), callbacks=stop, **options)
    stopped = read_rows(folder)
    assert any(row.stop_reason == "interrupted" for row in stopped)
    path = folder / "checkpoints" / "last.ckpt"
    torch.load(path, weights_only=True)
    fit(
        make_method(),
        make_data() if slots is None else make_data(batch_size=slots),
        ckpt_path=path,
        callbacks=[ResultWriter(), RunCheckpoint()],
        **options,
    )
    rows = read_rows(folder)
    found = {row.target_id: row for row in rows}
    assert len(found) == len(rows)  # none twice
    return found


def assert_resumes(make_method, make_data, fit, folder):
    """A run that is stopped after five steps ends as one that is not."""
    expected = fit(make_method(), make_data())
    rows = stop_and_resume(make_method, make_data, fit, folder)
    assert comparable(rows) == comparable(expected)
