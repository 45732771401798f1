"""Shared by all tests: one thread, so that small products are not slowed down by waiting."""

import signal

import pytest
import torch

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
