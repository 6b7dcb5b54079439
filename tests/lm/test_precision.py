"""Mixed precision reaches the LM's passes and nothing else."""

import pytest
import torch
from helpers.methods import make_inverter
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from dlmi.errors import InputError
from dlmi.run.callbacks.checkpoint import RunCheckpoint
from dlmi.scoring.engine import Engine
from dlmi.scoring.evaluation import evaluate_alone
from dlmi.scoring.verification import target_of

READ = Engine.__call__
FLOAT32 = {torch.float32}
OF_EACH_METHOD = (
    *("dlmi", "dlmi_soft_next_token", "dlmi_rao", "gbda_annealed_final_samples", "reinforce"),
    *("soda", "gcg", "pez", "adc", "swap_search"),
)


class SeenDTypes(Callback):
    """What is really seen: by the LM's layers in a step and outside, by Z and by the optimiser."""

    def __init__(self):
        self.in_step, self.outside, self.kept = set(), set(), set()
        self.is_step = False

    def on_train_start(self, trainer, pl_module):
        for module in pl_module.lm.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.note)

    def read(self, engine, passes):
        """In place of the engine's own: it says when it reads."""
        self.is_step = True
        assert not torch.is_autocast_enabled("cpu")
        found = READ(engine, passes)
        self.is_step = False
        self.kept |= {scores.losses.dtype for scores in found}
        return found

    def note(self, module, inputs, output):
        (self.in_step if self.is_step else self.outside).add(output.dtype)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            self.kept |= {parameter.dtype, parameter.grad.dtype}
        for state in optimizer.state.values():
            self.kept |= {value.dtype for value in state.values() if torch.is_tensor(value)}


@pytest.fixture
def fit_mixed(fit, data, monkeypatch):
    def run(name, **trainer_options):
        seen, targets = SeenDTypes(), data(dtype="float32", per_k=1)
        monkeypatch.setattr(Engine, "__call__", lambda engine, passes: seen.read(engine, passes))
        inverter = make_inverter(name, steps=4, prompt_bos=True)
        rows = fit(inverter, targets, callbacks=[seen], **trainer_options)
        return seen, targets, rows

    return run


@pytest.mark.parametrize("name", OF_EACH_METHOD)
def test_bfloat16_is_for_the_lm_alone_and_rows_verify(name, fit_mixed):
    seen, targets, rows = fit_mixed(name, precision="bf16-mixed")
    assert seen.in_step >= {torch.bfloat16}
    assert seen.outside == FLOAT32, "measurements are in the LM's own dtype"
    assert seen.kept == FLOAT32
    assert len(rows) == 2
    for row in rows.values():
        assert (row.dtype, row.settings["precision"]) == ("float32", "bf16-mixed")
        target = target_of(row, targets.lm.bos_id)
        again = evaluate_alone(targets.lm, row.prompt_ids, target, 0)
        assert (again.output_ids, again.lcs) == (row.output_ids, row.lcs)


def test_float16_on_the_cpu_becomes_bfloat16(fit_mixed):
    with pytest.warns(UserWarning, match="fp16 is not supported on CPU"):
        seen, _, rows = fit_mixed("dlmi", precision="16-mixed")
    assert seen.in_step == {torch.bfloat16}
    assert {row.settings["precision"] for row in rows.values()} == {"bf16-mixed"}


def test_float16_runs_without_a_scaler_that_couples_targets(fit_mixed):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    seen, _, _ = fit_mixed("dlmi", plugins=[plugin])
    assert seen.in_step == {torch.float16}
    assert seen.outside == seen.kept == FLOAT32
    assert plugin.scaler is None


def test_soft_next_tokens_are_not_rounded(data, fit, monkeypatch):
    products = []
    make = Engine._next_embeds

    def noted(self, passes, batch):
        made = make(self, passes, batch)

        def next_embeds(rows, logits, step):
            embeds = made(rows, logits, step)
            products.append((logits.dtype, embeds.dtype))
            return embeds

        return next_embeds

    monkeypatch.setattr(Engine, "_next_embeds", noted)
    inverter = make_inverter("dlmi_soft_next_token", steps=2)
    fit(inverter, data(dtype="float32", per_k=1), precision="bf16-mixed")
    assert set(products) == {(torch.float32, torch.float32)}


def test_a_kept_prefix_is_in_the_lms_own_dtype(data):
    targets = data(dtype="float32")
    targets.load()
    lm = targets.lm
    with torch.autocast("cpu", torch.bfloat16), lm.precision.as_outside(lm.device.type):
        [(keys, _), *_] = lm.read_prefix(torch.tensor([lm.bos_id])).layers
    assert keys.dtype == torch.float32


def test_ambient_autocast_does_not_touch_a_measurement(data):
    targets = data(dtype="float32")
    targets.load()
    lm, ids = targets.lm, torch.tensor([[3, 4, 5, 6]])
    plain = lm.token_log_probs(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lm.token_log_probs(ids), plain)


def test_a_run_goes_on_in_its_own_precision_only(data, fit, tmp_path):
    options = {"enable_checkpointing": True, "max_steps": 3, "precision": "bf16-mixed"}
    fit(make_inverter("dlmi"), data(dtype="float32"), callbacks=[RunCheckpoint()], **options)
    [checkpoint] = tmp_path.rglob("last.ckpt")
    with pytest.raises(InputError, match="precision = None.*bf16-mixed"):
        fit(make_inverter("dlmi"), data(dtype="float32"), ckpt_path=checkpoint)
