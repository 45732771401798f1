"""Replayed steps, ways to convolve, and what work costs."""

from __future__ import annotations

import gc
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedlib.engine import convolution, cost, local, recording
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import local_sgd
from fedlib.engine.model import Model
from fedlib.engine.recording import Recording, replayed
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.trials import TASKS

CURSOR = np.zeros((2, 4), dtype=np.int64)
CLIENTS = torch.tensor([[0, 2], [1, 3]])


def work_of(name: str):
    """Return a task, starting points of four copies, and batches of three rounds."""
    task, cursor, rounds = TASKS[name](np.float64), CURSOR, []
    for size in (4, 4, None, 4, 4, None, None, 4):
        batches, cursor = task.data.next_batches((0, 1), CLIENTS, cursor, 3, size)
        rounds.append(batches)
    return task, task.init(range(4)), rounds


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "a module of one's own"])
def test_replayed_steps_are_the_plain_ones_for_ever_new_inputs(name):
    task, theta, rounds = work_of(name)
    rates = [0.05, 0.1, torch.tensor([0.1, 0.2, 0.05, 0.1]).double()]
    for batches in rounds:
        for rate in rates:
            plain = local_sgd(task, theta, batches, rate, backend="batched")
            assert torch.equal(local_sgd(task, theta, batches, rate, backend="recorded"), plain)
        theta = plain
    kept = [held for held in task.recordings.values() if isinstance(held, recording.Recording)]
    assert len(kept) == 6, "two kinds of batches, a number, another, and a rate for each copy"


def test_a_recording_holds_its_own_inputs_and_gives_its_result_away():
    calls = []

    def double(x):
        calls.append(x)
        return 2 * x

    kept, given = {}, [torch.full((2,), float(i)) for i in range(6)]
    found = [recording.replayed(kept, "k", double, [x]) for x in given]
    assert [x.tolist() for x in found] == [[2 * i] * 2 for i in range(6)]
    assert [calls[i] is given[i] for i in range(6)] == [True, True, False, False, False, False]
    assert calls[2] is calls[5], "the same place each time"
    assert recording.replayed(kept, "other", double, [given[1]]).tolist() == [2, 2]
    assert recording.replayed(kept, "k", double, [torch.ones(3)]).tolist() == [2, 2, 2]
    assert calls[-2] is given[1], "what depends on more is not mixed up"


def test_what_cannot_be_recorded_still_runs_and_says_so_once(monkeypatch):
    class Broken:
        def __init__(self, *_):
            tried.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")

    tried = []
    monkeypatch.setattr(recording, "Recording", Broken)
    monkeypatch.setattr(recording, "BROKEN", [])
    kept = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(5):
            out = recording.replayed(kept, "k", lambda x: x + 1, [torch.tensor([float(i)])])
            assert out.item() == i + 1
        for _ in range(4):
            recording.replayed(kept, "other", lambda x: x + 1, [torch.ones(1)])
    assert len(told) == 1 and "launch by launch" in str(told[0].message)
    assert len(tried) == 1, "where one recording fails, no other is tried"


def test_crops_are_replayed_as_drawn():
    task, theta, rounds = work_of("cifar_cnn")
    for batches in [rounds[i] for i in (0, 1, 3, 4)]:
        plain = local_sgd(task, theta, batches[:1], 0.01, backend="batched")
        found = local_sgd(task, theta, batches[:1], 0.01, backend="recorded")
        assert torch.equal(found, plain) and not torch.equal(found, theta)


def test_another_data_set_or_penalty_is_another_recording():
    task, theta, (batches, *_) = work_of("small_cnn")
    for _ in range(4):
        local_sgd(task, theta, batches, 0.1, backend="recorded")
    task.l2 = 0.5
    expected = local_sgd(task, theta, batches, 0.1, backend="batched")
    assert torch.equal(local_sgd(task, theta, batches, 0.1, backend="recorded"), expected)
    task.data.x = task.data.x + 1
    expected = local_sgd(task, theta, batches, 0.1, backend="batched")
    assert torch.equal(local_sgd(task, theta, batches, 0.1, backend="recorded"), expected)
    other = task.to("cpu")
    assert other.recordings == {} and other.data is not task.data and task.recordings


# --- convolutions ---------------------------------------------------------------------------------


