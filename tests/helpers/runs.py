"""Runs, stopped and compared."""

import dataclasses

import pytest
from lightning.pytorch import Callback

VOLATILE = {"seconds": 0.0, "trace": (), "versions": {}}


def comparable(rows):
    """Rows without wall times; the trace keeps its steps and scores."""
    return {
        target_id: (
            dataclasses.replace(row, **VOLATILE),
            [dataclasses.replace(point, seconds=0.0) for point in row.trace],
        )
        for target_id, row in rows.items()
    }


def assert_same(rows, expected):
    """Same prompts, outputs and decisions; losses to rounding (batches add in other orders)."""
    assert rows.keys() == expected.keys()
    for target_id, row in rows.items():
        other = expected[target_id]
        for name in (
            *("prompt_ids", "output_ids", "lcs", "best_step", "steps", "stop_reason"),
            *("forward_tokens", "backward_tokens"),
        ):
            assert getattr(row, name) == getattr(other, name), (target_id, name)
        assert row.discrete_loss == pytest.approx(other.discrete_loss, rel=1e-5)
        if row.best_step:
            assert row.loss == pytest.approx(other.loss, rel=1e-5)


class LossCurve(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append([float(slot.loss) for slot in pl_module.active])


class StopAfter(Callback):
    """A Ctrl-C after a given number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.stop_requested = trainer.global_step >= self.steps
