"""The command line: list, run, join, claims, matrix, stale, check, bench, gpu, batch, data, …"""

from __future__ import annotations

import contextlib
import errno
import json
import lzma
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.lab.vertical import commands


class _ForPeople(typer.core.TyperGroup):
    """Mistakes are printed for people, interruptions end quietly; neither with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _interruptible():
                return super().invoke(ctx)
        except FedlibError as error:
            told = [str(error), *getattr(error, "__notes__", ())]
            typer.echo(f"fedlib: {' '.join(told)}", err=True)
            raise typer.Exit(2) from error
        except (MemoryError, OverflowError) as error:
            why = str(error) or type(error).__name__
            typer.echo(f"fedlib: too large for here: {why}. Use smaller numbers.", err=True)
            raise typer.Exit(2) from error
        except PermissionError as error:
            if error.filename is None:
                raise
            typer.echo(f"fedlib: {error.filename} is not open to you: {error.strerror}.", err=True)
            raise typer.Exit(2) from error
        except (zlib.error, lzma.LZMAError) as error:
            told = "`fedlib data verify` checks those in fedlib's cache"
            typer.echo(f"fedlib: A packed file is damaged ({error}). {told}.", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            again = " Run the same command again to go on."
            keeps = ctx.invoked_subcommand not in ("bench", "claims", "list", "stale")
            typer.echo(f"Interrupted.{again * keeps}", err=True)
            raise typer.Exit(130) from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end as Ctrl-C: a compiled module that it meets while loading says ImportError."""
    came = []

    def note(*signalled: Any) -> None:
        came.append(signalled)
        signal.default_int_handler(*signalled)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if came and not isinstance(error, typer.Exit):
            raise KeyboardInterrupt from error
        raise
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


app = typer.Typer(
    cls=_ForPeople,
    help="Federated learning, line by line: run the book's experiments and judge its claims.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: what there is, download, verify.", no_args_is_help=True)
app.add_typer(data_app, name="data")
batch_app = typer.Typer(help="Many runs: start, status, collect, plot.", no_args_is_help=True)
app.add_typer(batch_app, name="batch")
app.add_typer(commands.app, name="vertical", help=commands.__doc__, no_args_is_help=True)


def _folder(path: str) -> Path:
    """Expand ``~`` where a shell has not: in ``--out=~/runs``."""
    if not str(path).strip():
        raise typer.BadParameter("it names no folder. For the current one: --out .")
    return paths.expand(path, "--out")


def _place(text: str, kind: Any = typer.Option) -> Any:
    """Return an option, or an argument, for a folder or a file."""
    return kind(parser=_folder, metavar="<path>", help=text)


