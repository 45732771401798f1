"""The device path without a device: pretend tensors that hold no numbers.

PyTorch is told of a device that does not exist, and its tensors have shapes only. So whatever
mixes a device's tensor with the host's, or asks it for a number, which would make the host wait,
is an error here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import pkgutil

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fedlib.papers
from fedlib.engine import models
from fedlib.engine.draws import upload
from fedlib.engine.model import Model
from fedlib.lab import gpu
from fedlib.lab.job import Job
from fedlib.lab.studies import participation as study
from fedlib.lab.trials import CLIENTS, TASKS
from fedlib.papers.personalization import Mixing
from fedlib.papers.personalization.others import Everyone
from fedlib.population.participation import Independent

_setup_privateuseone_for_python_backend("pretend")
SEEDS, ROUNDS = (3, 5), 4
TRIALS = gpu.trials()


class Pretend:
    """A block of draws made outside, and a task whose tensors hold no numbers."""

    def __init__(self, name: str, dtype=np.float32):
        self.algorithm, task = TRIALS[name](dtype)
        state = self.algorithm.init(task, SEEDS)
        drawn = itertools.islice(self.algorithm.draws(state, task), ROUNDS)
        self.block, self.mode = list(drawn), FakeTensorMode()
        for model in getattr(task, "models", [getattr(task, "model", None)]):
            if "cpu" in model._maps:  # whether vmap can map it is tried with real numbers
                model._maps["pretend"] = model._maps["cpu"]
        self.task, self.state = self.moved(task), self.moved_state(state)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return self.mode.from_tensor(tensor).to("pretend")

    def moved(self, task):
        task = task.to("cpu")
        for held in (task, getattr(task, "data", None)):
            for name, value in vars(held).items() if held is not None else ():
                if isinstance(value, torch.Tensor):
                    setattr(held, name, self.place(value))
                elif isinstance(value, list) and all(isinstance(v, torch.Tensor) for v in value):
                    setattr(held, name, [self.place(v) for v in value])
        return task

    def moved_state(self, state):
        new = {
            f.name: self.place(getattr(state, f.name))
            for f in dataclasses.fields(state)
            if isinstance(getattr(state, f.name), torch.Tensor)
        }
        return dataclasses.replace(state, **new)


def unfilled(self, found, A):
    """Stand for PERM's weights, which the host computes: they ask a device once an epoch."""
    return A + 0 * (found.zeta() + found.unbiased()) * found.noise().view(-1, 1, 1)


@pytest.mark.parametrize("name", TRIALS)
def test_a_block_of_rounds_and_an_evaluation_ask_a_device_for_nothing(name, monkeypatch):
    monkeypatch.setattr(Mixing, "weights", unfilled)
    pretend = Pretend(name)
    with pretend.mode:
        state = pretend.state
        for drawn in upload(pretend.block, "pretend"):
            state, _ = pretend.algorithm.round(state, pretend.task, drawn)
        for split in ("train", "test"):
            found = pretend.task.evaluate(state.x, split)
            assert all(value.device.type == "cpu" for value in found.values())
        if hasattr(pretend.algorithm, "personal"):
            found = pretend.algorithm.personal(state, pretend.task)
            assert found.device.type == "pretend" and found.shape[2] == pretend.task.size
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "pretend" and len(value) == 2
            assert value.shape[-1] in (pretend.task.size, pretend.task.N)
    assert state.t == ROUNDS


def test_a_warm_up_asks_a_device_for_nothing():
    """Drawn, uploaded and computed by ``simulate`` itself, from fresh models on."""
    pretend, process = Pretend("FedAvg, fashion_cnn"), Independent(CLIENTS, 2)
    s = dict(warmup_lr=0.1, local_steps=2, batch_size=4, warmup_rounds=5)
    with pretend.mode:
        x = study.warm_up(Job(s, SEEDS, "pretend", progress=False), pretend.task, process)
    assert x.device.type == "pretend" and x.shape == (2, pretend.task.size)


def test_the_pretend_device_notices_what_it_is_there_to_notice():
    pretend = Pretend("FedAvg, softmax")
    with pretend.mode:
        x = pretend.state.x
        for wrong in (x.sum().item, x[0].tolist, lambda: bool(x[0, 0] > 0), lambda: x[x > 0]):
            with pytest.raises(Exception, match="data|dynamic|aten"):
                wrong()
        with pytest.raises(Exception, match="same device"):
            x + torch.ones(2, 1)
        (drawn,) = upload(pretend.block[:1], "cpu")
        with pytest.raises(Exception, match="same device"):
            pretend.algorithm.round(pretend.state, pretend.task, drawn)


def test_every_algorithm_of_every_paper_has_a_trial():
    tried = {type(build(np.float32)[0]) for build in TRIALS.values()}
    there = set()
    for module in pkgutil.walk_packages(fedlib.papers.__path__, "fedlib.papers."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if dataclasses.is_dataclass(kind) and hasattr(kind, "init") and hasattr(kind, "round"):
                there.add(kind)
    shared = {kind for kind in there if getattr(kind, "trained", None) is Everyone.trained}
    assert {kind.__name__ for kind in shared} == {"Everyone", "Forgetful", "Keeping"}
    there -= shared  # of these a method is made, by adding what is trained
    there = {kind for kind in there if not inspect.isabstract(kind)}
    assert there == tried and len(there) >= 7


def test_every_model_has_a_trial():
    there = {
        name
        for name, build in inspect.getmembers(models, inspect.isfunction)
        if inspect.signature(build).return_annotation == "Model" and not name.startswith("_")
    }
    assert there <= set(TASKS) and len(there) >= 9
    for name in there:
        assert isinstance(TASKS[name](np.float32).model, Model)
