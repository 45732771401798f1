"""What chance decides: drawn ahead, in blocks, the same whoever asks."""

from __future__ import annotations

import dataclasses
import itertools
import types
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedlib.engine import draws
from fedlib.engine.data import FederatedDataset
from fedlib.engine.draws import ON_HOST, ahead, draw_one, upload
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.lab import gpu

TRIALS = gpu.trials()


@dataclass(frozen=True)
class Inner:
    a: np.ndarray
    b: np.ndarray | None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    several: list[np.ndarray]
    name: str
    kept: np.ndarray = field(metadata=ON_HOST)


def some(n: int) -> Outer:
    shared = np.arange(6).reshape(2, 3) + n
    return Outer(Inner(shared, None), [shared, np.array([n / 2])], f"no. {n}", np.array([n]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_uploading_keeps_the_structure_and_leaves_the_host_s_part(device):
    found = upload([some(0), some(7)], device)
    for drawn, n in zip(found, (0, 7), strict=True):
        assert drawn.name == f"no. {n}" and isinstance(drawn.kept, np.ndarray)
        assert drawn.inner.b is None and drawn.kept == n
        assert drawn.inner.a.dtype == torch.int64 and drawn.several[1].dtype == torch.float64
        assert drawn.inner.a.shape == (2, 3) and drawn.inner.a.device.type == device
    if device == "cpu":
        assert found[1].inner.a.tolist() == [[7, 8, 9], [10, 11, 12]]
        assert found[1].several[1].item() == 3.5


def test_packing_puts_every_number_where_it_belongs(monkeypatch):
    """A device's path, ended on the CPU: one transfer a type, whatever the number of draws."""
    sent, plain = [], torch.Tensor.to

    def to(tensor, device, **options):
        sent.append(tensor)
        return plain(tensor, "cpu")

    monkeypatch.setattr(torch.Tensor, "to", to)
    found = upload([some(n) for n in range(5)], "cuda")
    assert len(sent) == 2 and {t.dtype for t in sent} == {torch.int64, torch.float64}
    for n, drawn in enumerate(found):
        assert drawn.inner.a.tolist() == (np.arange(6).reshape(2, 3) + n).tolist()
        assert drawn.several[1].tolist() == [n / 2]
        assert drawn.several[0] is drawn.inner.a, "sent once"


def test_a_block_ends_at_its_length_or_size(monkeypatch):
    monkeypatch.setattr(draws, "BLOCK_ROUNDS", 4)
    assert len(list(draws._block(iter([some(0)] * 9)))) == 4
    monkeypatch.setattr(draws, "BLOCK_BYTES", 3 * (6 * 8 + 6 * 8 + 8) - 1)
    assert len(list(draws._block(iter([some(0)] * 9)))) == 3


@pytest.mark.parametrize("name", [n for n in TRIALS if "resnet" not in n and "cifar" not in n])
def test_drawing_ahead_is_drawing_in_turn(name, monkeypatch):
    algorithm, task = TRIALS[name](np.float64)
    state = first = algorithm.init(task, (3, 5))
    for _ in range(5):
        state, _ = algorithm.round(state, task)
    monkeypatch.setattr(draws, "BLOCK_ROUNDS", 3)
    last = Evaluation(every=5)
    found = simulate(algorithm, task, 5, state=first, evaluation=last, progress=False).state
    for f in dataclasses.fields(state):
        one, other = getattr(state, f.name), getattr(found, f.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else np.all(one == other)


@pytest.mark.parametrize("name", TRIALS)
def test_draws_differ_by_seed_and_round_and_never_change_a_state(name):
    algorithm, task = TRIALS[name](np.float32)
    state = algorithm.init(task, (3, 5))
    before = {f.name: np.copy(getattr(state, f.name)) for f in dataclasses.fields(state)}

    def numbers(seeds):
        held = []
        start = dataclasses.replace(state, seeds=seeds)
        for drawn in itertools.islice(algorithm.draws(start, task), 3):
            draws._changed(drawn, lambda a: held.append(a) or a)
        return [a.tolist() for a in held]

    assert numbers((3, 5)) == numbers((3, 5))
    everything = "full" in name or "Full" in name or "all rows" in name
    assert everything or numbers((3, 5)) != numbers((3, 6))
    for key, value in before.items():
        assert np.array_equal(value, np.asarray(getattr(state, key)))


def test_no_more_rounds_are_drawn_than_run():
    class Ends:
        def __init__(self):
            self.drawn = 0

        def draws(self, state, task):
            for n in range(5):
                self.drawn += 1
                yield some(n)
            raise AssertionError("drawn beyond the end")

        def round(self, state, task, drawn):
            """Never called here."""

    class State:
        x = torch.zeros(1)

    algorithm = Ends()
    assert len(list(ahead(algorithm, State, None, 5))) == 5 == algorithm.drawn


def test_draws_that_cannot_be_used_are_told():
    class Ends:
        def draws(self, state, task):
            yield from (some(0), some(1))

        def round(self, state, task, drawn):
            """Never called here."""

    class Nothing:
        def round(self, state, task, drawn):
            """Never called here."""

    class Deaf(Ends):
        def round(self, state, task):
            """Never called here."""

    class InTurn(Deaf):
        draws = None

    class State:
        x = torch.zeros(1)

    with pytest.raises(FedlibError, match="draws of Ends ended 3 rounds too soon"):
        list(ahead(Ends(), State, None, 5))
    with pytest.raises(FedlibError, match="Nothing has no generator draws"):
        draw_one(Nothing(), State, None)
    with pytest.raises(FedlibError, match=r"Deaf has draws, .* say draws = None"):
        next(ahead(Deaf(), State, None, 1))
    assert list(ahead(InTurn(), State, None, 2)) == [(), ()]
    for wrong in ({"a": np.zeros(2)}, torch.zeros(2)):
        for device in ("cpu", "meta"):
            with pytest.raises(FedlibError, match=r"Draws hold a (dict|Tensor)\."):
                upload([(np.zeros(1), wrong)], device)


class Pair(NamedTuple):
    a: np.ndarray
    b: int


def test_named_tuples_keep_their_names():
    (found,) = upload([Pair(np.arange(3), 5)], "cpu")
    assert isinstance(found, Pair) and found.a.tolist() == [0, 1, 2] and found.b == 5


def test_a_reading_is_what_a_walk_by_hand_reads():
    data = FederatedDataset.build(
        np.zeros((9, 2)), np.zeros(9, int), [np.arange(4), np.arange(4, 9)]
    )
    clients, cursor = np.array([[1, 0], [1, 1]]), np.array([[0, 3], [2, 0]])
    reading, after = data.read((8, 9), clients, cursor, 2, 2)
    assert after.tolist() == [[2, 5], [2, 4]]
    assert reading.visits[:, :, 2].tolist() == [[3, 0, 0, 2], [4, 1, 1, 3]]
    assert reading.visits[0, :, :2].tolist() == [[8, 1], [8, 0], [9, 1], [9, 1]]
    for step, visits in enumerate(reading.visits):
        for copy, (seed, client, number) in enumerate(visits.tolist()):
            assert (
                reading.rows[step, copy].tolist()
                == data._walk(seed, client, number, 1, 2)[0].tolist()
            )
    full, _ = data.read((8, 9), clients, cursor, 2, None)
    assert full.rows.tolist()[1] == [0, 1, 2, 3, 0] and full.padded
    assert full.weight[1].tolist() == [0.25] * 4 + [0] and full.weight[0].tolist() == [0.2] * 5


def test_types_stay_apart_in_an_upload():
    ((a, b),) = draws.upload([(np.ones(2, "f"), np.ones(3))], "meta")
    assert (a.dtype, b.dtype) == (torch.float32, torch.float64)


def test_draws_go_to_where_the_state_is():
    class One:
        def draws(self, state, task):
            yield [np.ones(2)]

        def round(self, state, task, drawn):
            """Not called."""

    state = types.SimpleNamespace(x=torch.zeros(1, device="meta"))
    (((drawn,),),) = draws.ahead(One(), state, None, 1)
    assert drawn.device.type == "meta" == draws.draw_one(One(), state, None)[0].device.type


def test_every_seed_and_client_and_pass_reads_in_an_order_of_its_own():
    x, parts = np.zeros((40, 2)), [np.arange(20), np.arange(20, 40)]
    data = FederatedDataset.build(x, np.zeros(40, int), parts)
    cursor = np.zeros((2, 2), int)
    reading, _ = data.read((1, 2), np.array([[0, 1], [0, 1]]), cursor, 2, 20)
    orders = (reading.rows % 20).reshape(-1, 20)  # two passes of two clients in two runs
    assert (np.sort(orders) == np.arange(20)).all()
    assert len({tuple(order) for order in orders.tolist()}) == 8


def test_crops_and_flips_are_drawn_anew_in_every_step_and_round():
    data = FederatedDataset.build(
        np.zeros((8, 1, 6, 6)), np.zeros(8, int), [np.arange(8)], augment=True
    )
    seen, cursor, whose = [], np.zeros((1, 1), int), np.array([[0]])
    for _ in range(10):
        reading, cursor = data.read((5,), whose, cursor, 2, 4)
        seen += reading.jitter[:, 0].tolist()
    assert len({tuple(one) for one in seen}) > 10
    assert [min(part) for part in zip(*seen, strict=True)] >= [0, 0, 0]
    assert [max(part) for part in zip(*seen, strict=True)] <= [8, 8, 1]
