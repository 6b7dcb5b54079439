"""The report: means and errors by hand, groups apart, safe text, claims, figures, the command."""

import csv
import dataclasses
import html
import io
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command_line import run
from lightning.pytorch import Trainer
from markdown_it import MarkdownIt
from matplotlib.collections import PolyCollection
from scipy import stats

from dlmi import DLMI, InputError, Inverter, TargetDataModule, read_rows
from dlmi.gradient_rows import STATISTICS, GradientRow, Statistic, read_gradient_rows
from dlmi.gradients import estimators
from dlmi.report.blocks import ModelText, ReportTable, format_cell
from dlmi.report.claims.rules import FIXED_HIGH, FIXED_LOW, LEARNED, REINFORCE, RULES, GradientView
from dlmi.report.claims.table import CLAIMS, Claim, claim_cases, claims_table, decide_on
from dlmi.report.estimates import (
    Estimate,
    by_target,
    differences,
    estimate,
    mean_over_targets,
    slope,
    unpaired,
)
from dlmi.report.figures import (
    best_so_far,
    draw_anytime,
    draw_bars,
    draw_temperature,
    draw_violins,
    mean_curve,
)
from dlmi.report.gradient_sets import GradientSet, gradient_sets, ks_table
from dlmi.report.loading import best_point, load, points_within
from dlmi.report.names import paper_name, paper_role
from dlmi.report.page import write_page
from dlmi.report.result_files import Budget
from dlmi.report.styles import house_style, safe_text
from dlmi.report.tables import (
    lcs_matrix_table,
    prompt_table,
    round_trip_table,
    settings_tables,
    summary_table,
)
from dlmi.report.writing import csv_table, escape_latex, latex_table, markdown_table, write_figures
from dlmi.rows import TracePoint
from dlmi.targets.sources import ByRank

HOSTILE = (
    '<script>alert(1)</script> | a_b \\ {x} $y$ & #1 % ~^ `z` *w* [l](http://e.x) "q"\n\t🙂\x1b[31m'
)


@pytest.fixture(scope="module")
def real_row(model_folder, tmp_path_factory):
    """One row of a real run on the tiny LM; the others are made from it."""
    targets = ByRank(k=(1,), per_k=2, length=4)
    data = TargetDataModule(str(model_folder()), "float64", batch_size=2, targets=targets)
    model = Inverter(DLMI(1.0, num_samples=1), prompt_length=4, steps=4, eval_every=2)
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    folder = tmp_path_factory.mktemp("fit")
    trainer = Trainer(
        max_epochs=-1,
        accelerator="cpu",
        default_root_dir=folder,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(model, datamodule=data)
    return model.finished[0]


@pytest.fixture
def make_row(real_row):
    """A row with these values of LCS at steps 0, 10, 20 ...; other fields as given."""

    def make(*values, target="t0", seed=0, k=1, in_code=None, tau=None, settings=None, **fields):
        trace = tuple(
            TracePoint(
                step=10 * i,
                lcs=value,
                discrete_loss=2.0 - value,
                loss=None,
                as_in_code_lcs=value if in_code is None else in_code,
                seconds=float(i),
                token_passes=100 * (i + 1),
                means={} if tau is None else {"tau": tau / (i + 1)},
            )
            for i, value in enumerate(values)
        )
        best = max(values)
        settings = {**real_row.settings, "steps": trace[-1].step, "seed": seed, **(settings or {})}
        matrix = {**real_row.lcs_matrix, "best_so_far": {"free_greedy": best, "teacher_forced": 1}}
        defaults = {"lcs": best, "exact": best == 1, "steps": trace[-1].step, "k": k, "seed": seed}
        made = {"trace": trace, "target_id": target, "settings": settings, "lcs_matrix": matrix}
        return dataclasses.replace(real_row, **{**defaults, **made, **fields})

    return make


@pytest.fixture
def write_run(tmp_path):
    """Write rows as a run folder, with its cell of a comparison if it has a label."""

    def write(name, rows, label=None, budgets=(10, 20)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("".join(row.to_json_line() for row in rows))
        if label is not None:
            cell = {"label": label, "axis": "step", "budgets": list(budgets)}
            (folder / "cell.json").write_text(json.dumps(cell))
        return folder

    return write


@pytest.fixture
def two_methods(make_row, write_run, tmp_path):
    """Two methods at two k and two N, two targets each, two seeds."""
    for label, gain in (("good", 0.5), ("bad", 0.1)):
        for length in (2, 4):
            rows = [
                make_row(
                    *(0.0, gain / 2, gain + 0.01 * number),
                    target=f"k{k}_{number}",
                    k=k,
                    seed=seed,
                    tau=3.0 if label == "good" else None,
                    prompt_ids=(3,) * length,
                    prompt_tokens=("w0",) * length,
                )
                for k in (1, 6)
                for number in range(2)
                for seed in range(2)
            ]
            for seed in range(2):
                part = [row for row in rows if row.seed == seed]
                write_run(f"{label}_{length}_{seed}", part, label)
    return load([tmp_path / "runs"])


# Numbers


def test_errors_are_over_targets_with_seeds_averaged_first(make_row):
    rows = [
        make_row(0.0, 0.2, target="a", seed=0),
        make_row(0.0, 0.4, target="a", seed=1),
        make_row(0.0, 0.5, target="b", seed=0),
        make_row(0.0, 0.7, target="b", seed=1),
    ]
    found = mean_over_targets(rows, lambda row: row.lcs)
    assert found.mean == pytest.approx(0.45)
    assert found.error == pytest.approx(math.sqrt(((0.3 - 0.45) ** 2 + (0.6 - 0.45) ** 2) / 2))
    assert found.targets == 2
    assert found.interval() == (-math.inf, math.inf)  # too few targets to tell
    found = mean_over_targets([*rows, make_row(0.0, 0.9, target="c")], lambda row: row.lcs)
    reach = stats.t.ppf(0.975, 2) * found.error
    assert found.interval(0.95) == pytest.approx((0.6 - reach, 0.6 + reach))


def test_a_single_target_has_no_error_and_no_bounds():
    found = estimate([0.3])
    assert found == Estimate(0.3, None, 0, 1)
    assert found.interval() == (-math.inf, math.inf)
    assert not estimate([])


def test_missing_and_infinite_values_do_not_count(make_row):
    rows = [make_row(0.1, target="a"), make_row(0.2, target="b"), make_row(0.3, target="c")]
    values = iter([math.nan, math.inf, 5.0])
    assert by_target(rows, lambda row: next(values)) == {"c": 5.0}


def test_differences_are_paired_by_target_and_seed(make_row):
    first = [make_row(0.5, target="a", seed=s) for s in (0, 1)] + [make_row(0.9, target="b")]
    second = [make_row(0.1, target="a", seed=1), make_row(0.2, target="c")]
    assert differences(first, second, lambda row: row.lcs) == {"a": pytest.approx(0.4)}


def test_slope_and_unpaired_agree_with_scipy():
    xs, ys = [1, 1, 6, 11, 11], [0.9, 0.7, 0.5, 0.4, 0.1]
    found = slope(list(zip(xs, ys, strict=True)))
    line = stats.linregress(xs, ys)
    assert found.mean == pytest.approx(line.slope * 10)
    assert found.error == pytest.approx(line.stderr * 10)
    assert not slope([(1, 0.0), (1, 1.0), (1, 2.0)])
    one, other = [0.1, 0.5, 0.7], [0.0, 0.1, 0.05, 0.2]
    welch = stats.ttest_ind(one, other, equal_var=False)
    found = unpaired(one, other)
    assert found.mean / found.error == pytest.approx(welch.statistic)
    assert found.freedom == pytest.approx(welch.df)
    assert found.interval() == pytest.approx(tuple(welch.confidence_interval(0.95)))


def test_a_target_that_stopped_carries_its_value_forward(make_row):
    row = make_row(0.0, 0.6, 0.3)
    found = [best_point(row, Budget("step", at)).lcs for at in (0, 9, 10, 20, 999)]
    assert found == [0.0, 0.0, 0.6, 0.6, 0.6]
    assert points_within(row, Budget("step", 20))[-1].lcs == 0.3
    # Before the first evaluation: that one.
    assert best_point(row, Budget("token_passes", 5)).step == 0


def test_curves_carry_forward_and_average_seeds_first(make_row):
    rows = [
        make_row(0.0, 1.0, target="a", seed=0),  # solved at step 10
        make_row(0.0, 0.0, 0.0, 0.5, target="a", seed=1),
        make_row(0.0, 0.25, 0.0, 0.25, target="b"),
    ]
    curve = mean_curve(rows, best_so_far, "step", Budget("step", 99))
    assert curve.xs.tolist() == [0, 10, 20, 30]
    assert curve.means == pytest.approx([0, (0.5 + 0.25) / 2, (0.5 + 0.25) / 2, (0.75 + 0.25) / 2])
    assert curve.errors[1] == pytest.approx(0.125)


# Loading


def test_models_and_target_sets_are_kept_apart(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1)])
    write_run("b", [make_row(0.3, model="other", fingerprint="x")])
    write_run("c", [make_row(0.5, target_set="another")])
    loaded = load([tmp_path / "runs"])
    assert sorted(len(group.rows) for group in loaded.groups) == [1, 1, 1]
    table = summary_table(loaded)
    column = table.columns.index("honest LCS")
    assert sorted(row[column] for row in table.rows) == [0.1, 0.3, 0.5]
    assert len({row[0] for row in table.rows}) == 3