def images(grad: bool):
    rng = torch.Generator().manual_seed(1)
    shapes = ((3, 4, 2, 9, 7), (3, 5, 2, 5, 5), (3, 5))
    return [torch.randn(s, generator=rng).double().requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("way", convolution.WAYS)
def test_every_way_is_the_convolution_of_each_copy_and_its_gradient(way):
    found, expected = images(True), images(True)
    out = convolution.WAYS[way](*found)
    one = torch.stack([F.conv2d(x, w, b, padding=2) for x, w, b in zip(*expected, strict=True)])
    assert out.shape == (3, 4, 5, 9, 7) and (out - one).abs().max() < 1e-12
    weight = torch.randn(out.shape, dtype=torch.double)
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), found),
        torch.autograd.grad((one * weight).sum(), expected),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("grad", [False, True])
def test_the_fastest_way_is_found_by_trying(monkeypatch, grad):
    asked = []

    def slow(x, weight, bias):
        asked.append(torch.is_grad_enabled())
        torch.ones(2500, 2500) @ torch.ones(2500, 2500)
        return convolution.unfolded(x, weight, bias)

    def too_large(*_):
        raise torch.OutOfMemoryError("no room")

    def unknown(*_):
        raise RuntimeError("not supported")

    ways = {"slow": slow, "too large": too_large, "unknown": unknown, "quick": convolution.grouped}
    monkeypatch.setattr(convolution, "WAYS", ways)
    assert convolution.fastest(*images(grad)) == "quick"
    assert len(asked) == 7, "twice for warming up, then five times"
    monkeypatch.setattr(convolution, "WAYS", {"unknown": unknown})
    assert convolution.fastest(*images(grad)) == "one by one"


def test_what_was_chosen_is_told_in_words(monkeypatch):
    x, weight, _ = images(True)
    key = ("cuda:0", x.shape, weight.shape, torch.float32)
    chosen = {(*key, False, True): "grouped", (*key, False, False): "one by one"}
    monkeypatch.setattr(convolution, "chosen", chosen)
    assert convolution.choices() == {
        "(3, 4, 2, 9, 7) * (3, 5, 2, 5, 5), float32, with gradients": "grouped",
        "(3, 4, 2, 9, 7) * (3, 5, 2, 5, 5), float32, alone": "one by one",
    }


# --- what work costs ------------------------------------------------------------------------------


def test_costs_are_those_counted_by_hand():
    a, b = torch.ones(10, 20), torch.ones(20, 30)

    def work():
        c = a @ b  # 2·10·20·30 operations; reads 200 + 600 numbers, writes 300
        c.add_(1)  # reads and writes 300
        return c.view(30, 10)[2:]  # a view: nothing

    found = cost.count(work)
    assert found.flops == 2 * 10 * 20 * 30
    assert found.made == 4 * 300 and found.launches == 2
    assert found.moved == 4 * (200 + 600 + 300) + 4 * (300 + 300)
    w, x = torch.ones(3, 4, 6), torch.ones(3, 6, 5)
    batched = cost.count(lambda: torch.zeros(3, 4, 5).baddbmm_(w, x))
    assert batched.flops == 2 * 3 * 4 * 6 * 5, "in place, too"
    x, w, b = images(True)

    def convolved():
        out = convolution.grouped(x, w, b)
        torch.autograd.grad(out.sum(), (x, w, b))

    assert cost.count(convolved).flops == 3 * 2 * (3 * 4 * 5 * 9 * 7) * (2 * 5 * 5)
    table, rows = torch.ones(1000, 8), torch.tensor([1, 5, 5])
    picked = cost.count(lambda: table.index_select(0, rows))
    assert picked.moved == 4 * (24 + 24) and picked.flops == 0 and picked.launches == 1


def test_what_does_not_fit_is_said_before_it_fails(monkeypatch):
    like = torch.zeros(1)
    asked = []
    monkeypatch.setattr(cost, "room", lambda device: asked.append(device) or 4_000_000_000)
    cost.check_room(100, 1000, 3, like)
    assert not asked, "small work asks no device"
    cost.check_room(1000, 1_000_000, 1, like)
    with pytest.raises(FedlibError, match=r"need 12.0 GB.* room for 4.0 GB: at most 333 copies"):
        cost.check_room(1000, 1_000_000, 3, like)


def test_copies_that_fit_follow_from_what_a_step_of_one_makes(monkeypatch):
    task, theta, (batches, *_) = work_of("small_cnn")
    batch = local._rows(batches[0], slice(0, 1))
    made = cost.count(lambda: local._descend(task, theta[:1].clone(), [batch], 0.0)).made
    monkeypatch.setattr(local, "room", lambda device: 7 * made + 1)
    task.model.fits.clear()
    assert local.copies_that_fit(task, theta, batches[0]) == 7
    out = task.losses(theta[:1], batch)
    assert made > out.element_size() * (task.size + 2 * task.data.x[0].numel())


