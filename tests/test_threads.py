"""The number of threads never changes a number of an experiment."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import fedlib
from fedlib.engine import cores
from fedlib.lab.evidence import experiments
from fedlib.lab.trials import TRIALS
from fedlib.papers.participation import theory

ROOT = Path(fedlib.__file__).parents[1]
RUN = """
import sys
from fedlib.lab.evidence import experiments
for name in ("participation heterogeneity", "tiers waiting"):
    experiments.run(*name.split(), "smoke", device="cpu", out=sys.argv[1], progress=False)
"""


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.long
def test_experiments_give_the_same_bytes_with_one_thread_and_two(tmp_path):
    rows = []
    for threads in ("1", "2"):
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", RUN, str(tmp_path / threads)], env=env, check=True)
        files = sorted((tmp_path / threads).glob("*/*.csv.gz"))
        rows.append({file.name: gzip.decompress(file.read_bytes()) for file in files})
    assert len(rows[0]) == 2 and rows[0] == rows[1]


def test_a_study_has_one_thread_but_for_pieces_and_gives_them_back(
    two_threads, monkeypatch, tmp_path
):
    seen = []

    def study(job):
        seen.append(torch.get_num_threads())
        seen.extend(lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas")
        monkeypatch.setattr(cores, "_pool", lambda count, _: seen.append(f"{count} cores") or pool)
        assert cores.each(lambda i: i + 1, range(3), torch.device("cpu")) == [1, 2, 3]
        raise InterruptedError

    pool = cores._pool(2, os.getpid())
    torch.set_num_threads(2)  # a new pool sets its own
    monkeypatch.setattr(experiments, "study", lambda kind: study)
    with pytest.raises(InterruptedError):
        experiments.run("participation", "factor", "smoke", out=tmp_path, progress=False)
    assert set(seen) == {1, "2 cores"} and torch.get_num_threads() == 2


def test_products_of_numpy_are_summed_in_one_order(two_threads):
    """Two threads sum a product as wide as this one in another order than one."""
    rows, found = np.random.default_rng(0).standard_normal((250, 6634)), []
    for threads in (1, 2):
        with threadpool_limits(threads, "blas"), cores.steady():
            found.append(theory.gram(rows))
    assert np.array_equal(*found)


def test_evaluation_is_shared_out_without_changing_a_bit(two_threads):

    algorithm, task = TRIALS["FedAvg, mlp"](np.float32)
    theta, found = task.init((0, 1, 2)).float().requires_grad_(), []
    task.chunk = 3 * 5 * 12  # pieces of five samples
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(task.evaluate(theta))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert not found[0]["loss"].requires_grad


def test_pieces_of_a_piece_are_done_where_it_is(monkeypatch, in_time):
    """Else both cores would wait for a third."""
    done = []

    def piece(n):
        cores.side_by_side(lambda m: done.append((n, m)), range(2))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cores.side_by_side(piece, range(2))
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
