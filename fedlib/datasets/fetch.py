"""Fetching: download, verification, mirror and cache.

A file is looked for in the cache (``FEDLIB_DATA``, by default the user's cache folder), then in
the mirror (``FEDLIB_MIRROR``, a folder or a URL laid out as ``NAME/FILE``), then at the canonical
addresses. It is put into the cache only after its decoded content has been checked, so the
cache never holds half a file. The sizes on its card bound what is read, kept and waited for,
whatever a source sends. A card with a ``[generator]`` table is made in memory instead, see
`fedlib.datasets.generators`; a set that only its owner may hand out is read from a folder, see
`fedlib.datasets.layouts`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import math
import os
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedlib.cards import Card, DataFile, all_cards, card
from fedlib.datasets.generators import generate
from fedlib.errors import FedlibError
from fedlib.files import make_folder, open_regular, publish
from fedlib.paths import expand

TIMEOUT = 30.0
"""Seconds without a byte after which a server counts as stalled."""

PATIENCE, SLOWEST = 120.0, 20_000
"""A file may take PATIENCE seconds, and one more for each SLOWEST bytes that it may have."""

SLACK = 1 << 20
"""Bytes by which a file may be longer than its content, as room for the frames of gzip and tar."""

_GZIP_MAGIC = b"\x1f\x8b"

_CHUNK = 1 << 16

_ROOM = "Set FEDLIB_DATA to a folder that can be written and has room."


@dataclass(frozen=True)
class Payload:
    """Decoded and verified content of one file: bytes and SHA-256 of each part."""

    parts: dict[str, bytes]
    hashes: dict[str, str]
    fidelity: str


class _Unusable(Exception):
    """A source did not give a good file. The message says why and names no source."""


def cache_folder() -> Path:
    """Return the folder that holds verified downloads: ``FEDLIB_DATA`` or the user's cache."""
    if os.environ.get("FEDLIB_DATA"):
        return _named("FEDLIB_DATA")
    try:
        from platformdirs import user_cache_path
    except ImportError:  # a machine for computing may lack what is for fetching
        return expand("~/.cache/fedlib", "The cache, FEDLIB_DATA,")
    return user_cache_path("fedlib")


def cached(name: str) -> bool:
    """Say whether every file of a data set is in the cache, or needs none. Hashes nothing."""
    known = card(name)
    if known.base:
        return cached(known.base)
    if known.folder:
        return _placed(known) is not None
    return known.embedded or all(_cache_path(known, file).is_file() for file in known.files)


def get(name: str, progress: bool = True) -> list[Path]:
    """Make sure that a data set is in the cache and verified.

    Parameters
    ----------
    name
        Data set name, see `all_cards`.
    progress
        Show a progress bar while a file is downloaded.

    Returns
    -------
    list of Path
        The files in the cache, in the order of the card; empty for an embedded data set; the
        folder of a set that its owner hands out; for one made from another set the files of that.

    Raises
    ------
    FedlibError
        If the name is unknown, the cache cannot be written, no source gave a good file, or the
        folder of a set that is never downloaded is not there. The message lists what was tried,
        with expected and found hashes, and what to do.
    """
    known = card(name)
    if known.base:
        return get(known.base, progress)
    if known.embedded:
        return []
    if known.folder:
        return [_placed_or_fail(known)]
    return [_obtain(known, file, progress)[0] for file in known.files]


def verify(name: str | None = None) -> list[dict[str, Any]]:
    """Check what is in the cache against the cards; nothing is downloaded or changed.

    Parameters
    ----------
    name
        Data set name; all but the made ones when left out, since those are never in the cache.
        Naming a made set with a hash makes it and compares that; made columns are compared where
        they are loaded.

    Returns
    -------
    list of dict
        One row a file with the keys ``name``, ``file``, ``state`` (``"ok"``, ``"missing"`` or
        ``"corrupt"``), ``fidelity`` (as in `Dataset`, empty unless ok), ``path`` (None for an
        embedded data set), ``bytes`` (on disk, or None) and ``detail`` (what is wrong, or "").
    """
    every = [each for each in all_cards().values() if not each.generator]
    selected = [card(name)] if name is not None else every
    if name is not None and selected[0].base and not selected[0].embedded:
        return verify(selected[0].base)  # whose files it is made of
    rows = [_verify_file(each, file) for each in selected for file in each.files]
    return rows + [_verify_folder(each) for each in selected if each.folder]