def test_groups_of_one_model_are_told_apart(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1, target_set="123456789")])
    write_run("b", [make_row(0.3, target_set="abcdefghi")])
    data = load([tmp_path / "runs"])
    model = Path(data.groups[0].model).name
    assert [g.title for g in data.groups] == [
        f"{model} · targets {n}" for n in ("123456", "abcdef")
    ]


def test_broken_lines_are_counted_and_named(make_row, write_run, tmp_path):
    folder = write_run("a", [make_row(0.1)])
    bad = dataclasses.replace(make_row(0.2, target="t1"), lcs=7.0).to_json_line()
    with (folder / "results.jsonl").open("a") as file:
        file.write(f'{{"target_id": 1}}\n\nnot json\n{bad}{{"target_id": "cut of')
    loaded = load([folder])
    [note] = loaded.notes
    assert "4 broken lines left out, 2, 4, 5, 6" in note
    assert str(folder) in note
    assert len(loaded.groups[0].rows) == 1


def test_rows_of_ranks_that_are_not_merged_yet_are_read(make_row, write_run):
    folder = write_run("a", [make_row(0.1, target="t0")])
    (folder / "results.worker1.jsonl").write_text(make_row(0.3, target="t1").to_json_line())
    [group] = load([folder]).groups
    assert {row.target_id for row in group.rows} == {"t0", "t1"}
    assert len(group.series) == 1


@pytest.fixture
def failed_row(make_row):
    """A row of a target whose loss was not finite from the first step on."""
    failed = make_row(0.1, target="t1", stop_reason="failed", failure="the loss is nan at step 1")
    point = dataclasses.replace(failed.trace[0], discrete_loss=math.nan)
    return dataclasses.replace(failed, discrete_loss=math.nan, trace=(point,))


def test_a_target_that_failed_with_no_finite_loss_is_loaded(make_row, failed_row, write_run):
    folder = write_run("a", [make_row(0.1), failed_row])
    assert len(load([folder]).groups[0].rows) == 2


def test_a_failed_cell_and_an_empty_file_are_named(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1)])
    (write_run("b", []) / "failure.json").write_text('{"error": "out of memory"}')
    notes = " ".join(load([tmp_path / "runs"]).notes)
    assert "out of memory" in notes
    assert "no rows" in notes


def test_the_same_target_and_seed_counts_once_with_its_longer_run(make_row, write_run, tmp_path):
    short = write_run("short", [make_row(0.0, 0.2)])
    write_run("long", [make_row(0.0, 0.1, 0.3)])
    loaded = load([tmp_path / "runs", short, short / "results.jsonl"])
    [row] = loaded.groups[0].rows
    assert row.steps == 20
    assert any("twice" in note for note in loaded.notes)


