"""Plays by speaking role: who says what, and windows that never look across the split."""

from __future__ import annotations

import io
import os
import tarfile

import numpy as np
import pytest
import torch

from fedlib import datasets
from fedlib.datasets import plays
from fedlib.datasets.owned import only, owners
from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError

MIRROR = os.environ.get("FEDLIB_MIRROR")
SYMBOLS = datasets.card("shakespeare").classes

PLAY = """\tTHE TINY PLAY


\tDRAMATIS PERSONAE

ANNA\ta lady. (LADY ANNA:)

SCENE\tA room; and what
\tlies behind it.




\tTHE TINY PLAY


ACT I



SCENE I\tA room.


\t[Enter ANNA and BERT,
\twith a dog]

ANNA\tWhat,  is the [Aside] matter?
\tSpeak!

\t[He does not]

\tSpeak, I say.

Bert\t[Rising]

\t          Who's there?
SIR
JOHN OF X\tI am.
'\tTis I.

ANNA\t|
\t|  Both!
BERT:\t|

\tNobody says this.

Bert: With a colon: yes.


\tTHE TINY PLAY


ACT II

\tNor this.

BERT\tGood [ and never closed

ANNA.\tBye."""


def test_each_role_says_what_the_play_gives_it():
    assert plays.roles(PLAY) == {
        "ANNA": ["What, is the matter?", "Speak!", "Speak, I say.", "Bye."],
        "BERT": ["Who's there?", "With a colon: yes.", "Good"],
        "SIR JOHN OF X": ["I am.", "' Tis I."],
    }
    assert list(plays.roles(PLAY)) == ["ANNA", "BERT", "SIR JOHN OF X"], "as they enter"
    assert plays.roles("\tSONNETS\n\nFrom fairest creatures\n") == {}


def test_windows_are_eighty_characters_and_the_one_after():
    text = np.arange(100, dtype=np.uint8)
    rows = plays.windows(text, 7)
    assert rows[:, 0].tolist() == [0, 7, 14] and rows[:, -1].tolist() == [80, 87, 94]
    assert (np.diff(rows, axis=1) == 1).all() and rows.shape[1] == 81
    assert len(plays.windows(text[:81], 7)) == 1 and len(plays.windows(text[:80], 7)) == 0


def test_other_characters_count_as_blanks():
    found = plays.numbered("aé\n|", SYMBOLS)
    assert [SYMBOLS[i] for i in found] == ["a", " ", "\n", " "] and found.dtype == np.uint8


def speech(name: str, words: int, seed: int) -> str:
    """Return a speech of random words, five a line."""
    rng = np.random.default_rng(seed)
    said = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 8))) for _ in range(words)]
    lines = [" ".join(said[i : i + 5]) for i in range(0, words, 5)]
    return name + "\t" + "\n\t".join(lines) + "\n\n"


def play(*speeches: str) -> str:
    return "\tA PLAY\n\nSCENE\tHere.\n\n\n" + "".join(speeches)


@pytest.fixture
def folder(tmp_path):
    held = tmp_path / "shakespeare"
    held.mkdir()
    first = play(speech("ZOE", 200, 0), speech("ADAM", 180, 1), speech("ZOE", 100, 2))
    (held / "second.txt").write_text(play(speech("ADAM", 220, 3), speech("TINY", 20, 4)))
    (held / "first.txt").write_text(first)
    (held / "sonnets.txt").write_text("\tSONNETS\n\nFrom fairest creatures\n")
    return held


def load(folder, **options):
    return plays.load_plays(folder, **{"stride": 2, "smallest": 60, **options})


def text_of(data, rows) -> list[str]:
    return ["".join(data.classes[i] for i in row) for row in rows]


def test_a_role_is_an_owner_and_its_text_is_cut_in_time(folder):
    data = load(folder)
    own = owners(data)
    assert own.names == ("first: ZOE", "first: ADAM", "second: ADAM") and own.traits == {}
    assert data.train_x.shape[1:] == (80,) and data.train_x.dtype == np.uint8
    assert (data.card.train, data.card.test) == (len(data.train_x), len(data.test_x))
    assert data.name == "shakespeare" and data.fidelity == "unverified"
    for n, name in enumerate(own.names):
        where, role = name.split(": ")
        said = plays.roles((folder / f"{where}.txt").read_text())[role]
        text = "\n".join(said) + "\n"
        cut = len(text) - len(text) // 5
        for part, x, y, rows in (
            (text[:cut], data.train_x, data.train_y, own.train_parts[n]),
            (text[cut:], data.test_x, data.test_y, own.test_parts[n]),
        ):
            expected = [part[i : i + 80] for i in range(0, len(part) - 80, 2)]
            assert text_of(data, x[rows]) == expected and len(rows)
            assert text_of(data, y[rows, None]) == [
                part[i + 80] for i in range(0, len(part) - 80, 2)
            ]


