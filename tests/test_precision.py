"""Mixed precision reaches the LM's passes and nothing else."""

import pytest
import torch
from conftest import METHODS, SMALL
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from dlmi.callbacks import RunCheckpoint
from dlmi.commands import _verify_row
from dlmi.errors import InputError
from dlmi.methods import DLMI

FLOAT32 = {torch.float32}
OF_EACH_METHOD = (
    *("dlmi", "dlmi_soft_next_token", "dlmi_rao", "gbda_annealed_final_samples", "reinforce"),
    *("soda", "gcg", "pez", "adc"),
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
        losses = pl_module.losses

        def noted_losses(slots):
            self.is_step = True
            assert not torch.is_autocast_enabled("cpu")
            step = losses(slots)
            self.kept.add(step.losses.dtype)
            self.is_step = False
            return step

        pl_module.losses = noted_losses

    def note(self, module, inputs, output):
        (self.in_step if self.is_step else self.outside).add(output.dtype)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            self.kept |= {parameter.dtype, parameter.grad.dtype}
        for state in optimizer.state.values():
            self.kept |= {value.dtype for value in state.values() if torch.is_tensor(value)}


def fit_mixed(fit, data, name, **trainer_options):
    method, settings = METHODS[name]
    seen, targets = SeenDTypes(), data(dtype="float32", per_k=1)
    options = {**SMALL, **settings, "steps": 4, "prompt_bos": True}
    rows = fit(method(**options), targets, callbacks=[seen], **trainer_options)
    return seen, targets, rows


@pytest.mark.parametrize("name", OF_EACH_METHOD)
def test_bfloat16_is_for_the_lm_alone_and_rows_verify(name, fit, data):
    seen, targets, rows = fit_mixed(fit, data, name, precision="bf16-mixed")
    assert seen.in_step >= {torch.bfloat16}
    assert seen.outside == FLOAT32, "measurements are in the LM's own dtype"
    assert seen.kept == FLOAT32
    assert len(rows) == 2
    for row in rows.values():
        assert (row.dtype, row.settings["precision"]) == ("float32", "bf16-mixed")
        assert _verify_row(targets.lm, row)[0] == []


def test_float16_on_the_cpu_becomes_bfloat16(fit, data):
    with pytest.warns(UserWarning, match="fp16 is not supported on CPU"):
        seen, _, rows = fit_mixed(fit, data, "dlmi", precision="16-mixed")
    assert seen.in_step == {torch.bfloat16}
    assert {row.settings["precision"] for row in rows.values()} == {"bf16-mixed"}


def test_float16_runs_without_a_scaler_that_couples_targets(fit, data):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    seen, _, _ = fit_mixed(fit, data, "dlmi", plugins=[plugin])
    assert seen.in_step == {torch.float16}
    assert seen.outside == seen.kept == FLOAT32
    assert plugin.scaler is None


def test_soft_next_tokens_are_not_rounded(data, fit):
    products = []
    model = DLMI(
        **{**SMALL, "steps": 2},
        tau0=1.0,
        num_samples=2,
        teacher_forcing=False,
        next_token="gumbel_softmax",
    )
    make = model._next_embeds

    def noted(slots):
        inner = make(slots)

        def next_embeds(rows, logits, step):
            embeds = inner(rows, logits, step)
            products.append((logits.dtype, embeds.dtype))
            return embeds

        return next_embeds

    model._next_embeds = noted
    fit(model, data(dtype="float32", per_k=1), precision="bf16-mixed")
    assert set(products) == {(torch.float32, torch.float32)}


def test_a_kept_prefix_is_in_the_lms_own_dtype(data):
    targets = data(dtype="float32")
    targets.load()
    lm = targets.lm
    with torch.autocast("cpu", torch.bfloat16), lm.mixed_precision():
        [(keys, _), *_] = lm.prefix([lm.bos_id]).layers
    assert keys.dtype == torch.float32


def test_ambient_autocast_does_not_touch_a_measurement(data):
    targets = data(dtype="float32")
    targets.load()
    lm, ids = targets.lm, torch.tensor([[3, 4, 5, 6]])
    plain = lm.token_log_probs(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lm.token_log_probs(ids), plain)


def test_a_run_goes_on_in_its_own_precision_only(data, fit, tmp_path):
    model = {**SMALL, "tau0": 1.0, "num_samples": 1}
    options = {"enable_checkpointing": True, "max_steps": 3, "precision": "bf16-mixed"}
    fit(DLMI(**model), data(dtype="float32"), callbacks=[RunCheckpoint()], **options)
    [checkpoint] = tmp_path.rglob("last.ckpt")
    with pytest.raises(InputError, match="precision = None.*bf16-mixed"):
        fit(DLMI(**model), data(dtype="float32"), ckpt_path=checkpoint)