def test_rows_with_smaller_budgets_or_interrupted_are_noted(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.0, 0.1, 0.2, stop_reason="budget")])
    write_run("b", [make_row(0.0, 0.2, stop_reason="budget", method="SODA")])
    write_run("c", [make_row(0.0, 0.2, stop_reason="interrupted", method="PEZ")])
    notes = " ".join(load([tmp_path / "runs"]).notes)
    assert "SODA, N=4: 1 of 1 rows had a budget of fewer than 20 steps" in notes
    assert "PEZ, N=4: 1 of 1 rows were interrupted" in notes


def test_a_method_without_all_targets_is_noted(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1, target=f"t{i}") for i in range(3)])
    write_run("b", [make_row(0.9, target="t0", method="SODA")])
    [note] = load([tmp_path / "runs"]).notes
    assert note.endswith("SODA, N=4: has 1 of 3 targets; its means are over those alone")


def test_steps_of_the_command_replace_those_of_a_comparison(two_methods, tmp_path):
    assert two_methods.groups[0].budgets == (("step", 10.0), ("step", 20.0))
    assert load([tmp_path / "runs"], steps=[5]).groups[0].budgets == (("step", 5.0),)


@pytest.mark.parametrize(
    ("method", "settings", "name", "role"),
    [
        ("DLMI", {"tau0": 100.0, "teacher_forcing": True}, "DLMI(100)", "DLMI"),
        ("DLMI", {"tau0": 1, "teacher_forcing": False}, "DLMI(1)-TF", "DLMI-TF"),
        ("DLMI", {"tau0": 1, "temperature": "shared"}, "DLMI(1, shared)", None),
        ("DLMI", {"tau0": 1, "estimator": "reinmax"}, "DLMI(1)", None),
        ("GBDA", {"tau": 1.0, "teacher_forcing": False, "tau_end": None}, "GBDA(1)", "GBDA"),
        ("GBDA", {"tau": 1.0, "teacher_forcing": True}, "GBDA(1)+TF", None),
        ("REINFORCE", {"teacher_forcing": False, "baseline": "ema"}, "REINFORCE", "REINFORCE"),
        ("REINFORCE", {"teacher_forcing": False, "baseline": "rloo"}, "REINFORCE", None),
        ("SODA", {"loss": "margin"}, "SODA", "SODA"),
        ("SODA", {"loss": "margin", "allowed_tokens": "ascii"}, "SODA", "SODA"),
        ("Mine", {}, "Mine", None),
        ("Refined", {"first": {"method": "DLMI", "tau0": 100.0}}, "DLMI(100) + search", None),
    ],
)
def test_names_and_roles_come_from_settings(method, settings, name, role):
    defaults = {"temperature": "decoupled", "loss": "cross_entropy", "teacher_forcing": True}
    full = {**(defaults if method == "DLMI" else {}), **settings}
    assert paper_name(method, full) == name
    assert paper_role(method, full) == role


def test_runs_whose_prompts_may_not_hold_all_tokens_say_so(make_row, write_run, tmp_path):
    free = {"allowed_tokens": "all", "forbid_target_tokens": "none"}
    write_run("before", [make_row(0.1, settings={"lr": 1}, target_id="a")], label="mine")
    write_run("free", [make_row(0.1, settings={"lr": 1, **free}, target_id="b")], label="mine")
    barred = {"lr": 1, **free, "forbid_target_tokens": "ids"}
    write_run("alone", [make_row(0.1, settings=barred)], label="other")
    labels = load([tmp_path / "runs"]).labels
    assert labels == ["mine", "other forbid_target_tokens=ids"]
    write_run(
        "ascii",
        [make_row(0.1, settings={**free, "lr": 1, "allowed_tokens": "ascii"})],
        label="mine",
    )
    labels = load([tmp_path / "runs"]).labels
    assert labels[:2] == ["mine allowed_tokens=all", "mine allowed_tokens=ascii"]


def test_rows_from_before_searches_had_a_name_of_their_own(make_row, write_run, tmp_path):
    """They are of one series with later rows where no search came after the relaxation."""
    write_run("old", [make_row(0.1, settings={"refine_after": 1.0, "refine_width": 16})])
    settings = make_row(0.1).settings
    plain = {name: value for name, value in settings.items() if not name.startswith("refine_")}
    write_run("new", [dataclasses.replace(make_row(0.2, target="t1"), settings=plain)])
    [label] = load([tmp_path / "runs"]).labels
    assert "refine" not in label


def test_claims_name_estimators_as_rows_do():
    labels = set(map(estimators.label, estimators.ESTIMATORS.values()))
    assert {REINFORCE, FIXED_LOW, FIXED_HIGH, *LEARNED} <= labels


def test_one_name_for_two_settings_is_told_apart(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1, settings={"lr": 0.1})], label="mine")
    write_run("b", [make_row(0.2, settings={"lr": 0.3})], label="mine")
    assert load([tmp_path / "runs"]).labels == ["mine lr=0.1", "mine lr=0.3"]


def test_runs_made_in_other_ways_are_one_method_and_say_so(make_row, write_run, tmp_path):
    """But where both have done the same target, they are told apart by what differs."""
    older = {"versions": {"dlmi": "0.1.0", "torch": "2.6"}, "model": "elsewhere/lm"}
    newer = {"versions": {"dlmi": "0.2.0", "torch": "2.6"}, "settings": {"added_later": 3}}
    write_run("old", [make_row(0.2, target="t0", **older)], label="m")
    write_run("new", [make_row(0.4, target="t1", **newer)], label="m")
    data = load([tmp_path / "runs"])
    [group] = data.groups
    assert data.labels == ["m"]
    assert "dlmi: 0.1.0 / 0.2.0" in group.mixed
    assert "LM: " in group.mixed
    assert "torch" not in group.mixed
    write_run("again", [make_row(0.4, target="t0", **newer)], label="m")
    data = load([tmp_path / "runs"])
    [group] = data.groups
    assert data.labels == ["m added_later=3 dlmi=0.2.0", "m added_later=None dlmi=0.1.0"]
    assert len(group.rows) == 3


def test_passes_of_another_dtype_stand_beside_each_other(make_row, write_run, tmp_path):
    for precision in (None, "bf16-mixed"):
        write_run(str(precision), [make_row(0.2, settings={"precision": precision})], label="m")
    data = load([tmp_path / "runs"])
    [group] = data.groups
    assert data.labels == ["m precision=None", "m precision=bf16-mixed"]
    assert "passes: bf16-mixed / float64" in group.mixed