def _named(variable: str) -> Path:
    return expand(os.environ[variable], variable).absolute()


def _placed(card: Card) -> Path | None:
    """Return the folder of a set in the cache or a mirror folder, or None."""
    mirror = os.environ.get("FEDLIB_MIRROR", "")
    roots = [cache_folder()]
    if mirror and not mirror.startswith(("http://", "https://")):
        roots.append(_named("FEDLIB_MIRROR"))
    return next((root / card.name for root in roots if (root / card.name).is_dir()), None)


def _placed_or_fail(card: Card) -> Path:
    folder = _placed(card)
    if folder is None:
        raise FedlibError(
            f"'{card.name}' is never downloaded, and {cache_folder() / card.name} is not there. "
            "What to do: put the folder, or a link to it, at that place; or set FEDLIB_DATA or "
            f"FEDLIB_MIRROR to the folder that holds {card.name}. {card.if_missing} "
            f"What it changes: fedlib data card {card.name}."
        )
    return folder


def _verify_folder(card: Card) -> dict[str, Any]:
    folder = _placed(card)
    row = {"name": card.name, "file": "(folder)", "state": "missing", "fidelity": "",
           "path": folder, "bytes": None, "detail": "never downloaded; see its card"}  # fmt: skip
    if folder is None:
        return row
    detail = "not read; no hash has been published to compare it with"
    return row | {"state": "ok", "fidelity": "unverified", "detail": detail}


def _cache_path(card: Card, file: DataFile) -> Path:
    return cache_folder() / card.name / file.name


def _obtain(card: Card, file: DataFile, progress: bool) -> tuple[Path, Payload]:
    """Return the cached path and verified payload of a file: cache, mirror, canonical URLs."""
    target = _cache_path(card, file)
    tried = []
    if os.path.lexists(target):
        try:
            return target, _decode(card, file, _read(target, file))
        except _Unusable as problem:
            tried.append(f"cache {target}: {problem}")
    make_folder(target.parent, _ROOM)
    for label, fetch, canonical in _sources(card, file, progress):
        try:
            content = fetch()
            payload = _decode(card, file, content, canonical)
        except _Unusable as problem:
            tried.append(f"{label}: {problem}")
            continue
        publish(target, content, _ROOM)
        return target, payload
    raise _nothing_worked(card, file, tried)


def _sources(
    card: Card, file: DataFile, progress: bool
) -> Iterator[tuple[str, Callable[[], bytes], bool]]:
    """Yield (label, fetch, canonical) in the order in which to try them."""
    mirror = os.environ.get("FEDLIB_MIRROR")
    if mirror and mirror.startswith(("http://", "https://")):
        url = f"{mirror.rstrip('/')}/{card.name}/{file.name}"
        yield f"mirror {url}", lambda: _download(url, _most(file), progress), False
    elif mirror:
        source = _named("FEDLIB_MIRROR") / card.name / file.name
        yield f"mirror {source}", lambda: _read(source, file), False
    for address in file.urls:
        yield address, functools.partial(_download, address, _most(file), progress), True


def _most(file: DataFile) -> int:
    """Return how long a file may be, packed or not."""
    # Not packed_bytes: a mirror may pack the same content otherwise, or not at all.
    return file.decoded_bytes + SLACK


def _read(path: Path, file: DataFile) -> bytes:
    """Return what a file in the cache or a mirror holds."""
    try:
        with open_regular(path, _most(file)) as stream:
            return stream.read(_most(file))
    except FileNotFoundError as error:
        raise _Unusable("not there") from error
    except OSError as error:
        raise _Unusable(f"cannot be read ({error.strerror or error})") from error


