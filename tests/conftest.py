"""Shared by all tests: one thread, so that small products are not slowed down by waiting."""

import signal

import pytest
import torch

torch.set_num_threads(1)


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