def test_targets_done_in_several_dtypes_of_the_passes_are_one_method(make_row, write_run, tmp_path):
    for number, passes in enumerate(("float32", "bfloat16")):
        row = make_row(0.2, target=f"t{number}", settings={"pass_dtype": passes})
        write_run(passes, [row], label="m")
    data = load([tmp_path / "runs"])
    [group] = data.groups
    assert data.labels == ["m"]
    assert len(group.rows) == 2
    assert "passes: bfloat16 / float32" in group.mixed


# Tables


def test_a_number_is_the_same_wherever_it_stands(make_row, write_run, tmp_path):
    """Cards, tables, figures and claims read rows at the last budget, not at the end of a run."""
    rows = [make_row(0.0, 0.2 + i / 10, 0.9, target=f"t{i}") for i in range(3)]
    write_run("a", rows, label="m", budgets=[5, 10])
    data = load([tmp_path / "runs"])
    table = summary_table(data)
    expected = table.rows[-1][table.columns.index("honest LCS")]
    assert expected == pytest.approx(0.3)
    assert lcs_matrix_table(data).rows[0][4] == expected
    assert round_trip_table(data).rows[0][6] == expected
    [bars], [curves] = draw_bars(data), draw_anytime(data, "step")
    assert bars.canvas.axes[-1].patches[0].get_height() == expected
    assert curves.canvas.axes[0].lines[0].get_ydata()[-1] == pytest.approx(expected)
    write_page(tmp_path / "page.html", data, [], [])
    assert "mean honest LCS</span> <b>0.300</b>" in (tmp_path / "page.html").read_text()
    assert any("3 of 3 rows found their prompt only beyond 10 steps" in n for n in data.notes)


def test_summary_reads_traces_at_each_budget(two_methods):
    table = summary_table(two_methods)
    assert len(table.rows) == 8  # two methods, two lengths, two budgets
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    [line] = [x for x in lines if (x["N"], x["budget"], x["method"]) == (4, "20 steps", "good")]
    assert line["honest LCS"] == pytest.approx(0.505)
    assert (line["targets"], line["seeds"], line["token passes"]) == (4, 2, 300)
    [line] = [x for x in lines if (x["N"], x["budget"], x["method"]) == (4, "10 steps", "bad")]
    assert line["honest LCS"] == pytest.approx(0.05)
    assert line["s.e."] == 0


def test_the_matrix_has_all_forms_and_floors(two_methods):
    rows = lcs_matrix_table(two_methods).rows
    mine = [row[3] for row in rows if row[:3] == (rows[0][0], 4, "good")]
    assert mine[:2] == ["best so far", "argmax of the last step"]
    floors = [row[3] for row in rows if row[:3] == (rows[0][0], 4, "floor")]
    assert floors == ["no prompt", "random prompt", "copy prompt", "rank-1 rate after BoS"]


def test_settings_are_split_into_tables_of_six(make_row, write_run, tmp_path):
    for number in range(8):
        write_run(str(number), [make_row(0.1, settings={"lr": number})], label=f"m{number}")
    tables = settings_tables(load([tmp_path / "runs"]))
    assert [len(table.columns) for table in tables] == [5, 5]
    assert ("lr", "0", "1", "2", "3") in tables[0].rows


def test_prompts_are_the_best_seed_of_each_target(make_row, write_run, tmp_path):
    rows = [make_row(0.2, seed=0), make_row(0.6, seed=1)]
    output = {"output_ids": (3, 9), "output_tokens": ("a", " b"), "target_ids": (3, 4)}
    output["target_tokens"] = ("a", "c")
    for row in rows:
        write_run(str(row.seed), [dataclasses.replace(row, **output, exact=False)])
    [cells] = prompt_table(load([tmp_path / "runs"])).rows
    assert cells[-2:] == (0.6, 1)
    assert cells[-3] == "a␣b"
    assert cells[-3].parts == (("a", False), ("␣b", True))


# Text that models say


def hostile_table():
    text = ModelText([(HOSTILE, False), ("=1+1 <b>", True), (" c", True)])
    return ReportTable("t", "A_title", "A | caption", ("x_y", "n"), ((text, -1.5), (None, 3e-9)))


def shown(text):
    return ModelText([(text, False)])


def test_a_long_text_is_cut_in_tables():
    text = ModelText([("a" * 100_000, False), ("b", True)])
    assert text == "a" * 2000 + "…b"


def test_markdown_shows_hostile_text_as_it_is():
    page = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .render(markdown_table(hostile_table()))
    )
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page, flags=re.S)
    assert len(cells) == 4
    plain = html.unescape(re.sub(r"</?(b|wbr)>", "", cells[0]))
    assert plain == shown(HOSTILE) + "[=1+1␣<b>␣c]"
    assert re.sub(r"<wbr>", "", cells[0]).count("<") == 2  # the mark and its end
    assert cells[1:] == ["-1.500", format_cell(None), "3e-09"]


def test_csv_is_plain_and_runs_no_formula():
    text = csv_table(hostile_table())
    lines = list(csv.reader(io.StringIO(text)))
    assert lines[1] == [shown(HOSTILE) + "=1+1␣<b>␣c", "-1.5"]
    assert lines[2] == ["", "3e-09"]
    assert "\x1b" not in text
    cells = (ModelText([("=1", False)]), "=cmd()", "@a", "-1.5", "-1+cmd()")
    formulas = ReportTable("t", "", "", ("=x", *"abcd"), (cells,))
    assert csv_table(formulas) == "'=x,a,b,c,d\n'=1,'=cmd(),'@a,-1.5,'-1+cmd()\n"


def test_latex_has_no_active_characters_in_cells():
    text = latex_table(hostile_table())
    line = next(line for line in text.splitlines() if "script" in line)
    assert line.endswith(r" \\")
    assert len(re.findall(r"(?<!\\)&", line)) == 1  # between the two cells
    assert r"\textcolor{red}{=1+1\textvisiblespace\allowbreak{}\textless{}b\textgreater{}}" in line
    for raw in ("<script>", "#1 ", " %", "a_b", "🙂", "\x1b", '"'):
        assert raw not in line
    assert r"\texttt{U+1F642}" in line
    without_escaped = re.sub(r"\\[{}]", "", line)
    assert without_escaped.count("{") == without_escaped.count("}")
    assert "$-$1.500" in line
    assert r"$3\times10^{-9}$" in text
    assert escape_latex("--[*]") == "{-}{-}{[}{*}]"