def _download(url: str, most: int, progress: bool) -> bytes:
    """Return what an address gives, within bounds of length and of time."""
    try:
        import requests
        import urllib3
    except ImportError as error:
        raise _Unusable(f"{error.name} is not installed, so nothing can be downloaded") from error
    from tqdm import tqdm

    asked: dict[str, Any] = dict(
        headers={"Accept-Encoding": "identity"}, hooks={"response": _leave_unread}
    )
    shown = {"unit": "B", "unit_scale": True, "leave": False, "disable": not progress}
    allowed, content = PATIENCE + most / SLOWEST, bytearray()
    late = time.monotonic() + allowed
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT, **asked) as answer:
            answer.raise_for_status()
            length = answer.raw.length_remaining  # None when the server did not say it
            if length and length > most:
                raise _too_long(length, most)
            with tqdm(desc=url.rsplit("/", 1)[-1], total=length, **shown) as bar:
                while chunk := answer.raw.read1(_CHUNK):
                    content += chunk
                    if len(content) > most:
                        raise _too_long(len(content), most)
                    if time.monotonic() > late:
                        raise _Unusable(
                            f"too slow: {len(content)} bytes came in {allowed:.0f} seconds"
                        )
                    bar.update(len(chunk))
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _Unusable(_network_reason(error)) from error
    return bytes(content)


def _leave_unread(answer: Any, **_: Any) -> None:
    """Close what redirects elsewhere: requests would read its body to the end."""
    if answer.is_redirect:
        answer.close()


def _decode(card: Card, file: DataFile, content: bytes, canonical: bool = False) -> Payload:
    """Decode what a file holds and check it against its card.

    With ``canonical`` an archive has to be the release itself; otherwise an archive of the right
    structure is accepted, and its fidelity says what it is.
    """
    if file.members:
        return _decode_archive(card, file, content, canonical)
    data, complaint = _gunzip(content, file)
    sha256 = hashlib.sha256(data).hexdigest()
    if complaint or sha256 != file.sha256:
        raise _wrong_hash(complaint or "wrong decoded content", file.sha256, sha256)
    return Payload({file.name: data}, {file.name: sha256}, "canonical")


def _gunzip(content: bytes, file: DataFile) -> tuple[bytes, str]:
    """Return the decoded content, at most one byte more than there may be, and a complaint or "".

    What is not gzip is returned as it is: some servers decode what they send.
    """
    limit = _most(file) if file.members else file.decoded_bytes
    packed, data = io.BytesIO(content), bytearray()
    stream = gzip.GzipFile(fileobj=packed) if content.startswith(_GZIP_MAGIC) else packed
    try:
        while len(data) <= limit and (chunk := stream.read1(limit + 1 - len(data))):
            data += chunk
    except (EOFError, zlib.error, OSError):
        return bytes(data), f"truncated or damaged after {len(data)} decoded bytes"
    if len(data) > limit:
        return bytes(data), f"too long: more than {limit} decoded bytes"
    return bytes(data), ""


def _decode_archive(card: Card, file: DataFile, packed: bytes, canonical: bool) -> Payload:
    sha256 = hashlib.sha256(packed).hexdigest()
    if canonical and sha256 != file.archive_sha256:
        raise _wrong_hash("wrong archive", file.archive_sha256, sha256)
    try:
        parts = _untar(card, file, packed)
        _check_classes(card, file, parts)
    except _Unusable as problem:
        raise _wrong_hash(str(problem), file.archive_sha256, sha256) from problem
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    if sha256 == file.archive_sha256:
        fidelity = "canonical"
    else:
        fidelity = "re-encoded" if hashes == dict(file.reencoded) else "unverified"
    return Payload(parts, hashes, fidelity)


def _splits(card: Card, file: DataFile) -> dict[str, tuple[tuple[str, ...], int]]:
    return {"training": (file.train_members, card.train), "test": (file.test_members, card.test)}


