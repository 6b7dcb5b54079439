"""`norm_gradient_scale: auto`: a number that is measured once for an LM."""

import json
import logging

import pytest
from helpers.methods import SMALL
from helpers.resuming import stop_and_resume

from dlmi import Inverter
from dlmi.lm.measured import measured_file
from dlmi.methods import ADC, GCG, Refined, SwapSearch
from dlmi.run import inverter, norm_scale
from dlmi.run.norm_scale import SCALES, best_losses, choose_scale
from dlmi.targets.by_rank import generate_targets


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DLMI_CACHE", str(tmp_path / "cache"))


def swept(monkeypatch, best):
    """Let one factor come out best, whatever the LM."""

    def made_up(lm, targets, scale):
        return [1.0 if scale == best else 2.0 for _ in targets]

    monkeypatch.setattr(norm_scale, "best_losses", made_up)


def test_the_best_factor_is_measured_once(tiny, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="dlmi.lm.measured")
    swept(monkeypatch, 0.7)
    assert choose_scale(tiny) == 0.7
    monkeypatch.setattr(norm_scale, "best_losses", lambda *_: pytest.fail("measured again"))
    assert choose_scale(tiny) == 0.7
    [(key, kept)] = json.loads(measured_file().read_text()).items()
    assert tiny.fingerprint() in key
    assert kept["scale"] == 0.7
    assert kept["losses"] == {str(s): [1.0 if s == 0.7 else 2.0] * 3 for s in SCALES}
    [line] = [record.message for record in caplog.records if "scaled by" in record.message]
    assert "scaled by 0.7" in line
    assert "2.00 with 1.0, 2.00 with 0.85, 1.00 with 0.7" in line


def test_a_short_adc_descends(tiny, monkeypatch):
    targets = generate_targets(tiny, (1, 3), 1, 4)
    monkeypatch.setattr(norm_scale, "_STEPS", 1)
    first = best_losses(tiny, targets, 1.0)
    monkeypatch.setattr(norm_scale, "_STEPS", 20)
    lowest = best_losses(tiny, targets, 1.0)
    assert lowest == best_losses(tiny, targets, 1.0)  # no draw but its own
    assert all(after < before for before, after in zip(first, lowest, strict=True))
    assert lowest != best_losses(tiny, targets, 0.5)


AUTO = ADC(restarts=1, lr=1.0, norm_gradient_scale="auto")


def path(rows):
    return [[point.discrete_loss for point in row.trace] for row in rows.values()]


@pytest.mark.parametrize(
    ("asked", "named", "options"),
    [
        (AUTO, ADC(restarts=1, lr=1.0, norm_gradient_scale=0.5), {}),
        (GCG(search_width=8, topk=8), GCG(search_width=8, topk=8), {"norm_gradient_scale": "auto"}),
        (
            Refined(AUTO, SwapSearch(width=2), after=0.5),
            Refined(
                ADC(restarts=1, lr=1.0, norm_gradient_scale=0.5), SwapSearch(width=2), after=0.5
            ),
            {},
        ),
    ],
    ids=["adc", "gcg", "refined"],
)
def test_a_run_uses_the_number_and_its_rows_hold_it(asked, named, options, data, fit, monkeypatch):
    swept(monkeypatch, 0.5)
    rows = fit(Inverter(asked, **SMALL, **options), data())
    by_number = {name: 0.5 for name in options}
    expected = fit(Inverter(named, **SMALL, **by_number), data())
    assert path(rows) == path(expected)
    for row, other in zip(rows.values(), expected.values(), strict=True):
        assert row.settings == other.settings


def test_nothing_is_measured_where_nothing_is_auto(data, fit, monkeypatch):
    monkeypatch.setattr(inverter, "choose_scale", lambda lm: pytest.fail("measured"))
    fit(Inverter(AUTO, **SMALL, norm_gradient_scale=0.7), data())
    assert not measured_file().exists()


def test_a_resumed_run_keeps_the_number(data, fit, tmp_path, monkeypatch):
    """Though it would not be measured again, or come out otherwise."""
    numbers = iter([0.7])
    monkeypatch.setattr(inverter, "choose_scale", lambda lm: next(numbers))
    rows = stop_and_resume(lambda: Inverter(AUTO, **{**SMALL, "steps": 20}), data, fit, tmp_path)
    assert len(rows) == 4
    assert {row.settings["norm_gradient_scale"] for row in rows.values()} == {0.7}
