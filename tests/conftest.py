"""Shared by all tests: one thread, so that small products are not slowed down by waiting."""

import json
import os
import signal

import pytest
import torch
from filelock import FileLock

from fedlib.lab.evidence import claims

torch.set_num_threads(1)

# Files that take a minute or more: they begin first, so that two workers end together.
LONG = (
    "test_site",  # one worker has this and test_profiles
    "test_experiments",
    "test_profiles",
    "test_notebooks",
    "test_batch_ray",
    "test_batch",
    "test_guide_batches",
    "test_cli",
    "test_gpu",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Judge every claim of every paper, once for all processes of a run; return the rows."""
    home = tmp_path_factory.getbasetemp()  # of this process, in that of the run if there are more
    page = (home.parent if "PYTEST_XDIST_WORKER" in os.environ else home) / "verdicts.json"
    with FileLock(page.with_suffix(".lock")):
        if not page.exists():
            rows = {paper: claims.judge(paper) for paper in claims.papers()}
            page.write_text(json.dumps(rows), "utf-8")
    return json.loads(page.read_text("utf-8"))


@pytest.fixture
def in_time():
    """Fail a test that waits or reads for ever, instead of waiting with it."""

    def late(*_):
        pytest.fail("not done after 5 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