def test_every_row_has_one_owner(folder):
    own = owners(load(folder))
    assert own.sizes.tolist() == [len(part) for part in own.train_parts] and own.sizes.min() >= 60
    for rows, parts in ((own.train, own.train_parts), (own.test, own.test_parts)):
        assert sorted(np.concatenate(parts)) == list(range(len(rows)))
        assert all((rows[part] == n).all() for n, part in enumerate(parts))


def test_small_roles_and_shares_are_asked_for(folder):
    sizes = owners(load(folder)).sizes
    assert len(owners(load(folder, smallest=int(sizes.min()))).names) == 3
    assert len(owners(load(folder, smallest=int(sizes.min()) + 1)).names) == 2
    half = load(folder, share=0.5)
    assert 0.4 < len(half.test_x) / len(half.train_x) < 1.1
    every = load(folder, stride=1)
    assert abs(len(every.train_x) - 2 * len(load(folder).train_x)) <= 3


def test_a_role_without_a_test_sample_is_left_out(folder):
    (folder / "third.txt").write_text(play(speech("EVE", 80, 5)))
    names = owners(load(folder, smallest=1)).names
    assert "third: EVE" not in names and len(names) >= 3
    said = plays.roles((folder / "third.txt").read_text())["EVE"]
    text = len("\n".join(said)) + 1
    assert text - text // 5 > 80 >= text // 5, "it has a training sample"
    assert "third: EVE" in owners(load(folder, smallest=1, share=0.4)).names


@pytest.mark.parametrize("packed", ["plays.tar.xz", "shakespeare.tar.gz", "works.tgz", "a.tar"])
def test_an_archive_holds_the_same_as_its_files(folder, tmp_path, packed):
    mode = {"xz": "w:xz", "gz": "w:gz", "tgz": "w:gz", "tar": "w"}[packed.rsplit(".", 1)[-1]]
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / packed, mode) as archive:
        for path in folder.iterdir():  # the site's files have no ending, and lie in folders
            info = tarfile.TarInfo(f"comedies/{path.stem}")
            info.size = path.stat().st_size
            archive.addfile(info, io.BytesIO(path.read_bytes()))
    a, b = load(folder), load(tmp_path / "packed")
    assert a.hashes == b.hashes and np.array_equal(a.train_x, b.train_x)


def test_the_hash_follows_the_plays_alone(folder):
    before = load(folder).hashes
    (folder / "sonnets.txt").write_text("Other sonnets\n")
    assert load(folder).hashes == before
    changed = (folder / "first.txt").read_text() + speech("EVE", 1, 9)
    (folder / "first.txt").write_text(changed)
    assert load(folder).hashes != before
    changed = load(folder).hashes
    (folder / "first.txt").rename(folder / "firstly.txt")
    assert load(folder).hashes != changed, "a role belongs to a play of that name"


def test_a_folder_in_the_cache_is_loaded_by_name(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "empty"))
    with pytest.raises(FedlibError, match=r"never downloaded.*shakespeare.tar.gz into that"):
        datasets.load("shakespeare")
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    (folder / "second.txt").write_text(play(speech("ADAM", 400, 3)))
    with pytest.warns(UserWarning, match="unverified"):
        assert owners(datasets.load("shakespeare")).names[-1] == "second: ADAM"


def refused(folder, *parts, **options) -> None:
    with pytest.raises(FedlibError) as caught:
        load(folder, **options)
    for part in parts:
        assert part in str(caught.value)


def test_faults_are_named(folder, tmp_path):
    refused(tmp_path / "nowhere", "There is no folder", "nowhere")
    refused(folder, "stride is a whole number of at least 1; got 0", stride=0)
    refused(folder, "smallest is a whole number", smallest=-1)
    for share in (0, 1, float("nan")):
        refused(folder, "share is a part of each role", share=share)
    refused(folder, "No role in", "has 5000 training samples", smallest=5000)
    (folder / "broken.tar.xz").write_bytes(b"no archive")
    refused(folder, "broken.tar.xz cannot be read", "plays as plain text")
    for path in folder.iterdir():
        path.unlink()
    refused(folder, "holds no play", "'SCENE', tab")


