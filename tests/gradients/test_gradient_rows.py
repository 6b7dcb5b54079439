"""Rows of gradients, and estimators side by side."""

import dataclasses
import inspect

import pytest
from helpers.toy_slot import normal

from dlmi import InputError, Inversion
from dlmi.gradient_rows import UNDEFINED, GradientRow, Statistic, read_gradient_rows
from dlmi.report.gradient_sets import ks_tests, median_statistic


def row(estimator="GS tau=1", value=1.0, **options):
    statistic = Statistic(value, value / 2, value * 2)
    values = {
        "estimator": estimator,
        "trajectory": "own",
        "target_id": "k1_0",
        "k": 1,
        "step": 0,
        "seed": 0,
        "prompt_length": 2,
        "target_length": 3,
        "num_samples": 8,
        "draws": 5,
        "tau": 1.0,
        "truth": None,
        "loss": "cross_entropy",
        "teacher_forcing": False,
        "model": "m",
        "revision": None,
        "fingerprint": "f",
        "dtype": "float32",
        "device": "cpu",
        "versions": {},
        **dict.fromkeys(("variance_max", "relative_variance", "snr", "norm"), statistic),
        **dict.fromkeys(("bias_max", "cosine", "bias_over_norm"), Statistic(None, None, None)),
    }
    return GradientRow(**{**values, **options})


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "gradients.jsonl"
    good = row().to_json_line()
    lines = [good, "{half\n", "\n", '{"estimator": "x"}\n', "3\n", good, good[: len(good) // 2]]
    path.write_text("".join(lines))
    rows, notes = read_gradient_rows(tmp_path)
    assert rows == [row(), row()]
    assert notes == [f"{path}, line {number}" for number in (2, 4, 5, 7)]
    with pytest.raises(InputError, match="gradients.jsonl or its run folder"):
        read_gradient_rows(tmp_path / "nowhere")


def test_row_documents_every_column():
    as_in_results = {field.name for field in dataclasses.fields(Inversion)}
    lines = inspect.getsource(GradientRow).splitlines()
    for field in dataclasses.fields(GradientRow):
        [number] = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: ")]
        is_documented = "  # " in lines[number] or "    # " in lines[number - 1]
        assert is_documented or field.name in as_in_results


def test_ks_tests_tell_estimators_apart_only_where_they_differ():
    values = {"A": normal(40), "B": normal(40, seed=1), "C": normal(40, seed=2) + 3}
    rows = [row(name, float(v)) for name, many in values.items() for v in many]
    tests = {(t.first, t.second): t for t in ks_tests(rows)}
    assert set(tests) == {("A", "B"), ("A", "C"), ("B", "C")}  # no bias was measured
    assert tests["A", "B"].adjusted_p_value > 0.05
    assert tests["A", "C"].adjusted_p_value < 1e-6
    assert tests["A", "C"].distance > 0.8
    assert (tests["A", "C"].first_rows, tests["A", "C"].second_rows) == (40, 40)
    assert all(t.adjusted_p_value >= t.p_value for t in tests.values())
    assert ks_tests([]) == []


def test_medians_of_values_and_of_the_ends_of_intervals():
    rows = [row(value=value) for value in (1.0, 2.0, 9.0)]
    assert median_statistic(rows, "GS tau=1", "snr") == Statistic(2.0, 1.0, 4.0)
    assert median_statistic(rows, "GS tau=1", "cosine") == UNDEFINED
