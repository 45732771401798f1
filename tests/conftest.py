"""Shared by all tests. What takes long to import is imported where it is needed."""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

# Files that take long: they begin first, so that two workers end together. The book's build keeps
# two cores busy, so those that mostly wait go beside it.
LONG = (
    "test_site",
    "test_jupyterlab",
    "test_profiles",
    "test_batch_ray",
    "test_guide_batches",
    "test_vertical_mpi",
    "test_notebooks",
    "test_variations",
    "test_experiments",
    "test_batch",
    "test_gpu",
    "test_device",
)


TOOK = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "list the tests that take more seconds of a core and have no mark slow"
    parser.addoption("--unmarked", type=float, metavar="SECONDS", help=told)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TOOK] = {}
    gc.disable()  # until all is collected
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun by a script, in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whom a test interrupts must hear


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])  # with those of processes that have ended
    done = yield
    if not item.get_closest_marker("slow"):
        item.config.stash[TOOK][item.nodeid] = sum(os.times()[:4]) - before
    return done


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if limit := terminalreporter.config.getoption("unmarked"):
        took = terminalreporter.config.stash[TOOK]
        for name, seconds in sorted(took.items(), key=lambda item: -item[1]):
            if seconds > limit:
                terminalreporter.write_line(f"{seconds:6.1f}  {name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "verdicts_page" in item.fixturenames:  # whoever is first waits for all of them
            item.add_marker("slow")
    place = {name: n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """One thread, so that small products are not slowed down by waiting.

    What collecting has left stays: the garbage collector need not go through it again and again.
    """
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def chromium():
    """Start a browser, one for all tests of a process."""
    import browser

    if browser.find() is None:
        pytest.skip("no Chromium found: install one, or name it in CHROMIUM")
    with browser.chromium() as running:
        yield running


@pytest.fixture(scope="session")
def verdicts_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Judge every claim of every paper, once for all processes of a run; return where.

    Processes share the papers: each goes on with one that no other is judging, then waits.
    """
    from fedlib import paths
    from fedlib.lab.evidence import claims

    home = tmp_path_factory.getbasetemp()  # of this process, in that of the run if there are more
    shared = home.parent if "PYTEST_XDIST_WORKER" in os.environ else home
    parts = {paper: shared / f"verdicts-{paper}.json" for paper in paths.papers("claims.toml")}
    for longest in (0, -1):  # seconds that another is waited for; then for ever
        for paper, part in parts.items():
            with suppress(Timeout), FileLock(part.with_suffix(".lock"), timeout=longest):
                if not part.exists():
                    part.write_text(json.dumps(claims.judge(paper)), "utf-8")
    rows = {paper: json.loads(part.read_text("utf-8")) for paper, part in parts.items()}
    (page := home / "verdicts.json").write_text(json.dumps(rows), "utf-8")
    return page


@pytest.fixture(scope="session")
def verdicts(verdicts_page: Path) -> dict[str, list[dict]]:
    """Return the rows of every claim of every paper."""
    return json.loads(verdicts_page.read_text("utf-8"))


@pytest.fixture
def in_time():
    """Fail a test that waits or reads for ever, instead of waiting with it."""

    def late(*_):
        pytest.fail("not done after a minute")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