Paper = Annotated[str, typer.Argument(help="For example: participation.")]
AnyPaper = Annotated[str | None, typer.Argument(help="Default: every paper.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE for a setting, or RUN.NAME=VALUE; several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print a list of rows as JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Tf32 = Annotated[
    bool,
    typer.Option("--tf32", help="On a GPU, multiply with factors of 11 bits: faster, less exact."),
]


def _print(rows: list[dict[str, Any]], as_json: bool, columns: list[str] | None = None) -> None:
    """Print rows as JSON, or as a plain table of the chosen columns."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1, default=str))
        return
    if not rows:
        typer.echo("Nothing to show.")
        return
    columns = columns or list(rows[0])
    cells = [[str(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    for line in [columns, ["-" * w for w in widths], *cells]:
        typer.echo("  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip())


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List every paper's experiments, and how long the stored record of each profile took."""
    from fedlib.lab.evidence import catalogue, duration

    rows = [row for paper in catalogue.papers() for row in catalogue.describe(paper)]
    for row in rows:
        names = row["paper"], row["experiment"]
        each = row["profiles"].split(", ")
        row["took"] = ", ".join(f"{name} {duration.took_in_words(*names, name)}" for name in each)
    _print(rows, as_json)


def _seeds(text: str | None) -> int | list[int] | None:
    """Read a number of seeds, or seeds with commas between them."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words and all(word.isdecimal() and len(word) < 20 for word in words):
        numbers = [int(word) for word in words]
        if "," in text and max(numbers) < 2**63:
            return numbers
        if "," not in text and 1 <= numbers[0] <= 10_000:
            return numbers[0]
    raise FedlibError(
        f"--seeds takes how many, 1 to 10000, or which, with commas: 3, or 4,5,6. "
        f"Got '{text[:60]}'."
    )


def _somebody_is_there() -> bool:
    """Whether a question would be read: in a script or a job's queue nobody answers."""
    return sys.stdin is not None and sys.stdin.isatty()


@app.command()
def run(
    paper: Paper,
    experiment: Annotated[str, typer.Argument(help="For example: fig1. See: fedlib list.")],
    profile: Annotated[
        str, typer.Option(help="smoke, quick, long or paper; fedlib list says what took how long.")
    ] = "quick",
    seeds: Annotated[
        str | None, typer.Option(help="How many, or which: 3, or 4,5,6. Default: the profile's.")
    ] = None,
    device: Device = "auto",
    out: Annotated[Path, _place("Folder for the record.")] = Path("runs"),
    tf32: Tf32 = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite a record with other seeds or settings.")
    ] = False,
    changes: Changes = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing before what takes more than an hour.")
    ] = False,
) -> None:
    """Say how long an experiment takes, run it and store its record.

    Interrupted, it goes on when started again.
    """
    from fedlib.lab.batch.grid import assignments
    from fedlib.lab.evidence import ages, duration, experiments

    def announce(plan: duration.Plan) -> None:
        _note_added(experiment, s, values)
        expected = duration.expect(plan, lambda text: typer.echo(text, err=True))
        typer.echo(expected, err=True)
        asks = expected.left > duration.HOUR and not yes and _somebody_is_there()
        if asks and not typer.confirm("Start it? (--yes says so beforehand.)", err=True):
            raise FedlibError(
                "Not started. Take fewer --seeds or a smaller --profile, or start it with --yes."
            )

    which, device = _seeds(seeds), experiments.choose_device(device)
    s = experiments.settings(paper, experiment, profile)  # before anything is looked for
    values = assignments(changes or [])
    if not changes:
        ages.committed(paper, experiment, profile)
    record = experiments.run(
        paper, experiment, profile, seeds=which, device=device, out=out, tf32=tf32,
        replace=replace, changes=values, announce=announce,
    )  # fmt: skip
    for name, where in record.manifest["diverged"].items():
        seeds = ", ".join(f"seed {seed} by round {t}" for seed, t in where.items())
        typer.echo(f"{name} diverged: {seeds}.")
    typer.echo(f"Wrote {record.path}")
    typer.echo(f"Wrote {record.manifest_path}")


@app.command()
def join(
    paper: Paper,
    experiment: Annotated[str, typer.Argument(help="For example: fig1.")],
    sources: Annotated[list[Path], typer.Argument(help="Folders of records, two or more.")],
    out: Annotated[Path, _place("Folder for the joined record.")],
    profile: Annotated[str, typer.Option(help="smoke, quick, long or paper.")] = "quick",
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite a record with other seeds or settings.")
    ] = False,
) -> None:
    """Join records of one experiment that were run with different seeds."""
    from fedlib.lab.evidence import records

    record = records.join(paper, experiment, profile, sources, out, replace)
    typer.echo(f"Wrote {record.path}, {len(record.manifest['seeds'])} seeds")


SIGNS = {
    **{"holds": "✓", "smaller": "+", "level": "=", "reversed": "✗"},
    **{"differs": "≠", "outside": "∉", "open": "?", "no record": "-"},
}