def test_long_tables_break_over_pages():
    table = ReportTable("t", "T", "C", ("x",), tuple((i,) for i in range(50)))
    assert r"\begin{longtable}" in latex_table(table)
    assert r"\begin{tabular}" in latex_table(hostile_table())


def test_text_in_figures_is_safe():
    assert "$" not in safe_text("a$b$c").replace(r"\$", "")
    assert "🙂" not in safe_text("🙂 \x1b 水")
    lines = safe_text("x" * 200, inches=2).split("\n")
    assert max(map(len, lines)) < 32
    assert "…" in "".join(lines)


# Claims


def test_every_claim_that_can_be_tested_has_a_rule():
    assert set(RULES) == {number for number, said in CLAIMS.items() if said.kind != "nothing"}


def outcomes(data, number):
    """Verdict and evidence of a claim, on our metric and on the authors'."""
    [(_, *metrics)] = claim_cases(data)["group"]
    return [decide_on(number, views) for views in metrics]


@pytest.fixture
def forced_against_free(make_row, write_run, tmp_path):
    """DLMI and DLMI-TF of which the first is better by some gains, one per target."""

    def make(gains, in_code_gain=0.0):
        for forced in (True, False):
            rows = [
                make_row(
                    *(0.0, 0.3 + (gain if forced else 0.0)),
                    target=f"t{i}",
                    in_code=0.5 + (in_code_gain if forced else 0.0),
                    settings={"teacher_forcing": forced, "tau0": 100.0},
                )
                for i, gain in enumerate(gains)
            ]
            write_run(str(forced), rows, label=f"arbitrary {forced}", budgets=[10])
        return load([tmp_path / "runs"])

    return make


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.2, 0.25, 0.15, 0.2], "holds"),
        ([-0.2, -0.25, -0.15, -0.2], "fails"),
        ([0.0, 0.001, 0.0, -0.001], "fails"),  # clearly no difference
        ([0.3, -0.2, 0.1, -0.1], "not decided"),
        ([0.3, 0.3], "not decided"),  # too few targets
    ],
)
def test_teacher_forcing_is_decided_on_paired_differences(forced_against_free, gains, verdict):
    honest, in_code = outcomes(forced_against_free(gains, in_code_gain=0.2), "5")
    assert honest[0] == verdict
    assert f"{len(gains)} targets" in honest[1]
    assert in_code[0] == ("holds" if len(gains) > 2 else "not decided")


def test_claims_without_their_runs_are_not_tested(forced_against_free):
    table = claims_table(forced_against_free([0.2, 0.25, 0.15]))
    verdicts = {str(row[0]): row[3] for row in table.rows}
    numbers = {int(re.match(r"\d+", number)[0]) for number in verdicts}
    assert numbers == set(range(1, 18))
    assert verdicts["5"] == "holds"
    assert all(verdicts[n] == "not tested" for n in ("1a", "2", "3b", "7", "8c", "10", "17"))
    needs = next(row[5] for row in table.rows if row[0] == "2")
    assert "REINFORCE" in needs


def test_dlmi_must_beat_every_other_method(make_row, write_run, tmp_path):
    for method, level in (("DLMI", 0.6), ("SODA", 0.3), ("GCG", 0.9)):
        settings = {"loss": "margin"} if method == "SODA" else {}
        rows = [
            make_row(0.0, level + 0.01 * i, target=f"t{i}", method=method, settings=settings)
            for i in range(4)
        ]
        write_run(method, rows)
    (verdict, evidence), _ = outcomes(load([tmp_path / "runs"]), "1a")
    assert verdict == "fails"
    assert "GCG" in evidence
    assert "1 of 2 hold, 1 fail" in evidence


def test_restricted_prompts_are_judged_among_themselves(make_row, write_run, tmp_path):
    """What restricts all of them is named once, and not in every label."""
    barred = {"forbid_target_tokens": "words"}
    for method, level in (("DLMI", 0.6), ("GCG", 0.2)):
        rows = [
            make_row(0.0, level + 0.01 * i, target=f"t{i}", method=method, settings=barred)
            for i in range(4)
        ]
        write_run(method, rows, label=method)
    data = load([tmp_path / "runs"])
    assert data.labels == ["DLMI", "GCG"]
    assert "forbid_target_tokens=words" in draw_bars(data)[0].caption
    [line] = [row for row in claims_table(data).rows if row[0] == "1a"]
    assert line[3] == "holds"
    assert line[2].endswith(", forbid_target_tokens=words")
    write_run("free", [make_row(0.9, target="t0", method="GCG")], label="free")
    [line] = [row for row in claims_table(load([tmp_path / "runs"])).rows if row[0] == "1a"]
    assert "free" not in line[5]


def test_a_claim_says_which_runs_are_not_what_it_needs(make_row, write_run, tmp_path):
    write_run("a", [make_row(0.1, settings={"temperature": "shared"})])
    write_run("b", [make_row(0.1, method="GCG")])
    [line] = [row for row in claims_table(load([tmp_path / "runs"])).rows if row[0] == "1a"]
    assert line[5] == "needs DLMI and another method; not as in the paper: DLMI(1, shared)"


def test_a_claim_says_what_its_runs_must_share(make_row, write_run, tmp_path):
    """DLMI and another method are there, but no target that both did with the same seed."""
    for number, method in enumerate(("DLMI", "GCG", "SODA")):
        settings = {"loss": "margin"} if method == "SODA" else {}
        rows = [make_row(0.1, target=f"t{i}", seed=number, settings=settings) for i in range(3)]
        write_run(method, [dataclasses.replace(row, method=method) for row in rows])
    [line] = [row for row in claims_table(load([tmp_path / "runs"])).rows if row[0] == "1a"]
    assert line[3] == "not tested"
    assert line[5] == "needs DLMI and another method (with the same seeds)"


def test_anytime_is_tested_on_the_prompt_of_the_moment(make_row, write_run, tmp_path):
    rows = [make_row(0.0, 0.8, 0.1 + 0.01 * i, target=f"t{i}") for i in range(4)]
    write_run("a", rows, label="x")
    honest, _ = outcomes(load([tmp_path / "runs"]), "9")
    assert honest[0] == "fails"  # the best so far cannot fall, the prompt of the moment can