def test_an_archive_that_goes_on_is_cut(folder, monkeypatch):
    monkeypatch.setattr(plays, "LARGEST", 1000)
    with tarfile.open(folder / "plays.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("long.txt")
        info.size = 1001
        archive.addfile(info, io.BytesIO(bytes(1001)))
    refused(folder, "plays.tar.gz cannot be read (more than 1000 bytes")


def test_roles_are_clients_of_a_network_that_reads_characters(folder):
    data = load(folder)
    own = owners(data)
    federated = FederatedDataset.build(
        data.train_x, data.train_y, own.train_parts, data.test_x, data.test_y,
        test_parts=own.test_parts,
    )  # fmt: skip
    task = Task(models.char_lstm(len(data.classes), 4, 6), federated)
    theta = task.init([0, 1])
    batches, _ = federated.next_batches(
        (0, 1), torch.tensor([[0, 2], [1, 0]]), np.zeros((2, 3), int), 1, 4
    )
    gradient = task.grad(theta.repeat_interleave(2, 0), batches[0])
    assert gradient.shape == (4, task.size) and gradient.abs().sum(1).min() > 0
    assert set(task.evaluate(theta, "test")) == {"loss", "accuracy", "top5"}


# --- some owners alone ---------------------------------------------------------------------------


def test_some_owners_are_taken_in_the_order_asked_for(folder):
    data = load(folder)
    own, few = owners(data), only(data, ["second: ADAM", 0])
    assert few.owners.names == ("second: ADAM", "first: ZOE") and owners(few) is few.owners
    for split in ("train", "test"):
        x, y = getattr(data, f"{split}_x"), getattr(data, f"{split}_y")
        for new, old in ((0, 2), (1, 0)):
            there = getattr(few.owners, f"{split}_parts")[new]
            rows = getattr(own, f"{split}_parts")[old]
            assert np.array_equal(getattr(few, f"{split}_x")[there], x[rows])
            assert np.array_equal(getattr(few, f"{split}_y")[there], y[rows])
    again = only(few, ["first: ZOE"])
    assert np.array_equal(again.train_x, data.train_x[own.train_parts[0]])
    assert few.hashes == data.hashes and few.card is data.card


def test_an_owner_keeps_rows_spread_over_all_of_its_own(folder):
    data = load(folder)
    own, few = owners(data), only(data, [1, 2], train=10, test=10_000)
    rows = own.train_parts[1]
    taken = rows[[int(i * len(rows) / 10) for i in range(10)]]
    assert np.array_equal(few.train_x[few.owners.train_parts[0]], data.train_x[taken])
    assert few.owners.sizes.tolist() == [10, 10]
    assert [len(p) for p in few.owners.test_parts] == [len(p) for p in own.test_parts[1:]]


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [([], "one at least; got []"), ([1, "first: ADAM"], "once each"), ([3], "0 to 2; got 3"),
     ([-1], "An owner's number is a whole number"), ([True], "An owner's number"),
     (["first: ADM"], "no owner 'first: ADM'. Near it: first: ADAM")],
)  # fmt: skip
def test_owners_that_there_are_not_are_refused(folder, chosen, reason):
    with pytest.raises(FedlibError) as caught:
        only(load(folder), chosen)
    assert reason in str(caught.value)


def test_limits_are_whole_numbers_and_a_set_without_owners_says_so(folder):
    for wrong in ({"train": 0}, {"test": 1.5}):
        with pytest.raises(FedlibError, match="is a whole number of at least 1"):
            only(load(folder), [0], **wrong)
    with pytest.raises(FedlibError, match="'digits' belong to nobody.*partition"):
        owners(datasets.load("digits"))


# --- the real thing ------------------------------------------------------------------------------


@pytest.mark.skipif(not MIRROR, reason="FEDLIB_MIRROR is not set")
def test_the_real_plays_are_as_the_card_says(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match="unverified"):
        data = datasets.load("shakespeare")
    card, own = datasets.card("shakespeare"), owners(data)
    assert (len(data.train_x), len(data.test_x)) == (card.train, card.test)
    assert data.hashes["plays"] in card.traps[0]
    assert (
        f"{len(own.names)} roles of {len({n.split(':')[0] for n in own.names})} plays"
        in card.traps[0]
    )
    assert len(np.unique(data.train_x)) == 74
    blank = (data.test_y == data.classes.index(" ")).mean()
    assert blank == np.bincount(data.test_y).max() / len(data.test_y) and abs(blank - 1 / 6) < 0.01
    rows = own.train_parts[own.names.index("hamlet: HAMLET")]
    first = "".join(data.classes[i] for i in data.train_x[rows[0]])
    assert first.startswith("A little more than kin, and less than kind.\nNot so, my lord;")


@pytest.mark.parametrize("target", ["/dev/zero", "/nonexistent"])
def test_a_link_to_no_file_is_not_passed_over(folder, target):
    (folder / "third.txt").symlink_to(target)
    with pytest.raises(FedlibError, match="third.txt is no file"):
        load(folder)
