"""The round loop: killed and resumed, diverged beside healthy.

Run as a script this file is the child process of its own tests: ``KIND FOLDER KILL``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlib
from fedlib.engine import simulation
from fedlib.engine.checkpoint import MARK, Checkpoint
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.model import Model
from fedlib.engine.models import mlp
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.evidence import experiments
from fedlib.lab.studies import participation as studies
from fedlib.papers.fedavg import FedAvg, State
from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitMinibatch
from fedlib.population import participation as pt

N, SEEDS, ROUNDS, EVERY = 8, (1, 4), 23, 5
PAPER, EXPERIMENT = "participation", "fig1"


def classification(dtype=np.float64) -> Task:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((10 * N, 6)).astype(dtype), rng.integers(0, 3, 10 * N)
    return Task(mlp(6, 5, 3), FederatedDataset.build(x, y, list(np.arange(10 * N).reshape(N, 10))))


MINI = dict(lr=0.05, local_steps=2, batch_size=3)
ALGORITHMS = {
    "amplified": GeneralizedFedAvg(pt.PeriodicSampler(N, 2, 2, 4), amplify=3, interval=7, **MINI),
    "waiting": WaitMinibatch(pt.Independent(N, 2), interval=6, **MINI),
}


def trained(name: str, folder: Path | None = None, callbacks=(), algorithm=None, **changes):
    """Run one of the algorithms, with checkpoints when a folder is given."""
    options = dict(evaluation=Evaluation(3), name=name, progress=False, callbacks=callbacks)
    if folder is not None:
        options |= dict(checkpoint=Checkpoint(folder / "run.pt", EVERY))
    options |= dict(rounds=ROUNDS, seeds=SEEDS) | changes
    chosen = algorithm or ALGORITHMS[name]
    return simulate(chosen, classification(np.float32), **options)


def held(state) -> dict:
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def same_state(a: dict, b: dict) -> None:
    assert a.keys() == b.keys() and {"x", "u", "cursor", "t", "t0"} <= a.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, b[name]), name
        else:
            assert value == b[name], name


# --- killed and resumed ---------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(kind: str, folder: Path, kill: str) -> None:
    """Do the work of one process: ``round:T`` dies in round T, ``save:K`` within the K-th save."""
    torch.set_num_threads(1)
    what, _, when = kill.partition(":")
    saves, log = [], (folder / "log.txt").open("a", buffering=1)
    replace = os.replace

    def moved(source, target) -> None:
        saves.append(target)
        if what == "save" and str(target).endswith(".pt") and len(saves) == int(when):
            part = Path(source)
            part.write_bytes(part.read_bytes()[:100])
            die()
        replace(source, target)

    def watch(state, metrics) -> None:
        log.write(f"{state.t}\n")
        if what == "round" and state.t == int(when):
            die()

    os.replace = moved
    if kind == "experiment":

        def often(*args, **options):
            if (kept := options.get("checkpoint")) is not None:
                names = options["name"]
                log.write((names if isinstance(names, str) else names[0]) + "\n")
                kept = dataclasses.replace(kept, every=EVERY)
                options |= dict(checkpoint=kept, callbacks=[watch])
            return simulate(*args, **options)

        studies.simulate = often
        experiments.run(PAPER, EXPERIMENT, "smoke", device="cpu", out=folder, progress=False)
    else:
        history = trained(kind, folder, [watch])
        result = dict(state=held(history.state), frame=history.frame)
        (folder / "result.pickle").write_bytes(pickle.dumps(result))


def process(kind: str, folder: Path, kill: str = "never") -> list[str]:
    """Run a child process that must die when told to, and return what it logged."""
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": str(Path(fedlib.__file__).parents[1])}
    command = [sys.executable, __file__, kind, str(folder), kill]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == (0 if kill == "never" else -signal.SIGKILL), done.stderr
    return log.read_text().split("\n")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amplified", "waiting"])
def test_killed_and_resumed_equals_uninterrupted(name, tmp_path):
    assert process(name, tmp_path, "round:13")[0] == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "run.pt"]
    assert process(name, tmp_path)[0] == "11", "it must go on from round 10"
    result = pickle.loads((tmp_path / "result.pickle").read_bytes())
    whole = trained(name)
    same_state(held(whole.state), result["state"])
    pd.testing.assert_frame_equal(whole.frame, result["frame"], check_exact=True)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
@pytest.mark.long
def test_killed_experiment_leaves_the_same_bytes(tmp_path):
    log = process("experiment", tmp_path, "save:17")  # 2 in the warm-up, 12 in the first run
    assert log[0] == "warm-up" and log[11] == "amplified" and log[-1] == "25"
    (folder,) = (path for path in (tmp_path / PAPER).iterdir() if path.is_dir())
    assert folder.name.startswith(f".{EXPERIMENT}.smoke.") and folder.is_dir()
    assert list(folder.glob("*.part")), "it died before the checkpoint was in its place"
    log = process("experiment", tmp_path)
    assert log[:4] == ["warm-up", "amplified", "no-amplification", "21"], "the others are finished"
    names = [f"{EXPERIMENT}.smoke.{end}" for end in ("csv.gz", "json")]
    assert sorted(p.name for p in (tmp_path / PAPER).iterdir()) == names
    how = dict(device="cpu", out=tmp_path / "b", progress=False)
    whole = experiments.run(PAPER, EXPERIMENT, "smoke", **how)
    assert whole.path.read_bytes() == (tmp_path / PAPER / names[0]).read_bytes()


def test_resuming_twice_and_after_the_end(tmp_path):
    whole = trained("amplified")

    class Stop(Exception):
        pass

    def stop_at(t):
        def callback(state, metrics):
            if state.t == t:
                raise Stop

        return callback

    for t in (7, 12, 22):
        with pytest.raises(Stop):
            trained("amplified", tmp_path, [stop_at(t)])
    for _ in range(2):
        again = trained("amplified", tmp_path)
        same_state(held(whole.state), held(again.state))
        assert whole.frame.equals(again.frame)


def test_an_earlier_divergence_survives_the_resumption(tmp_path):
    whole = trained("amplified", algorithm=Breaks(4))
    rounds = []

    def stop(state, metrics):
        rounds.append(state.t)
        if state.t == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained("amplified", tmp_path, [stop], Breaks(4))
    again = trained("amplified", tmp_path, [lambda s, m: rounds.append(s.t)], Breaks(4))
    assert rounds[12] == 11
    assert again.diverged == whole.diverged == {("amplified", 4): 9}
    assert again.frame.equals(whole.frame)


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm=dataclasses.replace(ALGORITHMS["amplified"], lr=0.06)),
        dict(algorithm=FedAvg(pt.PeriodicSampler(N, 2, 2, 4), **MINI)),
        dict(rounds=ROUNDS + 1),
        dict(seeds=(1, 5)),
        dict(evaluation=Evaluation(4)),
        dict(evaluation=Evaluation(at=[3])),
        dict(evaluation=Evaluation(3, splits=("train", "train"))),
        dict(evaluation=Evaluation(3, limit=5)),
    ],
    ids=["rate", "algorithm", "rounds", "seeds", "schedule", "looks", "splits", "limit"],
)
def test_checkpoint_of_another_run_is_refused(changes, tmp_path):
    trained("amplified", tmp_path)
    before = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(FedlibError, match="belongs to another run") as error:
        trained("amplified", tmp_path, **changes)
    assert "found:" in str(error.value) and "expected:" in str(error.value)
    assert str(tmp_path / "run.pt") in str(error.value)
    assert (tmp_path / "run.pt").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["empty", "text", "half"])
def test_corrupt_checkpoint_is_refused(content, tmp_path):
    path = tmp_path / "run.pt"
    if content is None:
        trained("amplified", tmp_path)
        content = path.read_bytes()[:-200]
    path.write_bytes(content)
    with pytest.raises(FedlibError, match=r"cannot be read .* Delete it"):
        trained("amplified", tmp_path)


def other_tasks():
    """Yield a name and a task that differs from the usual one in one thing alone."""
    for name in ("features", "labels", "test", "split", "l2", "loss", "model", "augmented"):
        task = classification(np.float32)
        data = task.data
        if name == "features":
            data.x = data.x.clone()
            data.x[3, 1] += 1e-6
        elif name == "labels":
            data.y = data.y.clone()
            data.y[0] = (data.y[0] + 1) % 3
        elif name == "test":
            data.test_x, data.test_y = data.x[:5], data.y[:5]
        elif name == "split":
            data.splits = {None: [data.parts[1], data.parts[0], *data.parts[2:]]}
        elif name == "l2":
            task.l2 = 0.25
        elif name == "loss":
            task.loss_name = "half_square"
        elif name == "model":
            task.model = Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
        else:
            data.augment = True
        yield name, task


@pytest.mark.parametrize(("what", "task"), other_tasks(), ids=[name for name, _ in other_tasks()])
def test_checkpoint_of_another_problem_is_refused(what, task, tmp_path):
    trained("amplified", tmp_path)
    options = dict(evaluation=Evaluation(3), name="amplified", progress=False, seeds=SEEDS)
    options |= dict(checkpoint=Checkpoint(tmp_path / "run.pt", EVERY), rounds=ROUNDS)
    if what != "model":
        assert task.size == classification(np.float32).size
    with pytest.raises(FedlibError, match="belongs to another run"):
        simulate(ALGORITHMS["amplified"], task, **options)
    same = classification(np.float32)
    assert simulate(ALGORITHMS["amplified"], same, **options).state.t == ROUNDS


def test_checkpoint_of_another_start_or_trace_is_refused(tmp_path):
    task, algorithm = classification(np.float32), ALGORITHMS["amplified"]
    options = dict(checkpoint=Checkpoint(tmp_path / "run.pt", 2), progress=False)
    x = task.init((1,))
    simulate(algorithm, task, 4, state=algorithm.init(task, (1,), x), **options)
    with pytest.raises(FedlibError, match="belongs to another run"):
        simulate(algorithm, task, 4, state=algorithm.init(task, (1,), x + 1e-6), **options)
    traces = [pt.Trace(np.roll(np.eye(N), n, 1)) for n in (0, 1)]
    assert traces[0] != traces[1] and traces[0] == pt.Trace(np.eye(N))
    assert len({*traces, pt.Trace(np.eye(N))}) == 2
    options["checkpoint"] = Checkpoint(tmp_path / "trace.pt", 2)
    simulate(FedAvg(traces[0], **MINI), task, 4, **options)
    with pytest.raises(FedlibError, match="belongs to another run"):
        simulate(FedAvg(traces[1], **MINI), task, 4, **options)


@dataclasses.dataclass(frozen=True)
class Pulled(FedAvg):
    """FedAvg whose models are moved by the sum of a long array after every round."""

    pull: np.ndarray = dataclasses.field(kw_only=True)

    def round(self, state, task, drawn):
        state, metrics = super().round(state, task, drawn)
        return dataclasses.replace(state, x=state.x + float(self.pull.sum())), metrics


def test_an_algorithm_that_differs_within_a_long_array_has_a_checkpoint_of_its_own(tmp_path):
    pulls = np.zeros((2, 2000))
    pulls[1, 1000] = 0.01
    one, other = (Pulled(pt.Full(N), 0.05, pull=pull) for pull in pulls)
    assert repr(one) == repr(other), "what is printed leaves the difference out"
    alone = trained("pulled", algorithm=other)
    trained("pulled", tmp_path, algorithm=one, rounds=ROUNDS)
    with pytest.raises(FedlibError, match="belongs to another run"):
        trained("pulled", tmp_path, algorithm=other)
    (tmp_path / "run.pt").unlink()
    for pull in (pulls[1], pulls[1].copy()):  # the second call goes on from the first one's end
        again = trained("pulled", tmp_path, algorithm=dataclasses.replace(other, pull=pull))
        assert again.frame.equals(alone.frame) and torch.equal(again.state.x, alone.state.x)


MINE = """
import dataclasses
import torch
from fedlib.papers.fedavg import FedAvg