def _untar(card: Card, file: DataFile, packed: bytes) -> dict[str, bytes]:
    """Return the members of an archive, each as long as its share of the card's rows."""
    splits, row = _splits(card, file).values(), 1 + math.prod(card.shape)
    sizes = {name: rows // len(names) * row for names, rows in splits for name in names}
    content, complaint = _gunzip(packed, file)
    if complaint:
        raise _Unusable(complaint)
    parts = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                if member.size < 0:  # some versions of tarfile would go back, and round for ever
                    raise tarfile.ReadError(f"{name} has {member.size} bytes")
                if name not in sizes or not member.isfile():
                    continue
                if member.size != sizes[name]:
                    raise _Unusable(f"{name} has {member.size} bytes, {sizes[name]} were expected")
                parts[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise _Unusable(f"not a complete tar archive ({error})") from error
    if missing := [name for name in sizes if name not in parts]:
        raise _Unusable(f"the archive lacks {', '.join(missing)}")
    return {name: parts[name] for name in sizes}


def _check_classes(card: Card, file: DataFile, parts: dict[str, bytes]) -> None:
    """Check that every class comes equally often in each part of the split."""
    row = 1 + math.prod(card.shape)
    for split, (members, rows) in _splits(card, file).items():
        labels = np.concatenate([_rows(parts[name], row)[:, 0] for name in members])
        counts = np.bincount(labels, minlength=len(card.classes)).tolist()
        if counts != [rows // len(card.classes)] * len(card.classes):
            raise _Unusable(
                f"its {split} labels 0 to {len(counts) - 1} occur {counts} times; "
                f"{len(card.classes)} classes of {rows // len(card.classes)} were expected"
            )


def _verify_file(card: Card, file: DataFile) -> dict[str, Any]:
    path = None if card.embedded else _cache_path(card, file)
    row = {"name": card.name, "file": file.name, "state": "missing", "fidelity": "",
           "path": path, "bytes": None, "detail": ""}  # fmt: skip
    if path is not None and not path.is_file():
        return row | {"detail": f"not in the cache; `fedlib data get {card.name}` fetches it"}
    try:
        payload = _bundled(card) if path is None else _decode(card, file, _read(path, file))
    except (_Unusable, FedlibError) as problem:
        return row | {"state": "corrupt", "detail": str(problem)}
    size = None if path is None else path.stat().st_size
    return row | {"state": "ok", "fidelity": payload.fidelity, "bytes": size}


def _rows(data: bytes, row: int) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, row)


def _bundled(card: Card, progress: bool = False) -> Payload:
    """Return the content of an embedded set; arrays that are made stay with their generator."""
    if not card.generator:
        return _bundled_digits(card)

    (file,) = card.files
    _, sha256 = generate(card, progress)
    return Payload({}, {file.name: sha256}, "canonical" if sha256 == file.sha256 else "unverified")


def _bundled_digits(card: Card) -> Payload:
    # to import it takes a second
    home = Path(find_spec("sklearn").origin).parent  # type: ignore[union-attr, arg-type]
    rows = np.loadtxt(home / "datasets" / "data" / "digits.csv.gz", np.uint8, delimiter=",")
    data = rows[:, :-1].tobytes() + rows[:, -1].tobytes()
    (file,) = card.files
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != file.sha256:
        raise FedlibError(
            f"scikit-learn's digits are not the ones of the card: expected SHA-256 {file.sha256}, "
            f"found {sha256}. Install another version of scikit-learn, or reinstall it."
        )
    return Payload({file.name: data}, {file.name: sha256}, "canonical")


def _network_reason(error: Exception) -> str:
    import requests
    import urllib3

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}".rstrip()
    if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
        return f"the server stalled: nothing came for {TIMEOUT:g} seconds"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "the server broke off before the end of the file"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return f"cannot be downloaded ({type(error).__name__})"


def _too_long(size: int, most: int) -> _Unusable:
    return _Unusable(f"too long: {size} bytes or more, at most {most} were expected")


def _wrong_hash(problem: str, expected: str | None, sha256: str) -> _Unusable:
    return _Unusable(f"{problem}; expected SHA-256 {expected}, found {sha256}")


def _nothing_worked(card: Card, file: DataFile, tried: list[str]) -> FedlibError:
    lines = [f"Could not get '{file.name}' of data set '{card.name}'. Tried:"]
    lines += [f"  - {line}" for line in tried]
    lines.append(
        f"What to do: check the network and run `fedlib data get {card.name}` again; or set "
        f"FEDLIB_MIRROR to a folder or URL that holds {card.name}/{file.name}; or set FEDLIB_DATA "
        "to a cache that has it. The data set 'digits' needs no download."
    )
    if card.if_missing:
        lines.append(card.if_missing)
    return FedlibError("\n".join(lines))
