"""Grids: which values, and the jobs that they make."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from fedlib.errors import FedlibError, unknown
from fedlib.files import digest
from fedlib.lab.evidence import catalogue, freshness
from fedlib.paths import expand
from fedlib.schema import Page, conform, read_toml

JOB_KEYS = ("paper", "experiment", "profile", "seeds", "seed", "device")
"""What a job of an experiment takes beside settings."""


class Headline(Page):
    """The number by which runs are compared: a mean over seeds, at the end of the run."""

    run: NotRequired[str]  # default: the first
    metric: NotRequired[str]  # default: loss
    split: NotRequired[str]  # default: train


class GridPage(Page):
    """A grid: what is the same for all jobs, and axes whose values are combined."""

    notebook: NotRequired[str]  # a path, from the grid's file; without it, jobs are experiments
    set: NotRequired[dict[str, Any]]  # the same for all jobs
    grid: NotRequired[dict[str, list[Any]]]  # every value with every value
    job: NotRequired[list[dict[str, Any]]]  # jobs one by one, beside those of the grid
    headline: NotRequired[Headline]


@dataclass(frozen=True, eq=False)
class BatchJob:
    """One run of an experiment, or of a notebook.

    Attributes
    ----------
    id
        Follows from what the job is, and from nothing else.
    axes
        The values in which it differs from other jobs.
    notebook, parameters
        The notebook's path, and what it is given; or ``""`` and nothing.
    paper, experiment, profile, seeds, device
        As for :func:`fedlib.lab.evidence.experiments.run`.
    changes
        Settings of the experiment with values of the job's own.
    headline
        Metric and split, and run if not the first, of the number by which jobs are compared.
    """

    id: str
    axes: dict[str, Any]
    notebook: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    paper: str = ""
    experiment: str = ""
    profile: str = ""
    seeds: tuple[int, ...] = ()
    device: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    headline: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The experiment's settings, changes included."""
        s = catalogue.settings(self.paper, self.experiment, self.profile)
        return catalogue.change(s, self.changes)

    @property
    def on_gpu(self) -> bool:
        """Whether it asks for a GPU, by its device or by its notebook's parameter."""
        return "cuda" in (self.device, self.parameters.get("device"))

    @functools.cached_property
    def variant(self) -> str:
        """A short name for what it is, whatever its seeds."""
        what = self.parameters if self.notebook else self.settings
        return digest(json.dumps(what, sort_keys=True))[:8]


COLUMNS = ("job", "status", "seconds", "headline", "why")  # of a table, beside the axes


def read_grid(
    grid: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> list[BatchJob]:
    """Return the jobs of a grid, in its order.

    Parameters
    ----------
    grid
        A TOML file or what one would hold, see :class:`GridPage`.
    changes
        Further values that are the same for all jobs.

    Raises
    ------
    FedlibError
        For an unknown key, parameter, setting or name, with the nearest valid one.
    """
    if isinstance(grid, Mapping):
        home, source = Path(), "The grid"
        page = conform(dict(grid), GridPage, source)
    else:
        file, source = expand(grid, "The grid"), str(grid)
        if not file.is_file():
            raise FedlibError(f"There is no file {grid}.")
        home, page = file.parent, read_toml(file, GridPage)
    if "notebook" in page and "headline" in page:
        raise FedlibError(f"{source}: [headline] is for experiments; a notebook glues its own.")
    axes, same, changes = page.get("grid", {}), page.get("set", {}), dict(changes or {})
    if empty := [name for name, values in axes.items() if not values]:
        raise FedlibError(f"{source}: the axis '{empty[0]}' has no values.")
    _one_way_only(axes, same, changes, source)
    listed = page.get("job", [])
    crossed = [dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values())]
    names = dict.fromkeys([*axes, *(name for point in listed for name in point)])
    if taken := [name for name in names if name in COLUMNS]:
        raise FedlibError(f"{source}: '{taken[0]}' is a column of the table of jobs, and no axis.")
    jobs: dict[str, BatchJob] = {}
    for point in [*(crossed if axes or not listed else []), *listed]:
        asked = same | point | changes
        differs = {name: asked[name] for name in names if name in asked}
        if "notebook" in page:
            job = _notebook(home / page["notebook"], asked, differs)
        else:
            job = _experiment(asked, differs, page.get("headline", {}), source)
        jobs.setdefault(job.id, job)
    return list(jobs.values())


