"""Data sets: what is loaded is what the card says, and no failure leaves half a file."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedlib import cards, datasets
from fedlib.datasets import fetch, loading
from fedlib.errors import FedlibError
from fedlib.paths import data_folder

MIRROR = os.environ.get("FEDLIB_MIRROR")
FILES = {"train_x": "a.gz", "train_y": "b.gz", "test_x": "c.gz", "test_y": "d.gz"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx(array: np.ndarray) -> bytes:
    """Return an array as an IDX file of unsigned bytes, written independently of the parser."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


# --- a tiny data set, its card, and a server ----------------------------------------------------


class Server:
    """A local server: ``content[path]`` is served; ``mode`` says how it misbehaves."""

    def __init__(self):
        self.content, self.mode, self.asked = {}, "good", []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"
        threading.Thread(target=self.httpd.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler):
        self.asked.append(handler.path)
        body = self.content.get(handler.path)
        if body is None:
            return handler.send_error(404)
        if self.mode == "wrong":
            body = b"<html>Please log in</html>"
        turned = self.mode == "endless redirect"
        handler.send_response(302 if turned else 200)
        if turned:
            self.mode = "good"
            handler.send_header("Location", handler.path)
        elif self.mode not in ("no-length", "endless"):
            length = {"huge": 10**15, "no number": "many"}.get(self.mode, len(body))
            handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if turned or self.mode == "endless":
            return self.send_for_ever(handler, bytes(1 << 16), 0)
        if self.mode == "trickle":
            return self.send_for_ever(handler, b"x", 0.05)
        whole = self.mode in ("good", "wrong", "no number")
        handler.wfile.write(body if whole else body[: len(body) // 2])
        handler.wfile.flush()
        if self.mode == "stall":
            self.released.wait(20)

    def send_for_ever(self, handler, chunk, pause):
        with contextlib.suppress(OSError):  # until nobody listens any more
            while not self.released.wait(pause):
                handler.wfile.write(chunk)

    def close(self):
        self.released.set()
        self.httpd.shutdown()
        self.httpd.server_close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


class Tiny:
    """A made IDX data set 'tiny' of 2x3 images in a mirror folder, with its card."""

    def __init__(self, folder: Path):
        self.cards, self.mirror, self.cache = folder / "data", folder / "mirror", folder / "cache"
        rng = np.random.default_rng(0)
        self.arrays = {
            "train_x": rng.integers(0, 256, (40, 2, 3)),
            "train_y": np.arange(40) % 4,
            "test_x": rng.integers(0, 256, (8, 2, 3)),
            "test_y": np.arange(8) % 4,
        }
        self.decoded = {role: idx(array) for role, array in self.arrays.items()}
        self.packed = {role: gzip.compress(data) for role, data in self.decoded.items()}
        (self.mirror / "tiny").mkdir(parents=True)
        for role, name in FILES.items():
            (self.mirror / "tiny" / name).write_bytes(self.packed[role])
        self.write_card()

    def write_card(self, *addresses: str) -> None:
        text = CARD.format(name="tiny", form="idx", shape=[1, 2, 3], train=40, test=8, classes=4)
        for role, name in FILES.items():
            text += FILE.format(
                name=name,
                role=role,
                size=len(self.decoded[role]),
                sha=sha256(self.decoded[role]),
                urls=[f"{address}/{name}" for address in addresses],
            )
        (self.cards / "datasets").mkdir(parents=True, exist_ok=True)
        (self.cards / "datasets" / "tiny.toml").write_text(text.replace("'", '"'))

    def left(self) -> list[str]:
        """Return every file under the cache folder, hidden ones too."""
        return sorted(path.name for path in self.cache.rglob("*") if not path.is_dir())


CARD = """
name = "{name}"
title = "t"
licence = "l"
citation = "c"
homepage = "h"
format = "{form}"
shape = {shape}
train = {train}
test = {test}
classes = {classes:d}
split = "s"
[normalisation]
scale = 255
mean = [0.25]
std = [0.5]
source = "s"
""".replace("{classes:d}", '["0", "1", "2", "3"]')

FILE = """
[[files]]
name = "{name}"
role = "{role}"
decoded_bytes = {size}
sha256 = "{sha}"
urls = {urls}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Tiny:
    made = Tiny(tmp_path)
    monkeypatch.setattr(cards, "data_folder", lambda: made.cards)
    monkeypatch.setenv("FEDLIB_DATA", str(made.cache))
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return made


def failure(name: str = "tiny") -> str:
    with pytest.raises(FedlibError) as caught:
        datasets.load(name, progress=False)
    return str(caught.value)


def use(monkeypatch, mirror) -> None:
    monkeypatch.setenv("FEDLIB_MIRROR", str(mirror))


# --- cards ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_is_light():
    code = "import sys, fedlib.datasets; print([m for m in ('requests', 'sklearn') "
    code += "if m in sys.modules])"
    root = Path(datasets.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_card_is_complete():
    found = datasets.all_cards()
    classic = ["cifar10", "digits", "fashion-mnist", "mnist"]
    assert [name for name, card in found.items() if not (card.generator or card.folder)] == classic
    for name, card in found.items():
        assert name == card.name and len(set(card.classes)) == len(card.classes) and card.traps
        assert len(card.mean) == len(card.std) and len(card.mean) in (1, card.shape[0])
        assert all(text.strip() for text in (card.title, card.licence, card.citation, card.split))
        assert bool(card.stands_in_for) == bool(card.cannot_show)
        for file in card.files:
            assert len(file.sha256 or file.archive_sha256) == 64
            assert card.embedded or all(url.endswith(file.name) for url in file.urls)
        if name not in classic:  # made sets and folders, see test_generators and test_layouts
            continue
        assert len(card.classes) == 10 and len(card.mean) == card.shape[0]
        if card.format == "idx":
            pixels = int(np.prod(card.shape))
            sizes = [16 + card.train * pixels, 8 + card.train, 16 + card.test * pixels]
            assert [file.decoded_bytes for file in card.files] == [*sizes, 8 + card.test]
        else:
            row = 1 + int(np.prod(card.shape))
            assert card.files[0].decoded_bytes == (card.train + card.test) * row


def test_cards_are_found_whatever_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (data_folder() / "datasets" / "digits.toml").is_file()


def test_unknown_name_suggests_the_nearest():
    for ask in (datasets.card, datasets.get, datasets.load, datasets.verify, datasets.cached):
        with pytest.raises(FedlibError, match="data set 'mnits'. Did you mean 'mnist'"):
            ask("mnits")


def test_damaged_card_is_named(tiny):
    path = tiny.cards / "datasets" / "tiny.toml"
    path.write_text(path.read_text().replace('licence = "l"', ""))
    assert "tiny.toml" in failure() and "licence" in failure()


# --- loading --------------------------------------------------------------------------------------


def test_digits_needs_nothing_and_is_split_within_each_class(monkeypatch, tmp_path):
    from sklearn.datasets import load_digits

    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    data, raw = datasets.load("digits"), datasets.load("digits", normalise=False)
    assert datasets.get("digits") == [] and list(tmp_path.iterdir()) == []
    assert data.train_x.shape == (1442, 1, 8, 8) and data.test_x.shape == (355, 1, 8, 8)
    assert data.train_x.dtype == np.float32 and data.train_y.dtype == np.int64
    assert abs(data.train_x.mean()) < 1e-3 and abs(data.train_x.std() - 1) < 1e-3
    assert np.bincount(data.test_y).min() >= 34 and np.bincount(data.test_y).max() <= 36
    bunch = load_digits()
    zeros = bunch.images[bunch.target == 0] / 16
    np.testing.assert_array_equal(raw.test_x[raw.test_y == 0][:, 0], zeros[4::5])
    kept = np.delete(zeros, np.arange(4, len(zeros), 5), axis=0)
    np.testing.assert_array_equal(raw.train_x[raw.train_y == 0][:, 0], kept)
    assert data.fidelity == "canonical" and len(data.hashes) == 1


def test_digits_of_another_scikit_learn_are_refused(monkeypatch):
    right = np.loadtxt

    def other(*given, **options):
        rows = right(*given, **options)
        rows[1000, 20] += 1
        return rows

    monkeypatch.setattr(np, "loadtxt", other)
    with pytest.raises(FedlibError, match="not the ones of the card: expected SHA-256"):
        datasets.load("digits")


def test_idx_set_round_trip(tiny, monkeypatch):
    use(monkeypatch, tiny.mirror)
    data = datasets.load("tiny", normalise=False)
    for role, array in tiny.arrays.items():
        got = getattr(data, role)
        if role.endswith("x"):
            assert got.dtype == np.float32 and got.shape == (len(array), 1, 2, 3)
            np.testing.assert_array_equal(np.rint(got[:, 0] * 255), array)
        else:
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, array)
    scaled = datasets.load("tiny")
    np.testing.assert_allclose(scaled.train_x, (data.train_x - 0.25) / 0.5, rtol=1e-6)
    assert data.hashes == {FILES[role]: sha256(tiny.decoded[role]) for role in FILES}
    assert data.fidelity == "canonical" and data.classes == ("0", "1", "2", "3")


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_idx_parser(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(loading._parse_idx(idx(array)), array)


@pytest.mark.parametrize("spoil", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:6]])
def test_idx_parser_refuses_wrong_lengths(spoil):
    with pytest.raises(FedlibError, match="disagree"):
        loading._parse_idx(spoil(idx(np.zeros((2, 3)))))


def test_idx_parser_refuses_other_formats():
    with pytest.raises(FedlibError, match="starts with 3c 68 74 6d"):
        loading._parse_idx(b"<html></html>")


# --- where files come from ------------------------------------------------------------------------


def test_mirror_folder_fills_the_cache_and_the_cache_serves_again(tiny, monkeypatch):
    assert not datasets.cached("tiny")
    use(monkeypatch, tiny.mirror)
    paths = datasets.get("tiny")
    assert paths == [tiny.cache / "tiny" / name for name in FILES.values()]
    assert tiny.left() == sorted(FILES.values()) and datasets.cached("tiny")
    monkeypatch.delenv("FEDLIB_MIRROR")
    assert datasets.load("tiny").train_x.shape == (40, 1, 2, 3)


def test_mirror_url_is_tried_before_canonical_addresses_and_only_once(tiny, server, monkeypatch):
    for role, name in FILES.items():
        server.content[f"/m/tiny/{name}"] = server.content[f"/c/{name}"] = tiny.packed[role]
    tiny.write_card(f"{server.url}/c")
    use(monkeypatch, server.url + "/m/")
    datasets.load("tiny", progress=False)
    datasets.load("tiny", progress=False)
    assert server.asked == [f"/m/tiny/{name}" for name in FILES.values()]
    assert tiny.left() == sorted(FILES.values())


def test_addresses_are_tried_in_turn(tiny, server, capfd):
    for role, name in FILES.items():
        server.content[f"/second/{name}"] = tiny.packed[role]
    tiny.write_card(f"{server.url}/first", f"{server.url}/second")
    datasets.get("tiny", progress=True)
    assert server.asked[:2] == ["/first/a.gz", "/second/a.gz"] and len(server.asked) == 8
    captured = capfd.readouterr()
    assert "a.gz" in captured.err and captured.out == ""


def test_another_compression_of_the_same_content_verifies(tiny, monkeypatch):
    half = len(tiny.decoded["train_x"]) // 2
    parts = tiny.decoded["train_x"][:half], tiny.decoded["train_x"][half:]
    two_members = b"".join(gzip.compress(part, 1) for part in parts)
    (tiny.mirror / "tiny" / "a.gz").write_bytes(two_members)
    (tiny.mirror / "tiny" / "b.gz").write_bytes(tiny.decoded["train_y"])
    use(monkeypatch, tiny.mirror)
    np.testing.assert_array_equal(datasets.load("tiny").train_y, tiny.arrays["train_y"])


def test_a_damaged_cached_file_is_replaced(tiny, monkeypatch):
    use(monkeypatch, tiny.mirror)
    path = datasets.get("tiny")[0]
    path.write_bytes(path.read_bytes()[:-20])
    states = [row["state"] for row in datasets.verify("tiny")]
    assert states == ["corrupt", "ok", "ok", "ok"]
    datasets.get("tiny")
    assert path.read_bytes() == tiny.packed["train_x"]


def test_a_damaged_cached_file_is_kept_and_named_when_nothing_replaces_it(tiny, monkeypatch):
    use(monkeypatch, tiny.mirror)
    path = datasets.get("tiny")[0]
    path.write_bytes(gzip.compress(b"other"))
    monkeypatch.delenv("FEDLIB_MIRROR")
    message = failure()
    assert f"cache {path}" in message and sha256(b"other") in message
    assert tiny.left() == sorted(FILES.values())


def test_verify_lists_missing_files(tiny, monkeypatch):
    rows = datasets.verify()
    assert [row["state"] for row in rows] == ["missing"] * 4
    assert "fedlib data get tiny" in rows[0]["detail"] and not tiny.cache.exists()
    use(monkeypatch, tiny.mirror)
    datasets.get("tiny")
    row = datasets.verify("tiny")[0]
    assert (row["state"], row["fidelity"]) == ("ok", "canonical")
    assert row["bytes"] == len(tiny.packed["train_x"])


# --- failures: a clear message, and nothing half-written --------------------------------------


def check(message: str, tiny: Tiny, *parts: str) -> None:
    for part in ("'a.gz'", "'tiny'", "FEDLIB_MIRROR", "fedlib data get tiny", *parts):
        assert part in message, message
    assert tiny.left() == []


@pytest.mark.parametrize("form", ["folder", "url"])
def test_wrong_content(tiny, server, monkeypatch, form):
    wrong = bytearray(tiny.decoded["train_x"])
    wrong[-1] ^= 1
    packed = gzip.compress(bytes(wrong))
    (tiny.mirror / "tiny" / "a.gz").write_bytes(packed)
    server.content["/tiny/a.gz"] = packed
    use(monkeypatch, tiny.mirror if form == "folder" else server.url)
    check(failure(), tiny, sha256(tiny.decoded["train_x"]), sha256(bytes(wrong)))


def test_content_that_goes_on_is_cut(tiny, monkeypatch):
    (tiny.mirror / "tiny" / "a.gz").write_bytes(gzip.compress(bytes(10**6)))
    use(monkeypatch, tiny.mirror)
    check(failure(), tiny, f"more than {len(tiny.decoded['train_x'])} decoded bytes")


@pytest.mark.parametrize("cut", [4, 12, 60])
def test_truncated_gzip(tiny, monkeypatch, cut):
    (tiny.mirror / "tiny" / "a.gz").write_bytes(tiny.packed["train_x"][:-cut])
    use(monkeypatch, tiny.mirror)
    check(failure(), tiny, "truncated", sha256(tiny.decoded["train_x"]), ", found ")


def test_missing_in_mirror_and_no_network(tiny, server, monkeypatch):
    closed = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = closed.server_port
    closed.server_close()
    tiny.write_card(f"http://127.0.0.1:{port}", f"{server.url}/nowhere")
    use(monkeypatch, tiny.mirror / "elsewhere")
    check(failure(), tiny, "elsewhere/tiny/a.gz: not there", "no connection", "answered 404")


@pytest.mark.network
@pytest.mark.parametrize(
    ("mode", "reason"),
    [("wrong", sha256(b"<html>Please log in</html>")), ("broken", "broke off"),
     ("no-length", "truncated"), ("stall", "stalled"),
     ("endless", "bytes or more, at most 1048832 were expected"),
     ("huge", "too long: 1000000000000000 bytes or more"),
     ("trickle", "too slow")],
)  # fmt: skip
def test_bad_servers(tiny, server, monkeypatch, in_time, mode, reason):
    if mode in ("stall", "trickle"):
        monkeypatch.setattr(fetch, "TIMEOUT", 0.3)
    if mode == "trickle":
        monkeypatch.setattr(fetch, "PATIENCE", 0.3)
        monkeypatch.setattr(fetch, "SLOWEST", 10**9)
    server.mode, server.content["/a.gz"] = mode, tiny.packed["train_x"]
    tiny.write_card(server.url)
    started = time.monotonic()
    check(failure(), tiny, reason, f"{server.url}/a.gz")
    assert time.monotonic() - started < 60


@pytest.mark.network
@pytest.mark.parametrize("mode", ["no number", "endless redirect"])
def test_odd_servers_that_send_the_file(tiny, server, in_time, mode):
    for role, name in FILES.items():
        server.content[f"/{name}"] = tiny.packed[role]
    server.mode = mode
    tiny.write_card(server.url)
    assert len(datasets.get("tiny", progress=False)) == 4


def put_odd(path: Path, kind: str) -> None:
    """Put something at a path that is no file, or a file that is no data."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(10**12)  # takes no room


ODD = [("pipe", "not a regular file"), ("device", "not a regular file"),
       ("large", "1000000000000 bytes long, at most 1048832 were expected")]  # fmt: skip


@pytest.mark.parametrize(("kind", "reason"), ODD)
def test_a_mirror_of_pipes_devices_and_huge_files(tiny, monkeypatch, in_time, kind, reason):
    put_odd(tiny.mirror / "tiny" / "a.gz", kind)
    use(monkeypatch, tiny.mirror)
    check(failure(), tiny, reason, f"mirror {tiny.mirror}/tiny/a.gz")


@pytest.mark.parametrize(("kind", "reason"), ODD)
def test_a_cache_of_pipes_devices_and_huge_files(tiny, monkeypatch, in_time, kind, reason):
    use(monkeypatch, tiny.mirror)
    path = datasets.get("tiny")[0]
    put_odd(path, kind)
    monkeypatch.delenv("FEDLIB_MIRROR")
    assert f"cache {path}: cannot be read ({reason}" in failure()
    use(monkeypatch, tiny.mirror)
    assert len(datasets.load("tiny").train_x) == 40 and path.read_bytes() == tiny.packed["train_x"]


@pytest.mark.parametrize("variable", ["FEDLIB_DATA", "FEDLIB_MIRROR"])
def test_home_of_nobody(tiny, monkeypatch, variable):
    monkeypatch.setenv(variable, "~nobody-at-all/data")
    message = failure()
    assert f"{variable} is ~nobody-at-all/data" in message and "in full" in message


@pytest.mark.parametrize("why", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interruption_and_a_full_disk_leave_nothing(tiny, monkeypatch, why):
    def stopped(*_: Path) -> None:
        assert len(tiny.left()) == 1
        raise why

    monkeypatch.setattr(os, "replace", stopped)
    use(monkeypatch, tiny.mirror)
    with pytest.raises((KeyboardInterrupt, FedlibError)) as told:
        datasets.get("tiny")
    assert tiny.left() == []
    if isinstance(why, OSError):
        assert all(word in str(told.value) for word in ("No space left", "FEDLIB_DATA"))


def test_leftovers_of_a_killed_process_are_removed(tiny, monkeypatch):
    (tiny.cache / "tiny").mkdir(parents=True)
    old, new = (tiny.cache / "tiny" / f".a.gz.{i}.part" for i in "12")
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    use(monkeypatch, tiny.mirror)
    datasets.get("tiny")
    assert not old.exists() and new.exists()


def test_folder_that_cannot_be_written(tiny, monkeypatch):
    use(monkeypatch, tiny.mirror)
    blocked = tiny.cards / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("FEDLIB_DATA", str(blocked / "cache"))
    message = failure()
    assert "Cannot write" in message and str(blocked) in message and "FEDLIB_DATA" in message
    if os.geteuid() != 0:  # root may write anywhere
        tiny.cache.mkdir(mode=0o500)
        monkeypatch.setenv("FEDLIB_DATA", str(tiny.cache))
        assert "Cannot write" in failure() and tiny.left() == []


# --- CIFAR archive --------------------------------------------------------------------------------

ROW = 1 + 3 * 32 * 32


def cifar_batches() -> dict[str, bytes]:
    rng, batches = np.random.default_rng(1), {}
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        table = rng.integers(0, 256, (10, ROW), dtype=np.uint8)
        table[:, 0] = rng.permutation(10)
        batches[name] = table.tobytes()
    return batches


def cifar_archive(batches: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in {"readme.html": b"hello", **batches}.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


class Cifar:
    """The real CIFAR-10 card cut down to ten rows a batch."""

    def __init__(self, tiny: Tiny):
        self.folder, self.batches = tiny.mirror / "cifar10", cifar_batches()
        self.card_path = tiny.cards / "datasets" / "cifar10.toml"
        self.text = (data_folder() / "datasets" / "cifar10.toml").read_text()
        self.folder.mkdir()
        self.card()
        self.put(cifar_archive(self.batches))

    def put(self, packed: bytes) -> None:
        (self.folder / "cifar-10-binary.tar.gz").write_bytes(packed)

    def card(self, url: str | None = None, **changes: str) -> None:
        text = self.text.replace("train = 50000", "train = 50").replace("test = 10000", "test = 10")
        text = text.replace("https://www.cs.toronto.edu/~kriz", url or "http://127.0.0.1:9")
        for old, new in changes.values():
            assert old in text
            text = text.replace(old, new)
        self.card_path.write_text(text)


@pytest.fixture
def cifar(tiny, monkeypatch) -> Cifar:
    use(monkeypatch, tiny.mirror)
    return Cifar(tiny)


def test_cifar_archive_of_unknown_content_is_loaded_and_said_to_be_unverified(cifar):
    with pytest.warns(UserWarning, match="'cifar10' is unverified"):
        data = datasets.load("cifar10", normalise=False)
    assert data.train_x.shape == (50, 3, 32, 32) and data.test_x.shape == (10, 3, 32, 32)
    row = cifar.batches["data_batch_2.bin"][3 * ROW : 4 * ROW]
    assert data.train_y[13] == row[0]
    for channel, y, x in [(0, 0, 0), (1, 0, 5), (2, 31, 30)]:
        pixel = row[1 + channel * 1024 + y * 32 + x]
        assert data.train_x[13, channel, y, x] == np.float32(pixel) / np.float32(255)
    assert data.fidelity == "unverified"
    assert data.hashes == {name: sha256(batch) for name, batch in cifar.batches.items()}
    assert datasets.verify("cifar10")[0]["fidelity"] == "unverified"


def test_cifar_normalises_each_channel_with_its_own_constants(cifar):
    with pytest.warns(UserWarning):
        raw, data = datasets.load("cifar10", normalise=False), datasets.load("cifar10")
    for channel, (mean, std) in enumerate([(0.4914, 0.2023), (0.4822, 0.1994), (0.4465, 0.2010)]):
        expected = (raw.test_x[:, channel] - mean) / std
        np.testing.assert_allclose(data.test_x[:, channel], expected, atol=1e-5)


def test_cifar_known_copy_is_re_encoded_and_the_release_canonical(cifar, recwarn):
    known = tarfile_card_hashes(cifar)
    cifar.card(**known)
    assert datasets.load("cifar10").fidelity == "re-encoded"
    assert len(recwarn) == 1
    archive = sha256((cifar.folder / "cifar-10-binary.tar.gz").read_bytes())
    released = datasets.card("cifar10").files[0].archive_sha256
    cifar.card(release=(released, archive))
    assert datasets.load("cifar10").fidelity == "canonical"
    assert len(recwarn) == 1


def tarfile_card_hashes(cifar: Cifar) -> dict[str, tuple[str, str]]:
    listed = datasets.card("cifar10").files[0].reencoded
    return {name: (listed[name], sha256(data)) for name, data in cifar.batches.items()}


def test_cifar_from_a_canonical_address_must_be_the_release(cifar, server, tiny, monkeypatch):
    monkeypatch.delenv("FEDLIB_MIRROR")
    packed = cifar_archive(cifar.batches)
    server.content["/cifar-10-binary.tar.gz"] = packed
    cifar.card(server.url)
    message = failure("cifar10")
    assert "wrong archive" in message and sha256(packed) in message
    assert datasets.card("cifar10").files[0].archive_sha256 in message
    assert "cifar10-jpeg.tar.xz" in message and tiny.left() == []


def spoilt(batches: dict[str, bytes], kind: str) -> bytes:
    batch = batches["data_batch_3.bin"]
    if kind == "missing":
        batches.pop("data_batch_3.bin")
    elif kind == "short":
        batches["data_batch_3.bin"] = batch[:-ROW]
    elif kind == "counts":
        batches["data_batch_3.bin"] = bytes([(batch[0] + 1) % 10]) + batch[1:]
    elif kind == "label":
        batches["data_batch_3.bin"] = b"\x0b" + batch[1:]
    packed = cifar_archive(batches)
    return packed[: len(packed) // 2] if kind == "truncated" else packed


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("missing", "lacks data_batch_3.bin"), ("short", "data_batch_3.bin has 27657 bytes, 30730"),
     ("counts", "10 classes of 5 were expected"), ("label", "labels 0 to 11"),
     ("truncated", "truncated")],
)  # fmt: skip
def test_cifar_archive_of_wrong_structure_is_refused(cifar, tiny, kind, reason):
    cifar.put(spoilt(cifar.batches, kind))
    message = failure("cifar10")
    assert reason in message and "expected SHA-256" in message and tiny.left() == []


def tar_headers(*declared: tuple[str, int, bytes]) -> bytes:
    """Return an archive of headers alone: name, size and type of members without content."""
    packed = b""
    for name, size, kind in declared:
        info = tarfile.TarInfo(name)
        info.size, info.type = size, kind
        packed += info.tobuf(tarfile.GNU_FORMAT)
    return gzip.compress(packed)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [([("data_batch_1.bin", 8 << 40, tarfile.REGTYPE)], "has 8796093022208 bytes, 30730 were"),
     ([("long name", 8 << 40, tarfile.GNUTYPE_LONGNAME)], "not a complete tar"),
     ([("readme", -1024, tarfile.REGTYPE)], "readme has -1024 bytes"),
     ([("long name", 0, tarfile.GNUTYPE_LONGNAME)] * 2000, "not a complete tar")],
    ids=["member", "name", "backwards", "names of names"],
)  # fmt: skip
def test_cifar_archive_that_declares_what_it_has_not(cifar, tiny, in_time, headers, reason):
    cifar.put(tar_headers(*headers))
    assert reason in failure("cifar10") and tiny.left() == []


def test_cifar_archive_that_goes_on_is_cut(cifar, tiny, in_time, monkeypatch):
    batches = cifar.batches | {"other.bin": bytes(20 << 20)}
    cifar.card(size=("decoded_bytes = 184380000", "decoded_bytes = 184380"))
    cifar.put(cifar_archive(batches))
    assert f"more than {184380 + fetch.SLACK} decoded bytes" in failure("cifar10")
    assert tiny.left() == []


# --- the real thing -------------------------------------------------------------------------------


@pytest.mark.skipif(not MIRROR, reason="FEDLIB_MIRROR is not set")
@pytest.mark.parametrize("name", ["fashion-mnist", "mnist"])
def test_real_idx_sets(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    data = datasets.load(name)
    assert data.train_x.shape == (60000, 1, 28, 28) and data.test_x.shape == (10000, 1, 28, 28)
    assert data.fidelity == "canonical" and len(data.hashes) == 4
    pixels = data.train_x * 0.3081 + 0.1307
    mean, std = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}[name]
    assert abs(pixels.mean() - mean) < 1e-4 and abs(pixels.std() - std) < 1e-4
    if name == "fashion-mnist":
        assert np.bincount(data.train_y).tolist() == [6000] * 10
        assert data.classes[data.train_y[0]] == "Ankle boot"
    else:
        assert np.bincount(data.train_y).min() == 5421 and data.train_y[0] == 5


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [('role = "train_y"', 'role = "train"', "files have the roles"),
     ('format = "idx"', 'format = "idy"', "Unknown format")],
)  # fmt: skip
def test_a_card_s_roles_are_those_of_its_format(tiny, old, new, told):
    path = tiny.cards / "datasets" / "tiny.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FedlibError, match=told):
        datasets.card("tiny")
