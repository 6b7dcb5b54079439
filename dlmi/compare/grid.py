"""The grid: what a comparison consists of, cell by cell, checked before anything runs."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlmi.compare.cost import count_targets, most_token_passes
from dlmi.errors import InputError, check_at_least_one
from dlmi.report.result_files import Axis
from dlmi.run.data import TargetDataModule
from dlmi.run.inverter import Inverter

# What `fit` would see of a configuration file and settings on top of it, and what it would run.
PlanFit = Callable[[Path, dict[str, Any]], tuple[dict[str, Any], Inverter, TargetDataModule]]

# What the grid itself sets in every cell.
_GRID_SETTINGS = ("prompt_length", "steps", "token_budget", "seed")
_NO_STEP_LIMIT = 1_000_000_000


@dataclass(frozen=True)
class MethodSpec:
    """One method of a grid.

    Args:
        config: Its configuration file, relative to the grid's own.
        method: Settings of the method that differ from that file (`fit`'s `model.method`).
        model: Settings of the run that differ from it, such as `eval_every` or `fluency`.
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
        budgets: Budgets of this size, counted as those of the grid; the grid's if not given.
    """

    prompt_length: int
    target_length: int | None = None
    budgets: list[int] | None = None


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
    data: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    eval_every: int | None = None

    @property
    def axis(self) -> Axis:
        """What budgets are counted in."""
        return "step" if self.token_budgets is None else "token_passes"

    @property
    def budgets(self) -> list[int]:
        """Ascending; of sizes that have none of their own."""
        return sorted(self.steps or self.token_budgets or [])

    @property
    def all_sizes(self) -> list[Size]:
        """Those given, each with its budgets."""
        sizes = self.sizes or [Size(length) for length in self.prompt_lengths]
        return [
            dataclasses.replace(size, budgets=sorted(size.budgets or self.budgets))
            for size in sizes
        ]


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        place: Which of its runs it is, but for the seed.
        seed: The seed.
        label: The method's name in the grid.
        config: The method's configuration file.
        overrides: What the grid changes in it.
        budgets: At which its traces are read, ascending.
        settings: Everything, as `fit` will see it.
        targets: How many it inverts; None where only the run will know.
        token_passes: What all of them cost at most; None likewise.
    """

    place: str
    seed: int
    label: str
    config: Path
    overrides: dict[str, Any]
    budgets: list[int]
    settings: dict[str, Any]
    targets: int | None
    token_passes: int | None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.place}-seed{self.seed}"


def plan(grid: Grid, beside: Path, plan_fit: PlanFit) -> list[Cell]:
    """All cells, the first seed's first, so that an unfinished comparison compares something.

    Args:
        grid: The comparison.
        beside: Folder that the methods' configuration files are relative to.
        plan_fit: Reads the configuration of a cell.

    Raises:
        InputError: For a grid that cannot run, before any of it does.
    """
    _check(grid)
    cells: dict[str, Cell] = {}
    for model_name, size, label in _places(grid):
        cell = _cell(grid, beside, plan_fit, model_name, size, label)
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
    if bool(grid.prompt_lengths) == bool(grid.sizes):
        raise InputError(
            "Expected either `prompt_lengths` or `sizes` to hold at least one entry, but got "
            f"{grid.prompt_lengths} and {grid.sizes}."
        )
    if (grid.steps is None) == (grid.token_budgets is None) or not grid.budgets:
        raise InputError(
            "Expected either `steps` or `token_budgets` to hold the budgets of the grid, but got "
            f"{grid.steps} and {grid.token_budgets}."
        )
    smallest = min(min(size.budgets or []) for size in grid.all_sizes)
    check_at_least_one("budgets", smallest=smallest)
    for name, values in (
        ("seeds", grid.seeds),
        ("prompt_lengths", grid.prompt_lengths),
        ("sizes", [(size.prompt_length, size.target_length) for size in grid.sizes]),
    ):
        if len(set(values)) < len(values):
            raise InputError(f"Expected `{name}` to differ, but got {values}.")
    for label, spec in grid.methods.items():
        if "method" in spec.model:
            raise InputError(
                f"Expected the method's settings in `methods.{label}.method`, but got them in "
                f"`methods.{label}.model.method`."
            )
        for name in _GRID_SETTINGS:
            if name in spec.model:
                raise InputError(
                    f"Expected `methods.{label}.model` to leave `{name}` to the grid, but it sets "
                    f"it to {spec.model[name]!r}."
                )


