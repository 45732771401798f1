"""Which tests are run for a change: those that look at it, by whatever road they import it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import chosen
import pytest
import quick

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def lay(tmp_path, monkeypatch):
    """Return a function that writes files into a repository of its own, which is entered."""

    def write(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    monkeypatch.chdir(tmp_path)
    chosen._parsed.cache_clear()
    chosen._asked.cache_clear()
    yield write
    chosen._parsed.cache_clear()
    chosen._asked.cache_clear()


def commit():
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)


def test_tests_are_those_that_import_a_module_by_any_road(monkeypatch):
    def names(module):
        return {Path(file).name for file in chosen.importers(Path(module))}

    monkeypatch.chdir(ROOT)
    assert "test_draws.py" in names("fedlib/engine/draws.py")
    assert "test_generalized_fedavg.py" in names("fedlib/papers/participation/algorithm.py")
    assert "test_pages.py" in names("book/pages.py")
    browsing = {f"test_{name}.py" for name in ("interactive", "pdf", "site")}
    assert names("book/browser.py") == browsing


def test_where_none_imports_it_those_of_its_users_do(lay):
    lay(own__low="", own__high="import own.low", tests__test_it="import own.high")
    assert chosen.importers(Path("own/low.py")) == ["tests/test_it.py"]
    assert chosen.importers(Path("own/low.py"), {"test_it.py"}) == []


def test_the_closest_come_first(lay):
    lay(
        own__errors="class E: pass",
        tests__test_all="from own.errors import E\nfrom own import a, b, c",
        tests__test_error="from own.errors import E\nfrom own import a, b, c, d",
        tests__test_one="from own.errors import E",
    )
    found = chosen.closest(Path("own/errors.py"), 2)
    assert found == ["tests/test_error.py", "tests/test_one.py"]


def test_what_has_changed_since_the_last_commit_or_in_it(lay):
    lay(own__low="", own__high="import own.low", tests__test_it="import own.high")
    commit()
    lay(own__low="a = 1", tests__test_new="")
    assert quick.changed() == [Path("own/low.py"), Path("tests/test_new.py")]
    commit()
    assert quick.changed() == [Path("own/low.py"), Path("tests/test_new.py")]
    assert quick.tests(Path("tests/test_new.py")) == ["tests/test_new.py"]


def test_a_page_or_a_table_is_looked_at_by_who_names_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "tests/test_claims.py" in quick.tests(Path("data/papers/tiers/claims.toml"))
    found = quick.tests(Path("notebooks/02_participation/2_build.ipynb"))
    assert found == ["tests/test_course.py", "tests/test_hygiene.py", "tests/test_notebooks.py"]