def test_difficulty_claims_look_at_the_line_over_k(make_row, write_run, tmp_path):
    settings = {"loss": "margin", "steps": 2048}
    rows = [
        make_row(
            *(0.0, 0.9 - 0.04 * k + 0.01 * i),
            target=f"{k}{i}",
            k=k,
            method="SODA",
            settings=settings,
        )
        for k in (1, 6, 11)
        for i in range(3)
    ]
    write_run("a", rows)
    loaded = load([tmp_path / "runs"])
    verdict, evidence = outcomes(loaded, "8b")[0]
    assert verdict == "holds"
    assert "from lowest to highest k" in evidence


def test_prompt_claims(make_row, write_run, tmp_path):
    rows = [
        make_row(
            *(0.0, 0.1),
            target=f"t{i}",
            tau=5.0 + i,
            overlap_ratio=0.5 + 0.01 * i,
            prompt_perplexity=1e6 + i,
        )
        for i in range(4)
    ]
    write_run("a", rows)
    loaded = load([tmp_path / "runs"])
    assert [outcomes(loaded, n)[0][0] for n in ("14", "15", "16")] == [*("holds", "fails", "holds")]


def test_a_larger_model_is_compared_unpaired(make_row, write_run, tmp_path):
    for model, level in (("smollm2-135m-instruct", 0.2), ("HuggingFaceTB/SmolLM3-3B-Base", 0.8)):
        rows = [
            make_row(0.0, level + 0.01 * i, target=f"{model}{i}", model=model, target_set=model)
            for i in range(4)
        ]
        write_run(model.split("/")[-1], rows, label="a", budgets=[10])
    table = claims_table(load([tmp_path / "runs"]))
    [row] = [row for row in table.rows if row[0] == "7"]
    assert row[2:4] == ("SmolLM3-3B-Base - smollm2-135m-instruct", "holds")


def test_one_refuting_finding_of_many_needs_a_corrected_interval():
    strong = Estimate(-0.5, 0.01, 10, 11)
    weak = Estimate(-0.021, 0.018, 10, 11)  # 95%: below 0.02; shared out over 20: not
    good = Estimate(0.5, 0.01, 10, 11)
    above = Claim("", "", low=0.0, margin=0.02)
    assert above.decide([("x", good), ("y", strong)])[0] == "fails"
    assert above.decide([("y", weak)])[0] == "fails"
    assert above.decide([("x", good)] * 19 + [("y", weak)])[0] == "not decided"
    assert Claim("", "", high=0.0).decide([("x", strong)])[0] == "holds"
    assert Claim("", "", low=0.0, high=0.4).decide([("x", good)])[0] == "fails"
    assert above.decide([])[0] == "not tested"


def test_every_rule_runs_on_rows_without_difficulty(make_row, write_run, tmp_path):
    for method in ("DLMI", "SODA", "GBDA", "REINFORCE"):
        write_run(method, [make_row(0.0, 0.1, k=None, method=method)])
    table = claims_table(load([tmp_path / "runs"]))
    assert {row[3] for row in table.rows} == {"not decided", "not tested"}


# Gradients


def gradient_row(estimator, value, target="t0", step=0, kind="exact", **fields):
    statistics = ("variance_max", "bias_max", "relative_variance", "bias_over_norm")
    known = {name: SimpleNamespace(value=value, low=None, high=None) for name in statistics}
    place = {"model": "m", "fingerprint": "f", "dtype": "float32", "trajectory": "own", "seed": 0}
    sizes = {"prompt_length": 4, "target_length": 4, "num_samples": 2, "loss": "cross_entropy"}
    truth = None if kind is None else {"kind": kind}
    rest = {"teacher_forcing": False, "truth": truth, "target_id": target, "step": step}
    return SimpleNamespace(estimator=estimator, **{**known, **place, **sizes, **rest, **fields})


def gradient_rows(scales, targets=4):
    return [
        gradient_row(estimator, scale * (1 + 0.1 * step), f"t{target}", step)
        for estimator, scale in scales.items()
        for target in range(targets)
        for step in range(3)
    ]


def test_gradient_rows_of_other_truths_are_kept_apart():
    sets = gradient_sets([[gradient_row("GS", 1.0)], [gradient_row("GS", 2.0, kind="as_in_code")]])
    assert [len(each.rows) for each in sets] == [1, 1]
    assert "as_in_code" in sets[1].title


def test_violins_leave_out_what_a_logarithm_does_not_have():
    rows = [*gradient_rows({"REINFORCE": 5.0, "GS tau=1": 0.1}), gradient_row("GS tau=1", 0.0)]
    rows += [gradient_row("GS tau=1", -1.0), gradient_row("single", 2.0)]
    [drawing] = draw_violins([GradientSet("here", tuple(rows))])
    assert len(drawing.canvas.axes) == 4
    bodies = [c for axes in drawing.canvas.axes for c in axes.collections]
    assert sum(isinstance(body, PolyCollection) for body in bodies) == 8  # a single value has none
    assert "8 values that are 0 or below" in drawing.caption
    labels = [text.get_text() for text in drawing.canvas.axes[0].get_yticklabels()]
    assert labels == ["REINFORCE", "GS tau=1", "single"]


def gradient_verdicts(found):
    view = GradientView(found)
    numbers = [number for number, said in CLAIMS.items() if said.kind == "gradients"]
    return {number: decide_on(number, [view])[0] for number in numbers}


def test_gradient_claims_and_tests():
    scales = {"REINFORCE": 10.0, "GS tau=1": 1.0, "GS tau=100": 100.0}
    found = GradientSet("here", tuple(gradient_rows(scales)))
    verdicts = gradient_verdicts(found)
    assert verdicts["10"] == "fails"  # above tau=1 but below tau=100
    assert verdicts["11"] == "fails"
    assert verdicts["12b"] == "not tested"
    scales |= {"GS tau=100": 0.1, "GS L tau0=1": 1.0, "GS L tau0=100": 1.1}
    found = GradientSet("here", tuple(gradient_rows(scales)))
    verdicts = gradient_verdicts(found)
    assert [verdicts[n] for n in ("10", "11", "12a", "12b")] == ["holds"] * 4
    assert len(ks_table([found]).rows) == 20  # ten pairs, two statistics
    assert not ks_table([]).rows