def pull(x):
    return 1 * x

@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    damp = 2

    @staticmethod
    def half(x):
        return 3 * x

    @property
    def share(self):
        return 4

    def round(self, state, task, drawn):
        state, metrics = super().round(state, task, drawn)
        return dataclasses.replace(state, x=pull(self.half(self.damp * self.share * state.x))), {}

class Net(torch.nn.Linear):
    def forward(self, x):
        return 5 * super().forward(x)
"""


@pytest.mark.parametrize("mended", "12345")
def test_a_checkpoint_of_other_code_is_refused(mended, tmp_path):
    """As when one's own file is mended and run again."""

    def call(text):
        scope = {"__name__": "mine"}
        exec(text, scope)  # as a file that is imported
        task = Task(Model(scope["Net"](6, 3)), data)
        return simulate(scope["Mine"](pt.Full(2), 0.05), task, 4, **options)

    data = FederatedDataset.build(np.ones((4, 6), np.float32), np.arange(4) % 3, [[0, 1], [2, 3]])
    options = dict(checkpoint=Checkpoint(tmp_path / "run.pt", 2), progress=False)
    assert call(MINE).frame.equals(call(MINE).frame), "the same file again"
    with pytest.raises(FedlibError, match="belongs to another run, or to other code"):
        call(MINE.replace(f" {mended}", " 7"))