def test_another_type_is_another_recording():
    kept = {}
    for _ in range(4):
        replayed(kept, "k", torch.neg, [torch.ones(2)])
    assert replayed(kept, "k", torch.neg, [torch.ones(2).double()]).dtype == torch.float64


def test_a_result_is_a_copy_that_the_next_replay_leaves_alone():
    held = Recording(lambda x: x + 1, [torch.zeros(2)])
    held._output = torch.zeros(2)
    held._graph = types.SimpleNamespace(
        replay=lambda: held._output.copy_(held._work(*held._inputs))
    )
    first = held(torch.ones(2))
    held(torch.zeros(2))
    assert first.tolist() == [2, 2]


def test_a_task_keeps_so_many_recordings_and_no_more(monkeypatch):
    monkeypatch.setattr(recording, "MOST_RECORDINGS", 1)
    kept = {}
    for key in "ab":
        for _ in range(4):
            replayed(kept, key, torch.neg, [torch.ones(2)])
    assert [isinstance(v, Recording) for v in kept.values()] == [True, False]


def test_work_seen_once_takes_no_recording_s_place(monkeypatch):
    monkeypatch.setattr(recording, "MOST_RECORDINGS", 1)
    kept = {}
    for width in (1, 2, 3, 4, 4, 4):
        replayed(kept, "a", torch.neg, [torch.ones(width)])
    assert [isinstance(v, Recording) for v in kept.values()] == [False, False, False, True]


def test_nothing_is_collected_while_recording_and_again_after():
    with recording.no_collection():
        assert not gc.isenabled()
    try:
        assert gc.isenabled()
    finally:
        gc.enable()


def test_coarse_products_are_another_recording():
    task, theta, (batches, *_) = work_of("mlp")
    matmul, counts = torch.backends.cuda.matmul, []
    before = matmul.allow_tf32
    try:
        for coarse in (False, True):
            matmul.allow_tf32 = coarse
            local_sgd(task, theta, batches, 0.1, backend="recorded")
            counts.append(len(task.recordings))
    finally:
        matmul.allow_tf32 = before
    assert counts == [1, 2]


def test_padded_batches_are_another_recording():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    data = FederatedDataset.build(
        np.random.rand(8, 2).astype("f"), np.arange(8) % 2, [np.arange(8)]
    )
    task = Task(Model(net), data)
    theta, rows = task.init([0]), torch.arange(4)[None]
    for _ in range(4):
        local_sgd(
            task,
            theta,
            [Batch(rows, torch.full((1, 4), 0.25), padded=False)],
            0.1,
            backend="recorded",
        )
    short = Batch(rows, torch.tensor([[0.5, 0.5, 0, 0]]), padded=True)
    with pytest.raises(FedlibError, match="BatchNorm"):
        local_sgd(task, theta, [short], 0.1, backend="recorded")


def test_a_choice_is_for_gradients_or_for_none(monkeypatch):
    keys = []

    class Seen(dict):
        def __contains__(self, key):
            keys.append(key)

    monkeypatch.setattr(convolution, "chosen", Seen())
    for grad in (False, True):
        x, weight, bias = images(grad)
        convolution.convolve(x.detach(), weight, bias)
    assert keys[0] != keys[1]


def test_a_cpu_lays_out_patches_and_measures_nothing(monkeypatch):
    monkeypatch.setattr(convolution, "fastest", None)
    given = images(False)
    assert torch.equal(convolution.convolve(*given), convolution.unfolded(*given))


def test_room_is_what_is_free_or_held_in_reserve_less_what_is_spared(monkeypatch):
    for name, value in (
        ("mem_get_info", (400, 1000)),
        ("memory_reserved", 300),
        ("memory_allocated", 100),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert cost.room(torch.device("cuda")) == 500


def test_rates_of_each_copy_where_no_number_is_read_on_the_host(monkeypatch):
    task, theta, (batches, *_) = work_of("small_cnn")
    rates = torch.tensor([0.1, 0.2, 0.05, 0.1]).double()
    expected = local_sgd(task, theta, batches, rates)
    monkeypatch.setattr(local, "_stretches", lambda rate: [])
    assert (local_sgd(task, theta, batches, rates) - expected).abs().max() < 1e-12


def test_a_backend_chosen_for_all_is_given_back():
    with local.everywhere("loop"):
        with local.everywhere("batched"):
            pass
        assert local._default.get() == "loop"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(local._default.get).result() is None, "another thread chooses"


def test_a_rule_is_never_replaced_by_a_recording():
    task, theta, (batches, *_) = work_of("mlp")

    def still(now):
        return now.theta

    assert torch.equal(local_sgd(task, theta, batches, 0.1, backend="recorded", step=still), theta)
    assert not task.recordings
