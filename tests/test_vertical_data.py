"""Columns for parties: the numbers that the cards and the paper name, and faults by row and column.

What needs the real files is skipped without them.
"""

from __future__ import annotations

import bz2
import gzip
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from fedlib import datasets
from fedlib.errors import FedlibError
from fedlib.papers.vertical import data as columns
from fedlib.papers.vertical.data import load_columns, read_svmlight
from fedlib.papers.vertical.made import gaussian_rows, zipf_rows

MIRROR = os.environ.get("FEDLIB_MIRROR", "")


def needs(folder: str):
    here = MIRROR and (Path(MIRROR) / folder).is_dir()
    return pytest.mark.skipif(not here, reason=f"FEDLIB_MIRROR has no folder {folder}")


# --- cards ----------------------------------------------------------------------------------------


def test_every_card_says_what_it_stands_for():
    known = datasets.all_cards()
    assert len(columns.names()) == 16
    for name in columns.names():
        card = known[name]
        assert set(card.stands_in_for) <= set(known) and len(card.shape) == 1
        assert bool(card.stands_in_for) == bool(card.cannot_show)
        made = card.format in ("columns-bundled", "columns-made")
        assert made or card.if_missing
        assert datasets.cached(name) or not made


def test_sizes_of_the_paper():
    """Section 7, the table of data sets; D2 and D5 differ, and the cards say how."""
    paper = {"uci-credit": (24000, 90), "news20": (17996, 1355191), "webspam": (175000, 16609143),
             "e2006-tfidf": (16087, 150360), "yearprediction-msd": (463715, 90),
             "givemesomecredit": (96215, 92)}  # fmt: skip
    for name, (train, d) in paper.items():
        assert (datasets.card(name).train, *datasets.card(name).shape) == (train, d)


def test_the_general_loader_says_who_reads_them():
    with pytest.raises(FedlibError, match="set of columns.*vertical.data.load_columns"):
        datasets.load("breast-cancer")
    with pytest.raises(FedlibError, match="Unknown data set of columns 'mnist'"):
        load_columns("mnist")


# --- bundled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "d", "positive"),
    [("breast-cancer", 569, 30, 357), ("digits-binary", 1797, 64, 906)],
)
def test_bundled_classes(name, rows, d, positive, recwarn):
    found = load_columns(name, standardise=False)
    x = np.vstack([found.train_x, found.test_x])
    y = np.concatenate([found.train_y, found.test_y])
    assert x.shape == (rows, d) and x.dtype == y.dtype == np.float64
    assert set(y) == {-1.0, 1.0} and (y == 1).sum() == positive
    assert (len(found.test_y), found.card.test) == (datasets.card(name).test,) * 2
    assert found.fidelity == "canonical" and not recwarn and len(found.columns) == d


def test_classes_are_in_the_order_of_the_labels():
    from sklearn.datasets import load_breast_cancer, load_digits

    found = load_columns("breast-cancer", standardise=False)
    bunch = load_breast_cancer()
    for sign, name in zip((-1, 1), found.classes, strict=True):
        row = found.train_x[np.flatnonzero(found.train_y == sign)[0]]
        at = np.flatnonzero((bunch.data == row).all(axis=1))[0]
        assert bunch.target_names[bunch.target[at]] == name
    digits = load_columns("digits-binary", standardise=False)
    bunch, row = load_digits(), digits.test_x[0]
    shown = bunch.target[(bunch.data == row).all(axis=1)][0]
    assert digits.classes[int(digits.test_y[0] > 0)] == ("even", "odd")[shown % 2]