def test_a_checkpoint_of_another_measure_is_refused(tmp_path):
    looks = [Evaluation(measure=lambda state, task, by=by: {("own", "t"): by * state.x[:, 0]})
             for by in (1, 2)]  # fmt: skip
    trained("own", tmp_path, algorithm=ALGORITHMS["amplified"], evaluation=looks[0])
    with pytest.raises(FedlibError, match="belongs to another run"):
        trained("own", tmp_path, algorithm=ALGORITHMS["amplified"], evaluation=looks[1])


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    trained("amplified", tmp_path)
    path = tmp_path / "run.pt"
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 60):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << (place % 8)
        path.write_bytes(broken)
        with pytest.raises(FedlibError, match="Delete it"):
            trained("amplified", tmp_path)


class Planted:
    def __reduce__(self):
        return (os.mkdir, (os.environ["PLANTED"],))


def test_a_planted_checkpoint_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    trained("amplified", tmp_path)
    path, held = tmp_path / "run.pt", io.BytesIO()
    torch.save({"label": Planted()}, held)
    content = held.getvalue()
    mark = MARK + hashlib.sha256(content).hexdigest().encode() + b"\n"
    path.write_bytes(mark + content)
    with pytest.raises(FedlibError, match="cannot be read"):
        trained("amplified", tmp_path)
    assert not (tmp_path / "planted").exists()
    pickle.loads(pickle.dumps(Planted()))
    assert (tmp_path / "planted").exists(), "it would have"


