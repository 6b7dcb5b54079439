"""The grid of a comparison, checked and turned into cells before anything runs."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from dlmi.compare.cells import Cell
from dlmi.compare.cost import count_targets, most_token_passes
from dlmi.errors import InputError, check_at_least_one
from dlmi.report.result_files import Axis
from dlmi.run.budget import NO_STEP_LIMIT
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter

# The settings that `fit` makes of a configuration file and overrides, and what it would run.
PlanFit = Callable[[Path, dict[str, Any]], tuple[dict[str, Any], Inverter, TargetDataModule]]

# Settings of `model` that the grid sets in every cell.
_GRID_SETTINGS = ("prompt_length", "steps", "token_budget", "seed")


@dataclass(frozen=True)
class MethodSpec:
    """One method of a grid.

    Args:
        config: Its configuration file, relative to the grid's own.
        method: Settings of the method that differ from that file (`fit`'s `model.method`).
        model: Settings of the run that differ from it and from the grid's, such as `fluency`.
    """

    config: str
    method: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """How long prompts and targets are, where the two go together.

    Args:
        prompt_length: Prompt length, N.
        target_length: Length of generated targets, M; that of `data` if not given.
        budgets: Budgets of this size, counted as those of the grid; the grid's if empty.
    """

    prompt_length: int
    target_length: int | None = None
    budgets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Grid:
    """A comparison.

    Args:
        out: Folder of the comparison; each cell is a run folder in it.
        methods: The methods by the names that figures and tables call them.
        prompt_lengths: Prompt lengths, N.
        sizes: Or prompt lengths with the target length and the budgets that belong to each.
        steps: Budgets in steps. The largest is run; the others are read from its traces.
        token_budgets: Budgets in token passes through the LM per target, in place of `steps`.
        seeds: Seeds of the runs; the targets are the same for all of them.
        model: Settings of the run for all methods, as in `fit`, such as `forbid_target_tokens`.
        data: Settings of the targets and the LM, as in `fit`.
        models: Language models by name, each with the settings of `data` that it changes. Empty
            for the one of `data`.
        trainer: Settings of the trainer, as in `fit`.
        eval_every: Steps between two evaluations, for all methods; each method's own if not given.
    """

    out: str
    methods: dict[str, MethodSpec]
    prompt_lengths: list[int] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    steps: list[int] | None = None
    token_budgets: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    eval_every: int | None = None

    @property
    def axis(self) -> Axis:
        """What budgets are counted in."""
        return "step" if self.token_budgets is None else "token_passes"

    @property
    def all_sizes(self) -> list[Size]:
        """All sizes, each with its budgets, ascending."""
        sizes = self.sizes or [Size(length) for length in self.prompt_lengths]
        usual = self.steps or self.token_budgets or []
        return [dataclasses.replace(s, budgets=sorted(s.budgets or usual)) for s in sizes]


def plan(grid: Grid, beside: Path, plan_fit: PlanFit) -> list[Cell]:
    """All cells, those of the first seed first: an unfinished comparison then has all methods.

    The methods' configuration files are relative to `beside`; `plan_fit` reads them.
    """
    _check(grid)
    cells: dict[str, Cell] = {}
    for model, size, label in product(grid.models or [""], grid.all_sizes, grid.methods):
        cell = _cell(grid, beside, plan_fit, model, size, label)
        if cell.place in cells:
            raise InputError(
                f"Expected the names of the grid to make different folders, but "
                f"{cells[cell.place].label!r} and {label!r} both make {cell.place}."
            )
        cells[cell.place] = cell
    return [_with_seed(cell, seed) for seed in grid.seeds for cell in cells.values()]


def _check(grid: Grid) -> None:
    for name in ("methods", "seeds"):
        if not getattr(grid, name):
            raise InputError(f"Expected `{name}` to hold at least one entry, but it is empty.")
    for one, other in (("prompt_lengths", "sizes"), ("steps", "token_budgets")):
        values = getattr(grid, one), getattr(grid, other)
        if bool(values[0]) == bool(values[1]):
            raise InputError(
                f"Expected either `{one}` or `{other}` to hold at least one entry, but got "
                f"{values[0]} and {values[1]}."
            )
    check_at_least_one("budgets", smallest=min(size.budgets[0] for size in grid.all_sizes))
    sizes = [(size.prompt_length, size.target_length) for size in grid.all_sizes]
    name_of_sizes = "sizes" if grid.sizes else "prompt_lengths"
    for name, entries in (("seeds", grid.seeds), (name_of_sizes, sizes)):
        if len(set(entries)) < len(entries):
            raise InputError(f"Expected `{name}` to differ, but got {entries}.")
    given = {f"methods.{label}.model": spec.model for label, spec in grid.methods.items()}
    for place, model in {"model": grid.model, **given}.items():
        for name in sorted(model.keys() & {"method", *_GRID_SETTINGS}):
            beside = place.removesuffix("model") or "methods.NAME."
            owner = f"`{beside}method`" if name == "method" else "the grid"
            raise InputError(
                f"Expected `{place}` to leave `{name}` to {owner}, but it sets it to "
                f"{model[name]!r}."
            )


def _with_seed(cell: Cell, seed: int) -> Cell:
    settings = {**cell.settings, "model": {**cell.settings["model"], "seed": seed}}
    overrides = {**cell.overrides, "seed_everything": seed}
    folder = cell.folder.with_name(f"{cell.place}-seed{seed}")
    return dataclasses.replace(cell, folder=folder, settings=settings, overrides=overrides)


def _cell(grid: Grid, beside: Path, plan_fit: PlanFit, model: str, size: Size, label: str) -> Cell:
    """Without a seed, so that a configuration is parsed once for all seeds."""
    spec = grid.methods[label]
    config = beside / spec.config
    if not config.is_file():
        raise InputError(
            f"Expected `methods.{label}.config` to be a configuration file, but {config} is not."
        )
    run: dict[str, Any] = {"decode_at": size.budgets[:-1]}
    if grid.eval_every is not None:
        run = {"eval_every": grid.eval_every}
    run |= {**grid.model, **spec.model, "prompt_length": size.prompt_length}
    if grid.axis == "step":
        run["steps"] = size.budgets[-1]
    else:
        run |= {"steps": NO_STEP_LIMIT, "token_budget": size.budgets[-1]}
    if spec.method:
        run["method"] = {"init_args": spec.method}
    data = _merged(grid.data, grid.models.get(model, {}))
    parts = [model, label, f"N{size.prompt_length}"]
    if size.target_length is not None:
        data = _merged(data, {"targets": {"init_args": {"length": size.target_length}}})
        parts.append(f"M{size.target_length}")
    overrides = {"model": run, "data": data, "trainer": grid.trainer}
    try:
        settings, inverter, data_module = plan_fit(config, overrides)
    except InputError as error:
        raise InputError(f"Expected `methods.{label}` to be a run of `fit`: {error}") from error
    settings["data"].pop("__path__", None)  # jsonargparse's note of the file that it came from
    decisive = {name: settings[name] for name in ("model", "data")}
    targets = count_targets(data_module)
    per_target = most_token_passes(inverter, data_module)
    # No part is empty, so that the name never starts with a hyphen like an option.
    place = "-".join(re.sub(r"[^\w.+-]+", "_", p).strip("_-") or "_" for p in parts if p)
    return Cell(
        folder=Path(grid.out, place),
        place=place,
        label=label,
        axis=grid.axis,
        budgets=size.budgets,
        config=config,
        overrides=overrides,
        settings=json.loads(json.dumps(decisive)),  # as its file will hold them
        targets=targets,
        token_passes=None if targets is None or per_target is None else targets * per_target,
    )


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes on top, as `fit` merges two configuration files."""
    both = {**settings, **changes}
    for name in settings.keys() & changes.keys():
        if isinstance(settings[name], dict) and isinstance(changes[name], dict):
            both[name] = _merged(settings[name], changes[name])
    return both