def test_scaled_by_the_training_part_alone():
    raw, found = (
        load_columns("breast-cancer", 3, standardise=False),
        load_columns("breast-cancer", 3),
    )
    np.testing.assert_allclose(found.train_x.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(found.train_x.std(axis=0), 1, atol=1e-12)
    own = (raw.test_x - raw.train_x.mean(axis=0)) / raw.train_x.std(axis=0)
    np.testing.assert_allclose(found.test_x, own, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(raw.train_y, found.train_y)
    assert abs(found.test_x.mean(axis=0)).max() > 0.01, "test rows took no part"
    still = load_columns("digits-binary").train_x.std(axis=0) == 0
    assert still.sum() == 3, "columns that never vary stay 0"


def test_targets_run_from_0_to_1_on_training_rows():
    found, raw = load_columns("diabetes", seed=1), load_columns("diabetes", 1, standardise=False)
    assert found.train_x.shape == (354, 10) and found.test_x.shape == (88, 10)
    assert found.train_y.min() == 0 and found.train_y.max() == 1
    low, high = found.span
    both = np.concatenate([found.train_y, found.test_y]) * (high - low) + low
    assert both == pytest.approx(np.rint(both)) and 25 <= low < high <= 346
    np.testing.assert_array_equal(raw.train_y, found.train_y)
    assert set(raw.train_x[:, 1]) == {1.0, 2.0}, "sex, unscaled"


def test_the_share_of_test_rows_is_rounded_to_the_nearest():
    card = datasets.card("uci-credit")  # four to one
    for rows, tests in ((12, 2), (13, 3), (17, 3), (18, 4)):
        raw = columns._Raw(np.zeros((rows, 1)), np.zeros(rows), {})
        train, test = columns._split(card, raw, 0)
        assert len(test) == tests and sorted([*train, *test]) == list(range(rows))


def test_targets_of_test_rows_may_lie_outside_0_to_1():
    outside = 0
    for seed in range(6):
        found = load_columns("diabetes", seed)
        assert found.train_y.min() == 0 and found.train_y.max() == 1
        outside += ((found.test_y < 0) | (found.test_y > 1)).any()
    assert outside > 0


def test_a_seed_is_a_split():
    one, again, other = (load_columns("diabetes", seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.train_x, again.train_x)
    assert not np.array_equal(one.train_y, other.train_y)


@pytest.mark.parametrize(
    ("options", "said"),
    [(dict(seed=-1), "seed"), (dict(standardise="numbers"), "True, False or 'all'"),
     (dict(folder="/tmp"), "not read from a folder")],
)  # fmt: skip
def test_options_that_are_none(options, said):
    with pytest.raises(FedlibError, match=said):
        load_columns("breast-cancer", **options)


def test_another_scikit_learn_is_refused(monkeypatch):
    from sklearn import datasets as theirs

    bunch = theirs.load_breast_cancer()
    bunch.data[100, 20] += 1
    monkeypatch.setattr(theirs, "load_breast_cancer", lambda: bunch)
    with pytest.raises(FedlibError, match="expected SHA-256 cdd5f37c"):
        load_columns("breast-cancer")


# --- made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zipf-text-small", "e2006-like", "year-like"])
def test_made_sets_are_the_ones_of_their_cards(name, recwarn):
    found, card = load_columns(name), datasets.card(name)
    assert found.fidelity == "canonical" and not recwarn, "numbers differ from the card's hash"
    assert found.train_x.shape == (card.train, *card.shape) and len(found.test_y) == card.test
    again = load_columns(name, seed=9)
    np.testing.assert_array_equal(found.test_y, again.test_y)


def test_a_last_bit_leaves_a_made_set_verified(monkeypatch, recwarn):
    """Processors disagree about it, AVX2 and AVX512 in one logarithm of forty."""
    plain = load_columns("zipf-text-small")

    def nudged(function):
        def call(*values, **options):
            return np.nextafter(function(*values, **options), np.inf, **options)

        return call

    for name in ("log", "expm1"):
        monkeypatch.setattr(np, name, nudged(getattr(np, name)))
    found = load_columns("zipf-text-small")
    assert 0 < np.abs(found.train_x.data - plain.train_x.data).max() < 1e-14, "it arrives"
    assert found.fidelity == "canonical" and not recwarn and found.hashes == plain.hashes


@pytest.mark.parametrize("part", ["a value", "a column", "a label"])
def test_a_real_change_of_a_made_set_is_told(part, monkeypatch):
    def changed(*sizes, **options):
        x, y = zipf_rows(*sizes, **options)
        if part == "a value":
            x.data[1000] *= 1.01
        elif part == "a column":
            x.indices[x.indptr[8] - 1] += 1
        else:
            y[-1] *= -1
        return x, y

    monkeypatch.setitem(columns.GENERATORS, "zipf", changed)
    with pytest.warns(UserWarning, match="'zipf-text-small' is unverified"):
        found = load_columns("zipf-text-small")
    assert found.hashes != {"zipf-text-small arrays": found.card.generator["sha256"]}


def test_zipf_rows_are_what_the_card_says():
    found = load_columns("zipf-text-small")
    x, d = found.train_x, found.card.shape[0]
    assert x.format == "csr" and x.has_canonical_format and x.indices.dtype == np.int32
    assert x.nnz / x.shape[0] == pytest.approx(0.0003 * d, rel=0.02)
    np.testing.assert_allclose(np.sqrt(x.multiply(x).sum(axis=1)), 1, rtol=1e-12)
    assert abs((found.train_y == 1).mean() - 0.5) < 0.02
    often = np.sort(np.bincount(x.indices, minlength=d))[::-1] / x.shape[0]
    p = 1 / np.arange(1, d + 1) / (1 / np.arange(1, d + 1)).sum()
    draws = -np.log1p(-often[0]) / p[0]  # from the most popular column alone
    for rank in (3, 30, 300):
        assert often[rank] == pytest.approx(-np.expm1(-draws * p[rank]), rel=0.25)


def test_zipf_labels_are_planted_with_flips():
    x, clean = zipf_rows(800, 600, 4096, seed=1, density=0.01, planted=50, flips=0.0)
    same, y = zipf_rows(800, 600, 4096, seed=1, density=0.01, planted=50, flips=0.1)
    np.testing.assert_array_equal(x.data, same.data)
    assert 0.06 < (y != clean).mean() < 0.14
    assert (clean[:600] == 1).sum() == 300, "the training median is the border"


def test_a_real_target_has_the_moments_that_were_asked_for():
    _, y = zipf_rows(6000, 4000, 4096, seed=2, density=0.01, explained=0.5, level=-3.5, spread=0.5)
    assert y.mean() == pytest.approx(-3.5, abs=0.03) and y.std() == pytest.approx(0.5, rel=0.05)


def test_gaussian_columns_are_correlated_and_the_target_is_skewed():
    x, year = gaussian_rows(20000, 1, 30, seed=4, factors=3, common=0.6, explained=0.25)
    np.testing.assert_allclose(x.var(axis=0), 1, rtol=0.06)
    off = np.corrcoef(x.T)[~np.eye(30, dtype=bool)]
    assert np.abs(off).max() > 0.5 and np.abs(off).max() <= 0.63
    t = (np.log(2011 - year[year < 2011]) - 2.1) / 0.75
    assert np.median(t) == pytest.approx(0, abs=0.05)
    assert year.max() <= 2011 and year.min() == 1922 and year.mean() < np.median(year)
    weight, *_ = np.linalg.lstsq(x[year < 2011], t, rcond=None)
    share = np.var(x[year < 2011] @ weight) / np.var(t)
    assert share == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("options", [dict(density=0), dict(planted=0), dict(deepest=5)])
def test_zipf_refuses(options):
    with pytest.raises(FedlibError, match="Zipf rows need"):
        zipf_rows(10, 5, 1000, **options)


@pytest.mark.slow
def test_a_million_columns_in_little_memory():
    zipf_rows(64, 32, 1 << 12, density=0.01)  # whatever is imported on the way
    tracemalloc.start()
    found = load_columns("zipf-text")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    x = found.train_x
    assert x.shape == (17996, 1 << 20) and found.fidelity == "canonical"
    data = (x.nnz + found.test_x.nnz) * 12
    assert most < 3 * data + 5 * 8 * (1 << 20), "five vectors of all columns, and the rows"


# --- sparse files ---------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(("\n".join(lines) + "\n").encode()))
    return path


@pytest.mark.parametrize("end", ["", ".gz", ".bz2"])
def test_sparse_rows_are_read(tmp_path, end):
    path = write(tmp_path / f"rows{end}", "+1 1:0.5 7:-2e-3", "-1", "-1 3:1 # a remark", "1 7:4")
    x, y, found = read_svmlight(path, 7)
    expected = np.zeros((4, 7))
    expected[0, [0, 6]], expected[2, 2], expected[3, 6] = [0.5, -2e-3], 1, 4
    np.testing.assert_array_equal(x.toarray(), expected)
    assert y.tolist() == [1, -1, -1, 1] and isinstance(x, sparse.csr_array)
    assert x.indices.dtype == np.int32 and x.has_canonical_format
    plain = write(tmp_path / "plain", "+1 1:0.5 7:-2e-3", "-1", "-1 3:1 # a remark", "1 7:4")
    assert found == read_svmlight(plain, 7)[2], "the hash is of the decoded content"


@pytest.mark.parametrize(
    ("row", "said"),
    [("-1 5:1 3:1", ": Feature indices .* should be sorted and unique"),
     ("-1 5:1 5:1", ": Feature indices .* should be sorted and unique"),
     ("-1 8:1", ": n_features was set to 7, but input file contains 8 features. Expected is a row "
      "such as \\+1 3:0.5 17:1, with columns that increase, from 1 to 7 at most"),
     ("-1 0:1 3:1", ": Invalid index 0"),
     ("-1 3:nan", ", column 3: nan is not finite"),
     ("-1 3:1e999", ", column 3: inf is not"),
     ("-1 3:x", ": .*'x'"), ("-1 3", ": .*unpack"), ("-1 a:1", ": .*'a'"),
     ("-1 -3:1", ": Invalid index -3"), ("-1 99999999999999999999:1", ": .*too large"),
     ("0 3:1", ": the label is 0; expected -1 or \\+1"),
     ("nan 3:1", ": the label is nan"),
     ("yes 3:1", ": .*'yes'")],
)  # fmt: skip
def test_an_odd_row_is_named(tmp_path, row, said):
    path = write(tmp_path / "rows.bz2", "+1 1:1 7:1", row, "+1 2:1 1:1")
    with pytest.raises(FedlibError, match=f"rows.bz2, row 2{said}"):
        read_svmlight(path, 7)


def test_real_labels_where_they_are_asked_for(tmp_path):
    path = write(tmp_path / "rows", "-3.5 1:1", "0.25 2:1")
    assert read_svmlight(path, 3, binary=False)[1].tolist() == [-3.5, 0.25]
    with pytest.raises(FedlibError, match="row 1: the label is -3.5; expected -1 or"):
        read_svmlight(path, 3)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FedlibError, match="is missing"):
        read_svmlight(tmp_path / "nothing", 3)
    with pytest.raises(FedlibError, match="has no rows"):
        read_svmlight(write(tmp_path / "empty", ""), 3)
    cut = write(tmp_path / "rows.gz", *["+1 1:1 2:0.25"] * 500)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(FedlibError, match=r"rows\.gz cannot be read"):
        read_svmlight(cut, 3)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedlibError, match="not a regular file"):
        read_svmlight(tmp_path / "pipe", 3)


def test_news20_of_another_length_is_not_news20(tmp_path):
    write(tmp_path / "news20.binary", "+1 1:1", "-1 1355191:1")
    with pytest.raises(FedlibError, match="has 2 rows; news20.binary has 19996"):
        load_columns("news20", folder=tmp_path)
    with pytest.raises(FedlibError, match="is not the file of 'news20-like': its hash is"):
        load_columns("news20-like", folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [("news20", "news20.binary", 19996),
     ("webspam", "webspam_wc_normalized_trigram.svm", 10)],
)  # fmt: skip
def test_one_sparse_file_is_split_by_seed(tmp_path, name, file, rows):
    last = datasets.card(name).shape[0]
    write(tmp_path / file, *(f"{1 - 2 * (n % 2):+d} 1:0.5 {last}:{n + 1}" for n in range(rows)))
    with pytest.warns(UserWarning, match="unverified"):
        found, other = (load_columns(name, seed=seed, folder=tmp_path) for seed in (0, 1))
    share = datasets.card(name).test / (datasets.card(name).train + datasets.card(name).test)
    assert found.train_x.shape == (rows - round(rows * share), last)
    values = np.concatenate([found.train_x[:, [last - 1]].toarray(),
                             found.test_x[:, [last - 1]].toarray()]).ravel()  # fmt: skip
    assert sorted(values) == [*range(1, rows + 1)]
    assert (np.concatenate([found.train_y, found.test_y]) == 1 - 2 * ((values - 1) % 2)).all()
    assert (found.test_x != other.test_x).nnz > 0


def test_two_files_are_training_and_test(tmp_path):
    write(tmp_path / "E2006.train.bz2", "-3 1:1 150360:2", "-4 2:1", "-5")
    write(tmp_path / "E2006.test", "-6 1:0.5")
    with pytest.warns(UserWarning, match="unverified"):
        found = load_columns("e2006-tfidf", folder=tmp_path)
    assert found.train_x.shape == (3, 150360) and found.test_x.shape == (1, 150360)
    assert found.train_y.tolist() == [-3, -4, -5] and found.test_y.tolist() == [-6]
    assert found.span is None and found.mean is None
    assert found.train_x[0, 150359] == 2 and found.test_x[0, 0] == 0.5


# --- tables ---------------------------------------------------------------------------------------

UCI = ["ID", "LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE",
       *(f"PAY_{k}" for k in (0, 2, 3, 4, 5, 6)), *(f"BILL_AMT{k}" for k in range(1, 7)),
       *(f"PAY_AMT{k}" for k in range(1, 7)), "default.payment.next.month"]  # fmt: skip


def uci(folder: Path, **changed) -> Path:
    """Write ten clients, the last changed."""
    rows = []
    for n in range(10):
        row = dict.fromkeys(UCI, 0) | {"ID": n + 1, "LIMIT_BAL": 1000 * n, "SEX": 1 + n % 2}
        rows.append(row | {"AGE": 20 + n, "default.payment.next.month": int(n == 3)})
    rows[-1] |= changed
    lines = [",".join(f'"{name}"' for name in UCI)]
    return write(
        folder / "UCI_Credit_Card.csv", *lines, *(",".join(map(str, r.values())) for r in rows)
    )


def test_uci_credit_is_encoded_as_the_specification_says(tmp_path):
    uci(tmp_path, PAY_5=8, EDUCATION=6, SEX=1)
    with pytest.warns(UserWarning, match="unverified"):
        found = load_columns("uci-credit", folder=tmp_path, standardise=False)
    x = np.vstack([found.train_x, found.test_x])
    x = x[np.argsort(x[:, found.columns.index("LIMIT_BAL")])]
    at = dict(zip(found.columns, x.T, strict=True))
    assert x.shape == (10, 90) and len(set(found.columns)) == 90
    assert at["SEX=1"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 1]
    assert at["PAY_5=8"].tolist() == [0] * 9 + [1] and at["PAY_5=0"].tolist() == [1] * 9 + [0]
    assert "PAY_5=1" not in at and "PAY_4=1" in at
    assert at["EDUCATION=6"][9] == 1 and at["AGE"].tolist() == [*range(20, 30)]
    ones = [name for name in found.columns if "=" in name]
    assert len(ones) == 76 and all(set(at[name]) <= {0, 1} for name in ones)
    assert (sum(at[name] for name in ones if name != "SEX=1") == 8).all()
    assert (np.concatenate([found.train_y, found.test_y]) == 1).sum() == 1


def test_ones_and_zeros_stay_unless_all_is_asked_for(tmp_path):
    uci(tmp_path)
    with pytest.warns(UserWarning):
        found, every = (load_columns("uci-credit", 0, s, tmp_path) for s in (True, "all"))
    hot, age = found.columns.index("SEX=1"), found.columns.index("AGE")
    assert set(found.train_x[:, hot]) == {0, 1} and (found.mean[hot], found.std[hot]) == (0, 1)
    first = found.columns.index("LIMIT_BAL")
    assert first == sum("=" in name for name in found.columns) and found.mean[first] > 1000
    np.testing.assert_allclose(found.train_x[:, first].std(), 1)
    for data, which in ((found, [age]), (every, [hot, age])):
        np.testing.assert_allclose(data.train_x[:, which].std(axis=0), 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [(dict(PAY_6=1), "row 10, column 'PAY_6': 1 is none of -2, -1, 0, 2"),
     (dict(SEX=3), "row 10, column 'SEX': 3 is none of 1, 2"),
     (dict(AGE=""), "row 10, column 'AGE'"),
     (dict(AGE="old"), "row 10, column 'AGE': 'old' is not a number"),
     (dict(LIMIT_BAL="inf"), "row 10, column 'LIMIT_BAL': 'inf'"),
     ({"default.payment.next.month": 2}, "row 10, column 'default")],
)  # fmt: skip
def test_odd_clients_are_named(tmp_path, changed, said):
    uci(tmp_path, **changed)
    with pytest.raises(FedlibError, match=said):
        load_columns("uci-credit", folder=tmp_path)


def test_tables_that_are_none(tmp_path):
    with pytest.raises(FedlibError, match=r"no file UCI_Credit_Card.csv, plain or as .gz"):
        load_columns("uci-credit", folder=tmp_path)
    write(tmp_path / "UCI_Credit_Card.csv", "ID,SEX", "1,1")
    with pytest.raises(FedlibError, match="lacks the column 'default.payment.next.month'"):
        load_columns("uci-credit", folder=tmp_path)
    write(tmp_path / "UCI_Credit_Card.csv", ",".join(UCI))
    with pytest.raises(FedlibError, match="has no rows"):
        load_columns("uci-credit", folder=tmp_path)


def credit(folder: Path, name: str) -> None:
    head = ["", "SeriousDlqin2yrs", *columns.CREDIT_NUMBERS, *columns.CREDIT_ONE_HOT]
    rows = [[n, int(n % 4 == 0), n, 30, 0.5, 100, 3, *[n % 2] * 4, n % 3] for n in range(12)]
    rows[5][5] = rows[7][-1] = "NA"
    write(folder / name, ",".join(head), *(",".join(map(str, row)) for row in rows))


def test_rows_that_lack_a_value_are_left_out(tmp_path):
    credit(tmp_path, "cs-training.csv.gz")
    with pytest.warns(UserWarning, match="unverified"):
        found = load_columns("givemesomecredit", folder=tmp_path)
    assert found.card.train + found.card.test == 10
    assert found.card.shape == (16,), "4 counts of 2 values, one of 3, and 5 numbers"
    names = [name for name in found.columns if name.startswith("NumberOfDependents")]
    assert names == [f"NumberOfDependents={k}" for k in range(3)]


def test_the_partial_file_is_never_taken_for_the_whole(tmp_path):
    credit(tmp_path, "cs-training-head.csv.gz")
    with pytest.raises(FedlibError, match="the first rows only. Load 'givemesomecredit-partial'"):
        load_columns("givemesomecredit", folder=tmp_path)
    with pytest.warns(UserWarning, match="'givemesomecredit-partial' is unverified"):
        assert load_columns("givemesomecredit-partial", folder=tmp_path).train_x.shape[1] == 16


def test_songs_are_split_as_published(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(1922, 2012, 10), rng.normal(size=(10, 90)).round(3)])
    write(tmp_path / "YearPredictionMSD.txt", *(",".join(f"{v:g}" for v in row) for row in rows))
    with pytest.raises(FedlibError, match="has 10 rows; 515345 were expected"):
        load_columns("yearprediction-msd", folder=tmp_path)
    from dataclasses import replace

    small = replace(datasets.card("yearprediction-msd"), train=8, test=2)
    raw = columns._year(small, tmp_path)
    assert raw.first == 8 and raw.span and raw.x.shape == (10, 90) and len(set(raw.columns)) == 90
    np.testing.assert_allclose(raw.x, rows[:, 1:])