def test_a_state_that_no_checkpoint_can_hold_is_told(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Odd(State):
        memory: object = None

    class Remembers(FedAvg):
        def init(self, task, seeds):
            return Odd(*dataclasses.astuple(super().init(task, seeds)), memory={1, 2})

    options = dict(checkpoint=Checkpoint(tmp_path / "run.pt", 1), progress=False)
    with pytest.raises(FedlibError, match="state's memory holds a set. A checkpoint holds tensors"):
        simulate(Remembers(pt.Full(N), **MINI), classification(np.float32), 2, **options)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_never_follows_a_link(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (tmp_path / "run.pt").symlink_to(victim)
    with pytest.raises(FedlibError, match="Delete it"):
        trained("amplified", tmp_path)
    (tmp_path / "run.pt").unlink()
    (tmp_path / "run.pt").symlink_to(tmp_path / "nowhere")
    trained("amplified", tmp_path)
    assert victim.read_text() == "mine" and not (tmp_path / "run.pt").is_symlink()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("until", "t"), [(0.0, 1), (None, 3)])
def test_a_checkpoint_is_left_at_the_end_and_when_time_is_over(until, t, tmp_path):
    path, task = tmp_path / "c.pt", classification(np.float32)
    options = dict(checkpoint=Checkpoint(path, 2, until), progress=False)
    with contextlib.suppress(simulation.OutOfTime):
        simulate(ALGORITHMS["amplified"], task, 3, **options)
    content = path.read_bytes().partition(b"\n")[2]
    assert torch.load(io.BytesIO(content), weights_only=True)["state"]["t"] == t


# --- evaluation, divergence -----------------------------------------------------------------------


class Breaks:
    """The amplified algorithm, with seed ``bad`` losing its model in round 7 or a given one."""

    def __init__(self, *bad: int, rounds=()):
        self.bad = dict(zip(bad, rounds or [7] * len(bad), strict=True))

    def __repr__(self):
        return f"Breaks({self.bad})"

    def init(self, task, seeds):
        return ALGORITHMS["amplified"].init(task, seeds)

    def round(self, state, task):
        state, metrics = ALGORITHMS["amplified"].round(state, task)
        x = state.x.clone()
        for r, seed in enumerate(state.seeds):
            if self.bad.get(seed) == state.t:
                x[r] = float("nan")
        return dataclasses.replace(state, x=x), metrics


def test_a_diverged_seed_leaves_the_healthy_ones_alone():
    history = trained("amplified", algorithm=Breaks(4), seeds=(1, 4, 6))
    assert history.diverged == {("amplified", 4): 9}, "round 7 is seen at the next evaluation"
    assert history.state.t == ROUNDS
    healthy = trained("amplified", seeds=(1, 4, 6)).frame
    keep = [1, 6]
    mine, other = (f[f["seed"].isin(keep)].reset_index(drop=True) for f in (history.frame, healthy))
    assert mine.equals(other)
    broken = history.frame.query("seed == 4 and metric == 'loss'").set_index("round")["value"]
    assert np.isfinite(broken.loc[:6]).all() and broken.loc[9:].isna().all()


def test_an_infinite_value_is_a_divergence():
    def measure(state, task):
        return {("train", "loss"): torch.tensor([-1.0, float("inf"), -float("inf")])}

    history = trained("amplified", seeds=(1, 4, 6), evaluation=Evaluation(measure=measure))
    assert history.diverged == {("amplified", 4): 0, ("amplified", 6): 0}


def test_only_training_rows_are_limited():
    task = classification()
    task.data.test_x, task.data.test_y = task.data.x[:9], task.data.y[:9]
    looks = Evaluation(splits=("train", "test"), limit=4)
    history = simulate(ALGORITHMS["amplified"], task, 0, (3,), evaluation=looks, progress=False)
    found = history.frame.set_index(["split", "metric"])["value"]
    for split, limit in (("train", 4), ("test", None)):
        for metric, value in task.evaluate(history.state.x, split, limit).items():
            assert found[split, metric] == value.item()


def test_the_run_ends_when_all_have_diverged():
    history = trained("amplified", algorithm=Breaks(1, 4, rounds=(3, 7)))
    assert history.diverged == {("amplified", 1): 3, ("amplified", 4): 9}
    assert history.state.t == 9 and history.frame["round"].max() == 9


def test_evaluation_schedule_and_what_stands_in_a_row():
    task, seen = classification(), []
    data = task.data
    data.test_x, data.test_y = data.x[:7], data.y[:7]
    history = simulate(
        ALGORITHMS["amplified"], task, 7, (3,), name="mine", progress=False,
        evaluation=Evaluation(3, splits=("train", "test")),
        callbacks=[lambda s, m: seen.append(s.t)],
    )  # fmt: skip
    frame = history.frame
    assert frame["round"].unique().tolist() == [0, 3, 6, 7] and seen == list(range(1, 8))
    assert set(frame["run"]) == {"mine"} and set(frame["seed"]) == {3}
    last = frame[frame["round"] == 7].set_index(["split", "metric"])["value"]
    for split in ("train", "test"):
        for metric, value in task.evaluate(history.state.x, split).items():
            assert last[split, metric] == value.item()
    later = simulate(ALGORITHMS["amplified"], task, 3, (3,), state=history.state, progress=False)
    whole = simulate(ALGORITHMS["amplified"], task, 10, (3,), progress=False)
    same_state(held(later.state), held(whole.state))


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]), sys.argv[3])