def _one_way_only(
    axes: dict[str, list[Any]], same: dict[str, Any], changes: dict[str, Any], source: str
) -> None:
    """Refuse what can be read in two ways."""
    for name, values in axes.items():
        if twice := [v for at, v in enumerate(values) if v in values[:at]]:
            raise FedlibError(f"{source}: the axis '{name}' has {twice[0]!r} twice.")
        if name in same:
            raise FedlibError(f"{source}: '{name}' is both in [set] and an axis of [grid].")
        several = isinstance(changes.get(name), list | tuple)
        if several and not any(isinstance(v, list) for v in values):
            raise FedlibError(
                f"--set gives the axis '{name}' one value, not several: {changes[name]}. "
                f"Several belong into [grid] of {source}."
            )


def _notebook(path: Path, parameters: dict[str, Any], axes: dict[str, Any]) -> BatchJob:
    import papermill

    if not path.is_file():
        raise FedlibError(f"There is no notebook {path}.")
    try:
        page = json.loads(path.read_text("utf-8"))
        cells, _ = [cell["source"] for cell in page["cells"]], page["nbformat"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FedlibError(f"{path} is no Jupyter notebook that can be read.") from error
    try:
        known = papermill.inspect_notebook(str(path))
    except ValueError as error:
        raise FedlibError(
            f"{path} does not name its kernel, or not with a language. Open it in JupyterLab, "
            "choose a kernel, save it."
        ) from error
    if parameters and not known:
        raise FedlibError(
            f"{path} has no parameters: no cell with the tag 'parameters' sets a name. Tag the one "
            f"that sets {', '.join(parameters)} (in JupyterLab: the gears at the upper right)."
        )
    for name in parameters:
        if name not in known:
            raise unknown(f"parameter of {path.name}", name, known)
    name = _id([path.name, cells, parameters])
    return BatchJob(name, axes, str(path.resolve()), parameters)


def _experiment(
    asked: dict[str, Any], axes: dict[str, Any], headline: dict[str, str], source: str
) -> BatchJob:
    from fedlib.lab.evidence import experiments  # with torch, which a look at results needs not

    if lacking := [key for key in ("paper", "experiment") if key not in asked]:
        raise FedlibError(
            f"{source} names neither a notebook nor the {lacking[0]}: "
            f'[set] with {lacking[0]} = "...", or an axis of that name.'
        )
    paper, experiment = asked["paper"], asked["experiment"]
    profile = asked.get("profile", "quick")
    changes = {key: value for key, value in asked.items() if key not in JOB_KEYS}
    try:
        catalogue.check_experiment(paper, experiment, profile, changes)
    except FedlibError as error:
        _, ours, what = str(error).partition(f"{catalogue.CHANGED}: ")
        if not ours:
            raise
        raise FedlibError(f"{source}: {what}") from error
    s = catalogue.change(catalogue.settings(paper, experiment, profile), changes)
    if "seed" in asked and "seeds" in asked:
        raise FedlibError(f"{source} gives both 'seed' and 'seeds': give one of the two.")
    which = [asked["seed"]] if "seed" in asked else asked.get("seeds")
    seeds = experiments.choose_seeds(s, which)
    device = asked.get("device", "cpu")
    if device != "cuda":  # which may be another machine's
        device = experiments.choose_device(device)
    runs = [run["run"] for run in s.get("runs", [])]
    if "run" in headline and runs and headline["run"] not in runs:
        raise unknown("run in [headline]:", headline["run"], runs)
    code = freshness.present_code(s)["code"]  # a job of other code is another job
    name = _id([paper, experiment, profile, s, seeds, device, code])
    headline = {"metric": "loss", "split": "train", **headline}
    return BatchJob(
        name, axes, "", {}, paper, experiment, profile, seeds, device, changes, headline
    )


def _id(what: Any) -> str:
    return digest(json.dumps(what, sort_keys=True))[:10]


def assignments(words: Iterable[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` pairs of a command line; a value is a number, a list, or a word.

    Raises
    ------
    FedlibError
        For a word without ``=``, or without a name before it, and for a name given twice.
    """
    parsed = {}
    for word in words:
        name, equals, text = word.partition("=")
        if of_a_run := re.fullmatch(r"(.+\.\w+)=([^=]*)", word):  # whose name may have one
            name, text = of_a_run.groups()
        if not equals or not name or name != name.strip("."):
            raise FedlibError(f"--set takes NAME=VALUE, for example lr=.01. Got '{word}'.")
        if name in parsed:
            raise FedlibError(f"--set has {name} twice. Several values of it belong in a grid.")
        parsed[name] = text  # a word, unless it can be read as something else
        with contextlib.suppress(ValueError, SyntaxError):
            parsed[name] = ast.literal_eval(text.title() if text in ("true", "false") else text)
    return parsed
