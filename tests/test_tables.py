"""A table becomes federated data: every row where it belongs, every refusal with a name in it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib.datasets import from_frame
from fedlib.errors import FedlibError

ROWS = [  # hospital, age, smoker, verdict, later
    ("west", 40, True, "ill", False),
    ("east", 20, False, "well", False),
    ("west", 60, False, "well", True),
    ("north", 30, True, "ill", False),
    ("east", 50, False, "ill", True),
    ("west", 80, True, "well", False),
]
FRAME = pd.DataFrame(ROWS, columns=["hospital", "age", "smoker", "verdict", "later"])
CALL = dict(label="verdict", client="hospital")


def test_every_value_is_where_it_belongs():
    data = from_frame(FRAME.sample(6, random_state=3).sort_index(), **CALL, test="later")
    assert data.columns == ["age", "smoker"] and data.classes == ["ill", "well"]
    assert data.clients == ["east", "north", "west"]
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert data.x.tolist() == [[40, 1], [20, 0], [30, 1], [80, 1]]
    assert data.y.tolist() == [0, 1, 0, 1]
    assert [part.tolist() for part in data.parts] == [[1], [2], [0, 3]]
    assert data.test_x.tolist() == [[60, 0], [50, 0]] and data.test_y.tolist() == [1, 0]


def test_the_index_of_the_table_plays_no_part():
    shuffled = FRAME.set_index(pd.Index([5, 5, 1, 0, 2, 3]))
    one, two = (from_frame(f, **CALL, test="later") for f in (FRAME, shuffled))
    assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y)


def test_standardised_by_the_training_rows():
    data = from_frame(FRAME.assign(same=7), **CALL, test="later", standardise=True)
    ages, later = np.array([40, 20, 30, 80]), np.array([60, 50])
    assert np.allclose(data.x[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-6)
    assert np.allclose(data.test_x[:, 0], (later - ages.mean()) / ages.std(), atol=1e-6)
    assert (data.x[:, 2] == 0).all() and data.mean[2] == 7 and data.std[2] == 0


def test_numbers_far_from_zero_keep_what_sets_them_apart():
    seconds = 1.7e9 + np.array([0, 1, 2, 3, 4, 5])  # which are one number in float32
    data = from_frame(FRAME.assign(when=seconds, same=0.1), **CALL, standardise=True)
    when, same = data.x[:, data.columns.index("when")], data.x[:, data.columns.index("same")]
    assert np.allclose(when, (seconds - seconds.mean()) / seconds.std(), atol=1e-6)
    assert (same == 0).all(), "a share that is the same for all"


def test_large_whole_numbers_are_not_made_one():
    visits = FRAME.assign(visit=20240101000000 + np.arange(len(FRAME)))
    with pytest.raises(
        FedlibError, match="'visit' has 6 different numbers, of which float32 makes 1"
    ):
        from_frame(visits, **CALL)
    data = from_frame(visits, **CALL, standardise=True)
    assert len(data.x[:, data.columns.index("visit")].unique()) == 6


def test_each_client_holds_a_share_out():
    frame = pd.DataFrame({"who": np.repeat([30, 4, 200], [10, 1, 5]), "a": np.arange(16), "y": 0})
    data = from_frame(frame, "y", "who", test=0.3)
    assert data.clients == [4, 30, 200]
    assert data.sizes.tolist() == [1, 7, 3], "rounded, and never all that a client has"
    both = torch.cat([data.x, data.test_x]).flatten().sort().values
    assert both.tolist() == list(range(16))
    again, other = from_frame(frame, "y", "who", 0.3), from_frame(frame, "y", "who", 0.3, seed=1)
    assert torch.equal(data.x, again.x) and not torch.equal(data.x, other.x)
    assert from_frame(frame, "y", "who").test_x is None


def test_labels_of_every_kind():
    for values, expected, names in (
        (np.array([3, 1, 2, 0, 0, 1], np.int32), [3, 1, 2, 0, 0, 1], []),
        ([True, False] * 3, [1, 0] * 3, [False, True]),
        (pd.Categorical(list("bacabc"), list("cba")), [1, 0, 2, 0, 1, 2], list("abc")),
        (pd.array([1, 0] * 3, "Int64"), [1, 0] * 3, []),
    ):
        data = from_frame(FRAME.assign(verdict=values), **CALL)
        assert data.y.dtype == torch.int64 and data.y.tolist() == expected
        assert data.classes == names
    data = from_frame(FRAME.assign(verdict=[0.5, 1, 2, 3, 4, 5]), **CALL)
    assert data.y.dtype == torch.float32 and data.classes == []


@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        ("table.csv", {}, "got str. Try pd.read_csv"),
        (FRAME, dict(label="verdikt"), "Did you mean 'verdict'"),
        (FRAME, dict(client="verdict"), "different columns"),
        (FRAME.assign(city="x", day=pd.Timestamp(0)), {}, r"\['city', 'day'\].*get_dummies"),
        (FRAME.assign(age=[1, 2, 3, np.nan, 5, 6]), {}, r"\['age'\].*missing"),
        (FRAME.assign(age=[1, 2, 3, np.inf, 5, 6]), {}, r"\['age'\].*infinite"),
        (FRAME.assign(age=pd.array([1, 2, 3, None, 5, 6], "Int64")), {}, r"\['age'\]"),
        (FRAME.assign(verdict=[1, np.nan] * 3), {}, "'verdict' lacks 3"),
        (FRAME.assign(verdict=[1, np.inf] * 3), {}, "'verdict'"),
        (FRAME.assign(verdict=np.uint64([2**63 + 5, 1] * 3)), {}, "'verdict' holds uint64"),
        (FRAME.assign(verdict=[1j, 2] * 3), {}, "'verdict' holds complex128"),
        (FRAME.assign(hospital=["a", None] * 3), {}, "'hospital' has missing"),
        (FRAME, dict(test=1.5), "got 1.5"),
        (FRAME, dict(test=0.01), "holds no row out"),
        (FRAME, dict(test="age"), "true and false only"),
        (FRAME.assign(later=[0, 1, 0, 0, 1, 0]), dict(test="later"), r"\['east'\] have test rows"),
        (FRAME[["hospital", "verdict"]], {}, "No column is left"),
        (FRAME[:0], {}, "no rows"),
        (pd.concat([FRAME, FRAME], axis=1), {}, "come twice"),
    ],
)
def test_refusals_name_the_column(frame, options, words):
    with pytest.raises(FedlibError, match=words):
        from_frame(frame, **CALL | options)