def test_looking_at_given_rounds_changes_no_number():
    task = classification()
    every = simulate(ALGORITHMS["amplified"], task, 12, SEEDS, progress=False).frame
    looks = Evaluation(at=[1, 5])
    some = simulate(
        ALGORITHMS["amplified"], task, 12, SEEDS, evaluation=looks, progress=False
    ).frame
    assert sorted(some["round"].unique()) == [0, 1, 5, 12]
    kept = every[every["round"].isin([0, 1, 5, 12])].reset_index(drop=True)
    pd.testing.assert_frame_equal(some.reset_index(drop=True), kept)


@pytest.mark.parametrize("key", ["label", "state", "rows", "diverged", "all", "fields"])
def test_a_checkpoint_that_is_none_though_its_hash_is_right(key, tmp_path):
    path, task = tmp_path / "run.pt", classification()

    def go():
        options = dict(checkpoint=Checkpoint(path, 1), progress=False)
        return simulate(FedAvg(pt.Full(task.N), 0.1), task, 2, **options)

    go()
    held = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    wrong = {"all": [1], "fields": held | {"state": {"x": held["state"]["x"]}}}
    content = io.BytesIO()
    torch.save(wrong.get(key, held | {key: 3}), content)
    mark = MARK + hashlib.sha256(content.getvalue()).hexdigest().encode()
    path.write_bytes(mark + b"\n" + content.getvalue())
    with pytest.raises(FedlibError, match="cannot be read|does not hold a whole state"):
        go()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_checkpoint_that_never_ends_is_not_read(kind, tmp_path, in_time):
    path, task = tmp_path / "run.pt", classification()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(FedlibError, match="not a regular file"):
        kept = Checkpoint(path)
        simulate(FedAvg(pt.Full(task.N), 0.1), task, 2, checkpoint=kept, progress=False)


def test_numbers_of_numpy_are_seeds_that_a_checkpoint_holds(tmp_path):
    there = [trained("amplified", tmp_path, seeds=np.array(SEEDS)).frame for _ in range(2)]
    pd.testing.assert_frame_equal(*there)
    pd.testing.assert_frame_equal(there[0], trained("amplified").frame)


def test_a_run_that_ends_early_by_divergence_is_kept(tmp_path):
    task = classification(np.float32)
    told = dict(seeds=(1,), progress=False, checkpoint=Checkpoint(tmp_path / "run.pt", 10))
    history = simulate(FedAvg(pt.Full(N), 1e38), task, 50, **told)
    assert history.state.t < 10 and (tmp_path / "run.pt").exists()


def test_rounds_to_look_at_are_several():
    assert Evaluation(at=np.array([1, 2])).due(2)
    with pytest.raises(FedlibError, match=r"at is rounds, such as \(1, 10\); got 5"):
        Evaluation(at=5)
