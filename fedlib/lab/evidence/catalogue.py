"""What can be run: papers, their experiments, and the settings of each profile."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, get_args

from fedlib import paths, schema
from fedlib.errors import FedlibError, nearest, unknown
from fedlib.lab.job import settings_of, study
from fedlib.schema import Page, conform, keys, read_toml

Profile = Literal["smoke", "quick", "long", "paper"]
PROFILES = get_args(Profile)

CHANGED = "A changed setting"  # before what is wrong with its name
_SHARED = ("profiles", "common")


class Shared(Page):
    """The tables of an ``experiments.toml`` that are not experiments."""

    profiles: NotRequired[dict[Profile, dict[str, Any]]]
    common: NotRequired[dict[str, Any]]


class Experiment(Page):
    """An experiment's own table, with its study's settings beside these."""

    __pydantic_config__ = {"extra": "allow", "strict": True}

    where: str
    title: str
    each: NotRequired[dict[str, list[Any]]]  # values of which every run tries each
    kind: NotRequired[str]
    only: NotRequired[list[Profile]]
    runs: NotRequired[list[dict[str, Any]]]
    smoke: NotRequired[dict[str, Any]]
    quick: NotRequired[dict[str, Any]]
    long: NotRequired[dict[str, Any]]
    paper: NotRequired[dict[str, Any]]


class BeforeStudy(Page):
    """What is read of an experiment's settings before its study says what it reads."""

    kind: NotRequired[str]
    study: NotRequired[str]
    runs: NotRequired[list[dict[str, Any]]]
    tunes: NotRequired[str]
    grid: NotRequired[list[Any]]


def papers() -> list[str]:
    """Return the papers that have experiments: fedlib's in the order of the book, then others."""
    return list(paths.papers())


def _table(paper: str) -> dict[str, Any]:
    return _read(paths.paper_folder(paper) / "experiments.toml")


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    if schema.pydantic is None:
        warnings.warn("Pydantic is not installed: pages are read unchecked.", stacklevel=2)
    page = read_toml(path, dict[str, dict[str, Any]])
    conform({k: v for k, v in page.items() if k in _SHARED}, Shared, str(path))
    entries = {k: _like(k, page, path) for k in page if k not in _SHARED}
    conform(entries, dict[str, Experiment], str(path))
    for name, entry in entries.items():
        _used([*page[name]], name, entry, page.get("profiles", {}), path)
    whole = {k: _whole_runs(entry) for k, entry in entries.items()}
    return {"profiles": {}, "common": {}} | page | whole


def _used(
    own: list[str], name: str, entry: dict[str, Any], shared: dict[str, Any], path: Path
) -> None:
    """Refuse what an experiment's own table says and every profile says otherwise."""
    at = _profiles(entry, shared)
    for key in (k for k in own if k not in (*PROFILES, "only", "like")):
        if at and all(key in {*shared.get(p, {}), *entry.get(p, {})} for p in at):
            raise FedlibError(
                f"{path}, [{name}]: '{key}' is never used, as every profile has its own. Write it "
                f"in [{name}.{at[0]}], or leave it out."
            )


def _like(name: str, page: dict[str, Any], path: Path) -> Any:
    """Return an experiment's table, with all that it has not itself from the one it is ``like``."""
    entry = page[name]
    if not isinstance(entry, dict) or (other := entry.get("like")) is None:
        return entry
    if other in _SHARED or not isinstance(page.get(other), dict) or "like" in page[other]:
        raise FedlibError(f"{path}, [{name}]: like = '{other}', which is no experiment that says "
                          "its settings itself.")  # fmt: skip
    whole = page[other] | {k: v for k, v in entry.items() if k != "like"}
    return {k: v for k, v in whole.items() if k != "tuned" or "tunes" not in whole}