@app.command()
def claims(
    paper: AnyPaper = None,
    as_json: Json = False,
    out: Annotated[Path | None, _place("Judge the records in this folder.")] = None,
) -> None:
    """Judge the papers' claims from stored records."""
    from fedlib.lab.evidence import ages, scale, wanted
    from fedlib.lab.evidence import claims as judge

    papers = [paper] if paper else paths.papers("claims.toml")
    rows = (row for name in papers for row in judge.judge(name, out))  # a paper takes seconds
    if as_json:
        _print(list(rows), True)
        return
    for row in rows:
        found = judge.finding_in_words(row).upper()
        typer.echo(f"{row['id']}  {found}  {row['tally']}  ({row['record']})")
        typer.echo(f"  {row['statement']}")
        if row["data"]:
            typer.echo(f"  {scale.sentence(row['scale'], row['data'])}")
        if own := judge.own_in_words(row):
            typer.echo(f"  {own}: {row['own']['finding']}")
        if takes := wanted.what_it_takes(row):
            typer.echo(f"  {takes}")
        for name, finding in row["readings"].items():
            typer.echo(f"  read as {name}: {finding}")
        for check in row["checks"]:
            typer.echo(f"    {SIGNS[check['outcome']]} {judge.quantity_in_words(check)}")
            why = f"; {check['why']}" if check["why"] else ""
            typer.echo(f"      {check['measured']}, asked: {check['asked']}{why}")
        for line in row["origins"]:
            typer.echo(f"  {line}")
        typer.echo(f"  {ages.age_in_words(row['ages'])}" if row["ages"]["first_look"] else "")
    typer.echo("  ".join(f"{sign} {word}" for word, sign in SIGNS.items()))