def _places(grid: Grid) -> Iterator[tuple[str | None, Size, str]]:
    names: list[str | None] = [*grid.models] or [None]
    for model_name in names:
        for size in grid.all_sizes:
            for label in grid.methods:
                yield model_name, size, label


def _with_seed(cell: Cell, seed: int) -> Cell:
    settings = copy.deepcopy(cell.settings)
    settings["model"]["seed"] = seed
    overrides = {**cell.overrides, "seed_everything": seed}
    return dataclasses.replace(cell, seed=seed, settings=settings, overrides=overrides)


def _cell(
    grid: Grid, beside: Path, plan_fit: PlanFit, model_name: str | None, size: Size, label: str
) -> Cell:
    """With the first seed; parsing takes a moment, and the other seeds differ in nothing else."""
    spec = grid.methods[label]
    config = beside / spec.config
    if not config.is_file():
        raise InputError(
            f"Expected `methods.{label}.config` to be a configuration file, but {config} is not."
        )
    budgets = size.budgets or []
    most = budgets[-1]
    budget = (
        {"steps": most} if grid.axis == "step" else {"steps": _NO_STEP_LIMIT, "token_budget": most}
    )
    every: dict[str, Any] = {"decode_at": budgets[:-1]}
    if grid.eval_every is not None:
        every = {"eval_every": grid.eval_every}
    data = _merged(grid.data, grid.models[model_name] if model_name else {})
    if size.target_length is not None:
        data = _merged(data, {"targets": {"init_args": {"length": size.target_length}}})
    overrides: dict[str, Any] = {
        "seed_everything": grid.seeds[0],
        "model": {**every, **spec.model, "prompt_length": size.prompt_length, **budget},
        "data": data,
        "trainer": grid.trainer,
    }
    if spec.method:
        overrides["model"]["method"] = {"init_args": spec.method}
    try:
        settings, inverter, data_module = plan_fit(config, overrides)
    except InputError as error:
        raise InputError(f"Expected `methods.{label}` to be a run of `fit`: {error}") from error
    targets = count_targets(data_module)
    per_target = most_token_passes(inverter, data_module)
    parts = [model_name, label, f"N{size.prompt_length}"]
    parts += [] if size.target_length is None else [f"M{size.target_length}"]
    return Cell(
        place="-".join(_folder_name(part) for part in parts if part),
        seed=grid.seeds[0],
        label=label,
        config=config,
        overrides=overrides,
        budgets=budgets,
        settings=_plain(settings),
        targets=targets,
        token_passes=None if targets is None or per_target is None else targets * per_target,
    )


def _folder_name(name: str) -> str:
    """A part of a folder's name; never empty, so that the whole cannot look like an option."""
    return re.sub(r"[^\w.+-]+", "_", name).strip("_-") or "_"


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """What decides the rows of a cell, as JSON has it."""
    model, data = settings["model"], dict(settings["data"])
    data.pop("__path__", None)  # jsonargparse's note of the file that it came from
    plain: dict[str, Any] = json.loads(json.dumps({"model": model, "data": data}))
    return plain


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes on top, as `fit` merges two configuration files."""
    both = {**settings, **changes}
    for name in settings.keys() & changes.keys():
        if isinstance(settings[name], dict) and isinstance(changes[name], dict):
            both[name] = _merged(settings[name], changes[name])
    return both


def as_yaml(overrides: dict[str, Any]) -> str:
    """What a cell changes in its method's configuration, as a file for `fit`."""
    text: str = yaml.safe_dump(overrides, sort_keys=False)
    return text