# Figures


def test_bars_are_means_with_errors(two_methods):
    [drawing] = draw_bars(two_methods)
    assert len(drawing.canvas.axes) == 4  # two lengths, two budgets
    axes = drawing.canvas.axes[-1]  # N=4, 20 steps
    assert "N=4, 20 steps" in axes.get_title()
    heights = sorted(patch.get_height() for patch in axes.patches)
    assert heights == pytest.approx([0.105, 0.105, 0.505, 0.505])
    floors = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert len(floors) >= 6  # three floors at two k
    [legend] = drawing.canvas.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["bad", "good", "no prompt", "random prompt", "copy prompt"]


def test_curves_are_drawn_for_each_method_that_has_them(two_methods):
    for axis in ("step", "token_passes"):
        [drawing] = draw_anytime(two_methods, axis)
        assert [len(axes.lines) for axes in drawing.canvas.axes] == [2, 2]
        assert all(len(axes.collections) == 2 for axes in drawing.canvas.axes)  # the bands
    assert drawing.canvas.axes[0].get_xscale() == "log"
    [drawing] = draw_temperature(two_methods)
    assert [len(axes.lines) for axes in drawing.canvas.axes] == [1, 1]
    assert list(drawing.canvas.axes[0].lines[0].get_ydata()) == pytest.approx([3, 1.5, 1])


def test_twelve_methods_do_not_collide(make_row, write_run, tmp_path):
    for i in range(12):
        label = f"a method with a long name {i} $ 水"
        rows = [make_row(0.0, i / 12, target=f"{k}", k=k) for k in (1, 6, 11, 16, 21)]
        write_run(str(i), rows, label=label, budgets=[10])
    [drawing] = draw_bars(load([tmp_path / "runs"]))
    with house_style():
        drawing.canvas.draw_without_rendering()
    renderer = drawing.canvas.canvas.get_renderer()
    [legend] = drawing.canvas.legends
    boxes = [text.get_window_extent(renderer) for text in legend.get_texts()]
    boxes += [axes.get_tightbbox(renderer) for axes in drawing.canvas.axes]
    clashes = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not clashes
    assert all(box.x0 >= 0 and box.x1 <= drawing.canvas.bbox.x1 for box in boxes)
    sizes = [t.get_fontsize() for t in drawing.canvas.findobj(lambda a: hasattr(a, "get_fontsize"))]
    assert min(sizes) >= 7


# The command


def test_help_says_what_it_takes(capsys):
    assert run("report", "--help") == 0
    out = capsys.readouterr().out
    assert "usage: python -m dlmi report RUNS... --out DIR" in out
    assert "new or empty" in " ".join(out.split())


def test_many_budgets_and_groups_are_spread_over_rows_and_figures(make_row, write_run, tmp_path):
    for i in range(7):
        rows = [make_row(0.0, 0.1, model=f"m{i}", fingerprint=f"{i}")]
        write_run(str(i), rows, label="a", budgets=[1, 2, 3, 10])
    loaded = load([tmp_path / "runs"])
    first, second, *others = draw_bars(loaded)
    assert (first.name, second.name) == ("lcs_by_k", "lcs_by_k_2")
    assert {len(drawing.canvas.axes) for drawing in (first, second, *others)} == {4}
    assert first.canvas.get_suptitle() == "m0, N=4"  # stands once, where all panels share it
    assert first.canvas.axes[0].get_title() == "1 steps"
    curves = draw_anytime(loaded, "step")
    assert [len(drawing.canvas.axes) for drawing in curves] == [3, 4]
    assert [drawing.canvas.get_suptitle() for drawing in curves] == ["", ""]


def test_the_command_writes_everything(
    two_methods, make_row, failed_row, write_run, tmp_path, capsys
):
    write_run("failed", [make_row(0.1), failed_row])
    folder = write_run("hostile", [make_row(0.5, prompt_text=HOSTILE, model="a/<b>", k=None)])
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"cut')
    out = tmp_path / "new" / "report"
    assert run("report", tmp_path / "runs", "--out", out) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    figures = {"lcs_by_k", "anytime_steps", "anytime_token_passes", "temperature"}
    kinds = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    for name in figures:
        for suffix, start in kinds.items():
            data = (out / "figures" / f"{name}{suffix}").read_bytes()
            assert data.startswith(start)
            assert len(data) > 5000
    tables = {path.name for path in (out / "tables").iterdir()}
    names = ("groups", "summary", "claims", "lcs_matrix", "overlap", "round_trip", "prompts")
    assert tables == {f"{n}.{kind}" for n in (*names, "settings") for kind in ("md", "csv", "tex")}
    text = (out / "report.md").read_text()
    assert "1 broken line left out, 2" in text
    assert "<script>" not in text
    assert all(f"(figures/{name}.png)" in text for name in figures)
    assert "\x1b" not in (out / "tables" / "prompts.csv").read_text()
    page = (out / "report.html").read_text()
    assert "The paper" in page
    assert "NaN" not in page
    before = sorted(out.rglob("*"))
    assert run("report", tmp_path / "runs", "--out", out) == 2
    assert "not empty" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == before


def test_watching_a_run(make_row, write_run, tmp_path, monkeypatch, capsys):
    """It waits for the first row, writes again for each new one, and ends with a page at rest."""
    folder, out = tmp_path / "runs" / "a", tmp_path / "out"
    refresh = '<meta http-equiv="refresh"'
    seen = []

    def sleep(seconds):
        assert seconds >= 10
        page = out / "report.html"
        seen.append(page.read_text().count(refresh) if page.exists() else None)
        if len(seen) == 1:
            write_run("a", [make_row(0.1)])
        elif len(seen) == 2:
            with (folder / "results.jsonl").open("a") as file:
                file.write(make_row(0.3, target="t1").to_json_line())
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("dlmi.cli.report.time.sleep", sleep)
    assert run("report", tmp_path / "runs", "--out", out, "--watch") == 0
    assert seen == [None, 1, 1]
    assert "waiting for rows" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert refresh not in page
    assert "<dt>results</dt><dd>2</dd>" in page


