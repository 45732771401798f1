"""The guide "Add a paper", followed to the letter in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import build
import pytest

from fedlib.lab.evidence import findings

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGE = (build.ROOT / "book" / "guides" / "add_a_paper.md").read_text("utf-8")
FILES = re.findall(r"^`(\S+)`\n\n(`{3,})\w+\n(.*?)^\2$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Write the files, type the commands; return the folder and what was printed."""
    home = tmp_path_factory.mktemp("mine")
    for name, _, text in FILES:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    fedlib = f'fedlib() {{ "{sys.executable}" -m fedlib "$@"; }}\n'
    python = f'python() {{ "{sys.executable}" "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-e", "-c", fedlib + python + "".join(COMMANDS)],
        cwd=home,
        env={**os.environ, **build.KERNEL, "BOOK": str(build.ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return home, done.stdout


PAGES = ("experiments", "claims", "errata", "findings", "paper")


def test_it_names_every_file():
    assert [name for name, *_ in FILES] == [
        "meet_study.py",
        *(f"papers/meet/{name}.toml" for name in PAGES),
        "page/index.md",
    ]


def test_the_record_is_where_its_claims_look_for_it(followed):
    home, said = followed
    record = "papers/meet/results/often.quick.csv.gz"
    assert (home / record).is_file() and f"Wrote {record}" in said


def test_it_is_judged(followed):
    _, said = followed
    assert "MEET-C1  CONFIRMED  1 of 1 holds  (often.quick)" in said


def test_its_question_is_answered(followed, monkeypatch):
    home, said = followed
    monkeypatch.setenv("FEDLIB_PAPERS", str(home / "papers"))
    (row,) = findings.answers("meet")
    shown = re.search(r"lower than one\n +(\S+) ± \S+,", said).group(1)
    assert row.outcome == "holds" and row.claim == "MEET-C1"
    size = f"Yes, with as many steps: the loss is lower by {float(shown):.2g} of "
    assert row.answer.startswith(size)
    assert row.setting == "In an experiment of ours, on a substitute."


def test_its_page_shows_claim_measurement_and_erratum(followed):
    home, _ = followed
    page = (home / "html" / "index.html").read_text("utf-8")
    assert 'id="meet-c1"' in page and 'id="meet-e1"' in page
    assert "Often is better by far" in page and "twenty rounds end lower than one" in page
    assert "verdict-confirmed" in page and "check-holds" in page
    titles = ["Clarifications", "The paper says", "We read", "How we checked"]
    erratum = tomllib.loads((home / "papers/meet/errata.toml").read_text("utf-8"))["erratum"][0]
    places = [page.index(titles.pop(0))]
    for title, key in zip(titles, ("says", "reads", "checked"), strict=True):
        places += [page.index(title), page.index(erratum[key][:20])]
    assert places == sorted(places)
    assert 'href="#meet-c1"' in page, "the erratum links to the claim that it names"


def test_code_fits_the_page():
    assert [line for _, _, text in FILES for line in text.splitlines() if len(line) > 88] == []