def _whole_runs(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment with a run for each combination of values, which are its settings.

    ``{ run = "S = {S}", each = { S = [1, 2] } }`` is two runs, one with S = 1 and one with S = 2.
    """
    if "runs" not in entry:
        return entry
    common = entry.get("each", {})
    runs = [run | {"each": _lists(run) | common} for run in entry["runs"]]
    runs = [filled | names for run in runs for names, filled in each(run)]
    return {k: v for k, v in entry.items() if k != "each"} | {"runs": runs}


def each(entry: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield an entry for each combination of the values that its ``each`` has, after these values.

    ``each = { data = ["a", "b"], method = ["SGD"] }`` makes two; ``{data}`` and ``{method}`` in
    words stand for the values, ``{data[title]}`` for an entry of a value that is a table.
    """
    known = _lists(entry)
    for values in itertools.product(*known.values()):
        names = dict(zip(known, values, strict=True))
        yield names, {k: _filled(v, names) for k, v in entry.items() if k != "each"}


def _lists(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what an entry's ``each`` has, nothing if it has none."""
    known = entry.get("each", {})
    if not isinstance(known, dict) or not all(isinstance(v, list) for v in known.values()):
        raise FedlibError(f"'each' is a table of lists, such as {{ S = [1, 2] }}; got {known!r}.")
    return known


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Return a value with names filled in, wherever it has words."""
    if isinstance(value, Mapping):
        return {k: _filled(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, names) for v in value]
    try:
        return value.format(**names) if names and isinstance(value, str) else value
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise FedlibError(
            f"'{value}' cannot be filled in ({error!r}). 'each' has: {', '.join(names)}."
        ) from error


def experiment_names(paper: str) -> list[str]:
    """Return the experiments of a paper, in the order of the file."""
    return [name for name in _table(paper) if name not in _SHARED]


def profiles(paper: str, experiment: str) -> Sequence[str]:
    """Return the profiles at which an experiment can be run.

    That is ``long`` where it has a table, and ``paper`` where it or all experiments have one: only
    then does the file say what the paper's own size is.
    """
    if experiment not in experiment_names(paper):
        raise unknown("experiment", experiment, experiment_names(paper))
    return _profiles(_table(paper)[experiment], _table(paper)["profiles"])


def _profiles(entry: dict[str, Any], shared: dict[str, Any]) -> Sequence[str]:
    has = {"smoke", "quick", *entry, *({"paper"} & shared.keys())}
    return entry.get("only", [name for name in PROFILES if name in has])


def modules(paper: str) -> list[str]:
    """Return the modules in which the paper's studies are written."""
    table = _table(paper)
    tables = [table.get("common", {}), *(table[name] for name in experiment_names(paper))]
    kinds = [entry["kind"] for entry in tables if "kind" in entry]
    return sorted({kind.split(":")[0] for kind in kinds})


def command(paper: str, experiment: str, out: str | None = None, profile: str | None = None) -> str:
    """Return the command that makes a record.

    Parameters
    ----------
    out
        Folder for the record; default is that of the paper itself.
    profile
        Default, also where the experiment does not run at it: ``quick`` if it can, else ``paper``.
    """
    can = profiles(paper, experiment)
    if profile not in can:
        profile = "quick" if "quick" in can else can[-1]
    if out is None:
        home = paths.paper_folder(paper).parent
        out = "data/papers" if home == paths.data_folder() / "papers" else str(home)
    return f"fedlib run {paper} {experiment} --profile {profile} --out {out}"


def describe(paper: str) -> list[dict[str, str]]:
    """Return one row an experiment: paper, experiment, where in the paper, title, profiles."""
    rows = []
    for name in experiment_names(paper):
        entry = _table(paper)[name]
        row = dict(paper=paper, experiment=name, where=entry["where"], title=entry["title"])
        rows.append(row | dict(profiles=", ".join(profiles(paper, name))))
    return rows


def settings(paper: str, experiment: str, profile: str) -> dict[str, Any]:
    """Return the resolved settings of an experiment at a profile.

    What all experiments or a profile share is left out where the experiment's study does not read
    it, so that a record says what it was made with, and no more.

    Raises
    ------
    FedlibError
        For an unknown paper, experiment or profile, with the valid ones.
    """
    valid, table = profiles(paper, experiment), _table(paper)
    if profile not in valid:
        raise unknown(f"profile of {experiment}", profile, valid)
    common, of_experiment, shared, special = _layers(table, experiment, profile)
    s = common | of_experiment | shared | special
    read = {*of_experiment, *special, *reads(s)}
    return {k: v for k, v in s.items() if k in read}


def _layers(table: dict[str, Any], experiment: str, profile: str) -> list[dict[str, Any]]:
    """Return what is said of all experiments, of one, of a profile, and of that one at it."""
    entry = table[experiment]
    of_experiment = {k: v for k, v in entry.items() if k not in (*PROFILES, "only")}
    shared = table["profiles"].get(profile, {})
    return [table["common"], of_experiment, shared, entry.get(profile, {})]


def reads(s: dict[str, Any]) -> set[str]:
    """Return the settings that an experiment's study reads; all, where it does not say."""
    try:
        shapes = _shapes(s)
    except FedlibError:  # a study that is not there is an error when it is to be run
        return {*s}
    return {*s} if None in shapes else _keys(shapes)


def change(s: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with other values for some of them.

    Parameters
    ----------
    s
        Resolved settings, see :func:`settings`.
    changes
        Values by the name of a setting, which changes it in every run that has it; or by
        ``RUN.SETTING``, in that run alone.

    Raises
    ------
    FedlibError
        For a run that is not there, with the valid names.
    """
    s = copy.deepcopy(dict(s))
    for key, value in changes.items():
        if not isinstance(key, str):
            raise FedlibError(f"A setting goes by its name, in words; got {key!r}.")
        run, _, name = key.rpartition(".")
        runs = [one for one in s.get("runs", []) if one.get("run") == run or not run]
        if run and not runs:
            raise unknown("run", run, [one.get("run", "") for one in s.get("runs", [])])
        inside = [one for one in runs if run or name in one]
        for one in inside:
            one[name] = value
        if not run and (name in s or not inside):
            s[name] = value
    return s


def added(s: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Return the changed settings that neither the experiment nor a run of it has.

    A study may read them or not, as the other settings have it.
    """
    known = {*s}.union(*s.get("runs", []))
    return [key for key in changes if key.rpartition(".")[2] not in known]


def check_experiment(
    paper: str, experiment: str, profile: str, changes: Mapping[str, Any] | None = None
) -> None:
    """Check an experiment's settings against those that its study reads, and their types.

    A study whose job names no type of settings is not checked.

    Raises
    ------
    FedlibError
        With the table, the key, what was there and what was expected.
    """
    s, table = change(settings(paper, experiment, profile), changes or {}), _table(paper)
    page = f"{paths.paper_folder(paper) / 'experiments.toml'}"
    parts = {k: v for k, v in s.items() if k in keys(BeforeStudy)}
    conform(parts, BeforeStudy, f"{page}, [{experiment}]")
    shapes = _shapes(s)
    if s.get("grid") == []:
        raise FedlibError(f"{page}, [{experiment}]: the grid is empty. Give it values to try.")
    if None in shapes:
        return
    known = _keys(shapes)
    common, of_experiment, shared, special = _layers(table, experiment, profile)
    _only(known, of_experiment, f"{page}, [{experiment}]")
    _only(known, special, f"{page}, [{experiment}.{profile}]")
    every = [_shapes(_whole(table, name)) for name in experiment_names(paper)]
    if not any(None in shapes for shapes in every):
        union = {key for shapes in every for key in _keys(shapes)}
        _only(union, common, f"{page}, [common]")
        _only(union, shared, f"{page}, [profiles.{profile}]")
    _only(known, {key.rpartition(".")[2]: key for key in changes or {}}, CHANGED)
    names_seen: set[str] = set()
    for run in s.get("runs") or [{}]:
        name = f", run '{run.get('run', '')}'" * bool(run)
        _only(known, run, f"{page}, [{experiment}{name}]")
        if run and not isinstance(run.get("run"), str):
            raise FedlibError(f"{page}, [{experiment}]: every run needs a name of its own{name}.")
        short = re.sub(r"\W", "_", run.get("run", ""))  # what files may be called
        if run and short in {"", *names_seen}:
            raise FedlibError(
                f"{page}, [{experiment}]: every run needs a name of its own, that differs in more "
                f"than signs{name}."
            )
        names_seen.add(short)
        values = {**s, **run} | ({s["tunes"]: s["grid"][0]} if s.get("tunes") else {})
        if "tuned" in s:
            values = {k: 1.0 if v == "tuned" else v for k, v in values.items()}
        for shape in shapes:
            mine = {key: values[key] for key in keys(shape) if key in values}
            place = f"[{experiment}] at {profile}{name},"
            changed = f"{place} with a changed {', '.join(changes or {})},"
            conform(mine, shape, changed if changes else f"{page}, {place}")


def _shapes(s: dict[str, Any]) -> list[Any]:
    """Return the settings of an experiment's study, and of the study that it tunes."""
    if "kind" not in s:
        raise FedlibError(f"The experiment '{s['title']}' has no kind, 'package.module:function'.")
    kinds = [s[key] for key in ("kind", "study") if key in s]
    for kind in kinds:
        if not _takes_a_job(study(kind)):
            raise FedlibError(f"'{kind}' is no study. A study is a function of a job, study(job).")
    return [settings_of(kind) for kind in kinds]


def _whole(table: dict[str, Any], experiment: str) -> dict[str, Any]:
    """Return all that is said of an experiment, at its largest profile."""
    largest = table[experiment].get("only", PROFILES)[-1]
    common, of_experiment, shared, special = _layers(table, experiment, largest)
    return common | of_experiment | shared | special


def _takes_a_job(function: Any) -> bool:
    try:
        return "job" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _keys(shapes: list[Any]) -> set[str]:
    return {key for shape in shapes for key in keys(shape)}


def _only(known: set[str], values: dict[str, Any], place: str) -> None:
    for key in sorted({*values} - known):
        raise FedlibError(f"{place}: unknown key '{key}'.{nearest(key, sorted(known))}")