@app.command("records")
def records_(
    go_on: Annotated[bool, typer.Option("--work", help="Make the next ones.")] = False,
    hours: Annotated[
        float | None,
        typer.Option(min=0.001, max=8760, help="With --work: time to spend. Default: 1."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="With --work: how many to use. Default: 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the queue of long records, or go on with it, a seed at a time."""
    from fedlib.lab.evidence import queue

    if not go_on and (hours or cores):
        raise FedlibError(
            "--hours and --cores say how to work on the queue. Add --work, or leave them out to "
            "see the queue."
        )
    if not go_on:
        _print(queue.queue_rows(), as_json)
        return
    import torch

    torch.set_num_threads(cores or 1)
    queue.work(hours or 1.0, typer.echo, sys.stderr.isatty())


@app.command()
def matrix(
    method: Annotated[str, typer.Argument(help="MODULE:FUNCTION; the function makes it.")],
    profile: Annotated[str, typer.Option(help="smoke or quick.")] = "quick",
    strength: Annotated[
        list[float] | None, typer.Option(help="A value of its own setting; several times.")
    ] = None,
    situation: Annotated[
        list[str] | None, typer.Option(help="Only this one; several times. Default: all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many judge it, at least. Default: the profile's.")
    ] = None,
    out: Annotated[Path, _place("Folder for its records.")] = Path("matrix"),
) -> None:
    """Put a method of your own into the matrix: tuned, run, and compared with the book's.

    Interrupted, it goes on when started again.
    """
    from fedlib.lab.show.matrix import enter

    sys.path.insert(0, "")  # a module in the folder where one is
    enter(
        method, profile, strengths=strength or (), out=out, names=situation, seeds=seeds,
        say=typer.echo,
    )  # fmt: skip


@app.command()
def stale(
    paper: AnyPaper = None,
    everything: Annotated[bool, typer.Option("--all", help="Fresh and checked ones, too.")] = False,
    as_json: Json = False,
) -> None:
    """List stored records that the present code, settings or data may not give again."""
    from tqdm import tqdm

    from fedlib.lab.evidence import catalogue, records

    rows = []
    for record in tqdm(list(records.stored(paper=paper)), "Records", leave=False, disable=None):
        names = record.names
        state = record.compared(again=True)
        if everything or state.word == "stale":
            if names[1] in catalogue.experiment_names(names[0]):
                again = catalogue.command(*names[:2], profile=names[2])
            else:
                again = f"delete {record.path} and {record.manifest_path.name}"
            name = "{}/{}.{}".format(*names)
            rows.append(dict(record=name, state=state.word, why=state.why, again=again))
    if rows or as_json:
        _print(rows, as_json)


@app.command()
def check(
    paper: AnyPaper = None,
) -> None:
    """Make the stored smoke records again and compare; exits 1 when a number has changed.

    A change of code that leaves them as they are makes larger records "checked", not "stale".
    """
    from fedlib.lab.evidence import catalogue, experiments

    wrong = 0
    for name in [paper] if paper else catalogue.papers():
        for experiment in catalogue.experiment_names(name):
            if "smoke" not in catalogue.profiles(name, experiment):
                typer.echo(f"{name} {experiment}: it has no profile 'smoke', so nothing to compare")
                continue
            with tempfile.TemporaryDirectory() as place:
                differs = experiments.check_again(name, experiment, place, progress=False)
            typer.echo(f"{name} {experiment}: {differs or 'the same'}")
            wrong += bool(differs)
    if wrong:
        raise typer.Exit(1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Or another: a wrong name lists them.")] = "local-sgd",
    as_json: Json = False,
    out: Annotated[
        Path | None,
        _place("Keep the table in this folder of records."),
    ] = None,
) -> None:
    """Time the batched engine against a plain loop on this machine, as ratios."""
    from fedlib import files
    from fedlib.lab import bench as benches

    if out is not None and name in benches.BENCHES:
        files.make_folder(out)  # before minutes of work, not after
    rows = benches.run(name)
    kept = None if out is None else benches.save_bench(name, rows, out)
    _print(rows, as_json)
    if kept:
        typer.echo(f"Kept as {kept}", err=True)


@app.command()
def gpu(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time to spend.")] = 25,
    out: Annotated[Path, _place("Folder for all that is found.")] = Path("runs/gpu"),
    device: Device = "auto",
    profile: Annotated[
        str, typer.Option(help="Which records to make: smoke, quick or paper.")
    ] = "paper",
    tf32: Tf32 = False,
) -> None:
    """Check a GPU against the CPU, time it, and go on with the large records.

    Stopped or out of time, it goes on when started again on the same folder.
    """
    from fedlib.lab import gpu as whole

    whole.run(minutes, out, device, profile, tf32, typer.echo)


def _note_added(experiment: str, s: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Say which changed settings the experiment itself does not have."""
    from fedlib.lab.evidence import catalogue

    for name in catalogue.added(s, changes):
        typer.echo(
            f"Note: [{experiment}] itself has no '{name}'. It changes a run only where the "
            "other settings ask for it.", err=True,
        )  # fmt: skip


Folder = Annotated[Path, _place("The folder of the batch.", typer.Argument)]


@batch_app.command("run")
def batch_run(
    grid: Annotated[Path, typer.Argument(help="A TOML file: what is the same, and axes.")],
    out: Annotated[Path, _place("Folder for everything.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each.")] = 1,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or auto; instead of --workers.")
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: only every n-th unit, from the i-th.")] = "1/1",
    retry: Annotated[bool, typer.Option("--retry", help="Run failed jobs again.")] = False,
    changes: Changes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be run together, and stop.")
    ] = False,
) -> None:
    """Run the jobs of a grid that are not finished. Interrupted, it goes on when started again.

    Exits 1 when a job has failed.
    """
    from fedlib.lab import batch
    from fedlib.lab.batch.grid import assignments
    from fedlib.lab.batch.spread import remaining
    from fedlib.lab.batch.units import describe_units, plan
    from fedlib.lab.evidence import catalogue

    values = assignments(changes or [])
    jobs = batch.read_grid(grid, values)
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for job in jobs:
        if not job.notebook:
            kinds.setdefault((job.paper, job.experiment, job.profile), {}).update(job.changes)
    for names, added in kinds.items():
        _note_added(names[1], catalogue.settings(*names), added)
    if dry_run:
        todo = plan(jobs, workers, shard)
        left = [part for unit in todo for part in remaining(unit, out, retry)]
        if left:
            _print(describe_units(left), False)
        every, some = (sum(len(unit.jobs) for unit in units) for units in (todo, left))
        typer.echo(f"{some} of {every} jobs to run; the others are done, or failed without --retry"
                   if some < every else f"{every} jobs to run")  # fmt: skip
        return
    table = batch.run(grid, out, workers, threads, ray, shard, retry, values, sys.stderr.isatty())
    _print_jobs(out, table)
    typer.echo(f"Wrote {out / 'jobs.csv'}")
    if (table["status"] == "failed").any():
        raise typer.Exit(1)


def _share(folder: Path) -> str:
    """Return how many jobs of a batch are done, unless all are."""
    from fedlib.lab.batch import store

    status = store.job_table(folder)["status"]
    done = int((status == "done").sum())
    return "" if done == len(status) else f": {done} of {len(status)} jobs"


def _print_jobs(folder: Path, table: Any) -> None:
    """Print a table of jobs, the counts, and what headline records lack."""
    from fedlib.lab.batch import store

    shown = table.astype(object).where(table.notna(), "")
    shown["headline"] = [f"{v:.5g}" if isinstance(v, float) else v for v in shown["headline"]]
    rows = shown.to_dict("records")
    _print(rows, False, [c for c in shown if c != "why" or any(row["why"] for row in rows)])
    counts = table["status"].value_counts()
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if lacking := store.lacking(folder):
        typer.echo(lacking, err=True)


@batch_app.command("status")
def batch_status(folder: Folder, as_json: Json = False) -> None:
    """Show every job: its values, whether it is done, how long it took, its headline."""
    from fedlib.lab.batch import store

    table = store.job_table(folder)
    if as_json:
        _print(json.loads(table.to_json(orient="records")), True)
    else:
        _print_jobs(folder, table)
    try:
        store.write_table(folder, table)
    except FedlibError:
        typer.echo(f"Note: {folder} cannot be written, so its jobs.csv stays as it was.", err=True)


@batch_app.command("collect")
def batch_collect(folder: Folder) -> None:
    """Put the rows of all finished jobs into one table, manifests beside it."""
    from fedlib.lab import batch

    typer.echo(f"Wrote {batch.collect(folder)}{_share(folder)}")


@batch_app.command("plot")
def batch_plot(
    folder: Folder,
    x: Annotated[str | None, typer.Option(help="The axis below. Default: the first.")] = None,
    by: Annotated[str | None, typer.Option(help="A line for each value of this axis.")] = None,
    out: Annotated[Path | None, _place("The picture; default in the folder.")] = None,
) -> None:
    """Draw the headline over one or two axes of the grid."""
    from fedlib.lab import batch
    from fedlib.lab.show import plotting

    plotting.use()
    figure, target = batch.plot(folder, x, by), out or folder / "headline.svg"
    if target.is_dir():
        raise FedlibError(f"{target} is a folder. Name a file: --out {target / 'headline.svg'}.")
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FedlibError(f"Cannot draw {target}: {why}.") from error
    typer.echo(f"Wrote {target}{_share(folder)}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets, and whether they are in the cache."""
    from fedlib import datasets

    def here(card: datasets.Card) -> str:
        if card.embedded and not card.base:
            return "embedded"
        return "yes" if datasets.cached(card.name) else "no"

    rows = [
        dict(name=name, train=card.train, test=card.test, here=here(card), title=card.title)
        for name, card in datasets.all_cards().items()
    ]
    _print(rows, as_json)


@data_app.command("card")
def data_card(name: Annotated[str, typer.Argument(help="See: fedlib data list.")]) -> None:
    """Say what is known about a data set; of one to be brought, what it is and what it changes."""
    from fedlib import datasets
    from fedlib.lab.evidence import brought

    for line in brought.told(name):
        typer.echo(line)
    if datasets.card(name).bring:
        here = "" if datasets.cached(name) else "not "
        typer.echo(f"It is {here}here. Its folder: {datasets.cache_folder() / name}")


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="See: fedlib data list.")]) -> None:
    """Fetch a data set into the cache and verify it."""
    from fedlib import datasets

    files = datasets.get(name)
    for path in files:
        typer.echo(f"Have {path}")
    if not files:
        typer.echo(f"'{name}' is embedded; there is nothing to fetch.")


@data_app.command("verify")
def data_verify(
    name: Annotated[str | None, typer.Argument(help="Default: all.")] = None, as_json: Json = False
) -> None:
    """Check the files in the cache against the cards. Exits 1 when one is corrupt."""
    from fedlib import datasets

    rows = datasets.verify(name)
    _print(rows, as_json, ["name", "file", "state", "fidelity", "detail"])
    if any(row["state"] == "corrupt" for row in rows):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the command ``fedlib``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="replace")  # a sign that it lacks becomes a ?
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"fedlib: Cannot write: {error.strerror}.\n")
        os._exit(2)  # what is still held back cannot be written either
