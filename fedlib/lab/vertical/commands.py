"""VFB²: parties that hold columns, as processes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer()


@app.callback()
def _group() -> None:  # a single command would be no group
    pass


@app.command()
def mpi(
    parties: Annotated[int, typer.Option(help="q: a process for each.")] = 8,
    active: Annotated[int, typer.Option(help="m: the first m hold labels.")] = 3,
    algorithm: Annotated[str, typer.Option(help="sgd, svrg or saga.")] = "svrg",
    data: Annotated[str, typer.Option(help="A set of columns, such as uci-credit.")] = (
        "breast-cancer"
    ),
    epochs: Annotated[
        int, typer.Option(help="Passes of steps. Full gradients, as SVRG has, are passes more.")
    ] = 5,
    lr: Annotated[float, typer.Option(help="Step size γ.")] = 0.01,
    lam: Annotated[float, typer.Option(help="λ, the weight of the regulariser.")] = 1e-4,
    loss: Annotated[
        str | None, typer.Option(help="logistic, squared or robust. Default: by the data.")
    ] = None,
    regulariser: Annotated[str, typer.Option(help="l2, nonconvex or none.")] = "l2",
    threads: Annotated[
        int | None, typer.Option(help="k: collaborators of a party. Default: m.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the features' owners, the samples.")] = 0,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="VFB: all wait for each other after every round.")
    ] = False,
    equal: Annotated[
        bool, typer.Option("--equal", help="Equal shares of the steps, instead of a common pot.")
    ] = False,
    work: Annotated[
        float, typer.Option(min=0, help="Seconds a party sleeps for a number, read or updated.")
    ] = 0.0,
    slower: Annotated[
        float, typer.Option(min=0, help="By what share the last party takes longer, such as 0.4.")
    ] = 0.0,
    message: Annotated[float, typer.Option(min=0, help="Seconds that a message is held.")] = 0.0,
    hosts: Annotated[
        str | None, typer.Option(help="A file of hosts for mpiexec. Default: this machine.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="With --hosts: a new folder that all of them see.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds of silence that end a run.")] = 60.0,
) -> None:
    """Run VFB² with a process for each party, over MPI; seconds are those of this machine.

    With ``--work`` or ``--message`` the simulator's seconds are printed as well.
    """
    import numpy as np

    from fedlib.lab.vertical.mpi import find_launcher, predicted_run, run_parties
    from fedlib.papers.vertical.data import load_columns
    from fedlib.papers.vertical.problem import Problem, split_features
    from fedlib.papers.vertical.setup import straggler
    from fedlib.population.delays import Deterministic

    find_launcher()  # before anything is loaded
    data_set = load_columns(data, seed)
    loss = loss or ("logistic" if data_set.classes else "squared")
    d = data_set.train_x.shape[1]
    problem = Problem(
        data_set.train_x, data_set.train_y, split_features(d, parties, seed), loss, lam, regulariser
    )
    typer.echo(f"{data}: {problem.n} rows, {d} columns, {parties} parties, {active} with labels.")
    if parties == 2:
        typer.echo("Of two parties each can take its own part off a sum: masks hide nothing here.")
    setting: dict[str, Any] = dict(
        epochs=epochs, active=active, threads=threads, seed=seed, waiting=waiting,
        compute=straggler(parties, parties - 1, slower, work), delays=Deterministic(message),
    )  # fmt: skip
    run = run_parties(
        problem, algorithm, lr, **setting, equal=equal, hosts=hosts, folder=folder,
        patience=patience,
    )  # fmt: skip
    typer.echo("passes  seconds  loss")
    for row in run.rows:
        typer.echo(f"{row.epoch:6g}  {row.time:7.2f}  {row.loss:.6f}")
    if work or message:
        told = predicted_run(problem, algorithm, lr, **setting).rows[-1]
        typer.echo(f"Simulated: {told.time:.2f} seconds to a loss of {told.loss:.6f}.")
    z = data_set.test_x @ run.w
    if data_set.classes:
        typer.echo(f"Right on {np.mean(np.sign(z) == data_set.test_y):.4f} of {len(z)} test rows.")
    else:
        typer.echo(f"Root mean square error on {len(z)} test rows: "
                   f"{np.sqrt(np.mean((z - data_set.test_y) ** 2)):.5f}.")  # fmt: skip
    kinds = ", ".join(f"{count} {kind}" for kind, count in run.messages.items())
    typer.echo(f"Messages: {kinds}; {sum(run.bytes.values())} bytes.")