# --- the real thing -------------------------------------------------------------------------------


@needs("uci-credit")
def test_uci_credit_has_the_counts_of_the_release():
    found = load_columns("uci-credit", seed=2)
    assert found.train_x.shape == (24000, 90) and found.test_x.shape == (6000, 90)
    y = np.concatenate([found.train_y, found.test_y])
    assert len(y) == 30000 and (y == 1).sum() == 6636 and round((y == 1).mean(), 3) == 0.221
    assert found.fidelity == "canonical"


@needs("givemesomecredit")
def test_give_me_some_credit_partial_has_the_counts_of_its_card():
    found = load_columns("givemesomecredit-partial")
    y = np.concatenate([found.train_y, found.test_y])
    assert len(y) == 15978 and (y == 1).sum() == 1055
    assert found.train_x.shape == (12782, 65) and found.fidelity == "canonical"
    assert abs(len(y) / 19999 - 120269 / 150000) < 0.01, "as many are complete as in the whole"


@pytest.mark.slow
@pytest.mark.long
@needs("news20")
def test_news20_like_has_the_counts_of_its_card():
    found = load_columns("news20-like")
    x = found.train_x
    assert x.shape == (17997, 1355191) and found.test_x.shape == (2000, 1355191)
    assert found.fidelity == "canonical"
    nonzero = x.nnz + found.test_x.nnz
    assert 355 < nonzero / 19997 < 361
    np.testing.assert_allclose(np.sqrt(x.multiply(x).sum(axis=1)), 1, atol=5e-3)
    assert x.has_canonical_format and x.indices.dtype == np.int32