def test_gradient_files_are_enough(tmp_path):
    place = {"trajectory": "own", "k": 1, "step": 0, "seed": 0, "prompt_length": 4, "tau": 1.0}
    sizes = {"target_length": 4, "num_samples": 2, "draws": 5, "truth": {"kind": "exact"}}
    lm = {"model": "m", "revision": None, "fingerprint": "f", "dtype": "float32", "device": "cpu"}
    rest = {"loss": "cross_entropy", "teacher_forcing": False, "versions": {}}
    (tmp_path / "g").mkdir()
    with (tmp_path / "g" / "gradients.jsonl").open("w") as file:
        for i in range(8):
            known = dict.fromkeys(STATISTICS, Statistic(1.0 + i, None, None))
            names = {"estimator": "GS tau=1", "target_id": str(i)}
            row = GradientRow(**names, **place, **sizes, **known, **lm, **rest)
            file.write(row.to_json_line())
        file.write('{"cut')
    assert run("report", tmp_path / "g" / "gradients.jsonl", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out/figures/gradients.png").stat().st_size > 5000
    assert "1 broken line left out, 9" in (tmp_path / "out/report.md").read_text()


def test_the_same_runs_give_the_same_pictures(two_methods, tmp_path):
    for name in ("one", "two"):
        write_figures(tmp_path / name, draw_temperature(two_methods))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere", "--out", "out"], "nowhere does not exist"),
        (["empty", "--out", "out"], "empty holds none"),
        (["no_rows", "--out", "out"], "no rows"),
        (["broken", "--out", "out"], "1 broken line"),
        (["no_gradients", "--out", "out"], "none"),
        (["runs", "--out", "a_file"], "a_file: Not a directory"),
        (["runs", "--out", "a_file/out"], "a_file: Not a directory"),
        (["runs", "--out", "full"], "full is not empty"),
        (["runs", "--out", "out", "--steps", "[0]"], "--steps"),
        (["runs"], "out"),
        (["--out", "out"], "runs"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments, expected, make_row, write_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_run("a", [make_row(0.1)])
    for name, file, text in (
        ("no_rows", "results.jsonl", ""),
        ("broken", "results.jsonl", "{\n"),
        ("no_gradients", "gradients.jsonl", "{\n"),
        ("full", "something", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("")
    assert run("report", *arguments) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("dlmi: error: ")
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_load_names_the_missing_path(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        load([tmp_path / "nowhere"])


def test_odd_line_separators_do_not_tear_a_row_apart(make_row, write_run):
    row = make_row(0.5, prompt_text="a\u2028b\x85c\x0cd", target="x\x1cy")
    folder = write_run("odd", [row])
    assert read_rows(folder) == [row]
    assert load([folder]).groups[0].rows == [row]


def test_a_row_cut_within_a_character_is_left_out_on_resume(make_row, write_run):
    folder = write_run("cut", [make_row(0.5, target="a")])
    line = make_row(0.5, target="🙂").to_json_line().encode()
    with (folder / "results.jsonl").open("ab") as file:
        file.write(line[: line.index("🙂".encode()) + 2])
    assert [row.target_id for row in read_rows(folder, tolerate_cut=True)] == ["a"]
    with pytest.raises(InputError, match="line 2.*not JSON"):
        read_rows(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", "0", "expected `int`, got `str` at `seed`"),
        ("steps", 10**400, "more than 64 bits"),
        ("model", None, "`model`"),
        ("target_ids", "abc", "`target_ids`"),
        ("trace", [{}], "missing required field `step` at `trace[0]`"),
        ("versions", [], "`versions`"),
        ("settings", {"a": 10**400}, "more than 64 bits"),
        ("exact", 1, "`exact`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_of_wrong_types_are_noted(make_row, write_run, field, value, message):
    rows = [make_row(0.5, target="a"), make_row(0.5, target="b")]
    folder = write_run("types", rows)
    lines = [json.loads(row.to_json_line()) for row in rows]
    lines[1][field] = value
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loaded = load([folder])
    assert [row.target_id for row in loaded.groups[0].rows] == ["a"]
    assert message in loaded.notes[0]


def test_pipes_and_loops_of_links_are_passed_by(make_row, write_run):
    folder = write_run("a", [make_row(0.5)])
    for name in ("results.jsonl", "failure.json", "gradients.jsonl"):
        (folder / "sub").mkdir(exist_ok=True)
        os.mkfifo(folder / "sub" / name)
    os.mkfifo(folder / "cell.json")
    (folder / "loop").mkdir()
    (folder / "loop" / "results.jsonl").symlink_to("results.jsonl")
    assert len(load([folder]).groups[0].rows) == 1


@pytest.mark.parametrize(
    "cell", ["[]", '{"label": "A"}', "[" * 100_000, '{"label": "A", "axis": 1}'], ids=range(4)
)
def test_a_broken_cell_file_is_no_cell(make_row, write_run, cell):
    folder = write_run("a", [make_row(0.5)])
    (folder / "cell.json").write_text(cell)
    assert load([folder]).labels != ["A"]


def test_out_may_not_be_a_link_to_nowhere(make_row, write_run, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert run("report", write_run("a", [make_row(0.1)]), "--out", tmp_path / "out") == 2
    assert not (tmp_path / "elsewhere").exists()


def test_gradient_rows_that_cannot_be_compared_are_left_out(tmp_path):
    statistic = dict.fromkeys(("value", "low", "high"), 0.5)
    names = [field.name for field in dataclasses.fields(GradientRow)]
    row = dict.fromkeys(names, "x") | dict.fromkeys(STATISTICS, statistic)
    row |= dict.fromkeys(("step", "seed", "prompt_length", "target_length"), 1)
    row |= {"num_samples": 1, "draws": 3, "k": None, "tau": None, "truth": {"kind": "exact"}}
    row |= {"teacher_forcing": True, "versions": {}}
    broken = [{"truth": {}}, {"truth": {"kind": None}}, {"snr": {**statistic, "low": math.nan}}]
    file = tmp_path / "gradients.jsonl"
    lines = [row, *({**row, **change} for change in broken)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, notes = read_gradient_rows(file)
    assert len(rows) == 1
    assert [note[-6:] for note in notes] == ["line 2", "line 3", "line 4"]
