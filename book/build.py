"""Run every notebook, then build the book from what they printed.

``python book/build.py`` works from any folder. It needs no network and no data set: the ``replay``
profile shows the stored records. The steps: a fresh copy of the sources, every notebook of the
table of contents run into that copy (two at a time), a strict build in which every warning is an
error, the notebooks once more in plain Markdown (``_build/notebooks``, and what the pages offer for
download), and a check that each link of the finished pages leads somewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import plain
from pages import ROOT, feed, fill, judged, offer, toc_pages

from fedlib import paths

WIDGET = "application/vnd.jupyter.widget-view+json"
SOURCES = ("_config.yml", "_toc.yml", "CHANGELOG.md", "book")
KERNEL = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TQDM_DISABLE": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONPATH": str(ROOT),  # this checkout's fedlib, whatever is installed
}


# --- the notebooks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """How one notebook went: its path, the seconds it took, and what broke (empty: nothing)."""

    notebook: Path
    seconds: float
    error: str = ""


def toc_notebooks() -> list[Path]:
    """Return the notebooks of the table of contents, relative to the root."""
    pages = [Path(page + ".ipynb") for page in toc_pages(ROOT / "_toc.yml")]
    return [page for page in pages if (ROOT / page).is_file()]


def execute(notebook: Path, target: Path, profile: str) -> Run:
    """Run one notebook from top to bottom and write the executed copy.

    Parameters
    ----------
    notebook, target
        Where it is and where its executed copy goes, without a trace of this machine.
    profile
        Given to notebooks that have a parameter of this name with another default; the others
        run as they are, so that no page shows a cell that its author did not write.
    """
    import nbformat
    import papermill
    from kernels import Manager

    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    error = ""
    try:
        known = papermill.inspect_notebook(str(notebook)).get("profile", {"default": ""})
        wanted = known["default"].strip("\"'") not in ("", profile)
        executed = papermill.execute_notebook(
            str(notebook),
            None,
            {"profile": profile} if wanted else {},
            kernel_name="python3",
            kernel_manager_class=Manager,
            coalesce_streams=True,  # a print that was sent in two parts gets no empty line between
            iopub_timeout=60,
            raise_on_iopub_timeout=True,  # rather than go on without what a cell has printed
            progress_bar=False,
            request_save_on_cell_execute=False,
            extra_arguments=["--log-level=50"],
        )
        for part in (executed, *executed.cells):
            part.metadata.pop("papermill", None)
        executed.metadata.pop("widgets", None)  # a page has no kernel: it shows what stands beside
        for cell in (cell for cell in executed.cells if cell.cell_type == "code"):
            cell.outputs = [each for each in cell.outputs if "live" not in each.get("metadata", {})]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
        nbformat.write(executed, target)
    except papermill.exceptions.PapermillExecutionError as exc:
        error = _short(notebook, exc)
    except Exception as exc:  # a kernel that died, a notebook that is not one
        error = f"{notebook}: {type(exc).__name__}: {exc}"
    return Run(notebook, time.perf_counter() - start, error)


def execute_all(jobs: list[tuple[Path, Path]], profile: str) -> Iterator[Run]:
    """Run notebooks two at a time, one thread each, and yield each as it ends."""
    import logging

    logging.getLogger("papermill").setLevel(logging.ERROR)
    before = {name: os.environ.get(name) for name in KERNEL}
    os.environ.update(KERNEL)
    pool = ThreadPoolExecutor(2)
    try:
        futures = [pool.submit(execute, source, target, profile) for source, target in jobs]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _short(notebook: Path, exc: object) -> str:
    """Say which cell failed and the end of its traceback."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(exc.traceback))
    lines = plain.splitlines()
    if len(lines) > 30:
        lines = ["..."] + lines[-30:]
    name = notebook.relative_to(ROOT) if notebook.is_relative_to(ROOT) else notebook
    head = f"{name}: cell {exc.cell_index} (code cell {exc.exec_count}) failed with {exc.ename}"
    return "\n".join([head, *("    " + line for line in lines)])


# --- the site ------------------------------------------------------------------------------------


def fresh_tree(tree: Path) -> None:
    """Copy the sources of the site, without the notebooks, to an empty folder, and fill them in."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(source, tree / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, tree / name)
    for folder in (ROOT / "notebooks").rglob("assets"):
        shutil.copytree(folder, tree / folder.relative_to(ROOT))
    fill(tree)
    offer(tree / "_config.yml")


def run_notebooks(tree: Path, profile: str) -> str:
    """Run the notebooks into the tree, with a line for each, until one fails; return its error."""
    jobs = [(ROOT / notebook, tree / notebook) for notebook in toc_notebooks()]
    print(f"Running {len(jobs)} notebooks, two at a time, profile {profile}.", flush=True)
    for done, run in enumerate(execute_all(jobs, profile), start=1):
        name = run.notebook.relative_to(ROOT)
        outcome = "FAILED" if run.error else "ok"
        print(f"  [{done}/{len(jobs)}] {name}  {run.seconds:.1f} s  {outcome}", flush=True)
        if run.error:
            return run.error
    return ""


def build_site(tree: Path, html: Path) -> int:
    """Build the pages strictly; return the exit status, with the log beside the pages."""
    log = html.with_name("build.log")
    # Looking for garbage takes a quarter of the time; without, it needs 2.6 GB instead of 1.
    start = "import gc; gc.disable(); from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", start, "build", ".", "-n", "-W", "--keep-going"]
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, **KERNEL}, stdout=out, stderr=out, check=False
        )
    status = done.returncode
    if status:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", "replace"))
        wrong = [line for line in text.splitlines() if re.search(r"WARNING|ERROR|Error:", line)]
        print("\n".join(wrong or text.splitlines()[-30:]))
        print(f"The book was not built: every warning is an error. The whole log: {log}")
        return status
    shutil.rmtree(html, ignore_errors=True)
    shutil.move(tree / "_build" / "html", html)
    return 0


# --- the links -----------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page offers (ids) and what it asks for (links, and files the browser loads)."""

    LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the ids, links and loaded files of one tag."""
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and "href" in given:
            hints = {"canonical", "next", "prev", "search", "index", "author", "license",
                     "alternate", "self"}  # fmt: skip
            asks = not hints & set(given.get("rel", "").split())
            (self.loaded if asks else self.links).append(given["href"])
        if tag in self.LOADED and self.LOADED[tag] in given:
            self.loaded.append(given[self.LOADED[tag]])


def check_links(html: Path) -> list[str]:
    """Return one line for every link, fragment or loaded file that leads nowhere or outside."""
    each = [*html.rglob("*.html"), *html.glob("*.xml")]  # a feed has links, too
    pages = {path: Page(path) for path in each if "_static" not in path.parts}
    ids = {path.resolve(): page.ids for path, page in pages.items()}
    wrong = []
    for path, page in sorted(pages.items()):
        name = path.relative_to(html)
        for url in page.loaded:
            if urlsplit(url).netloc:
                wrong.append(f"{name}: loads {url} from outside")
        for url in dict.fromkeys(page.links + page.loaded):
            wrong.extend(f"{name}: {url} {why}" for why in _broken(url, path, ids))
    for sheet in html.rglob("*.css"):
        text = sheet.read_text("utf-8", "replace")
        for url in re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", text):
            wrong.append(f"{sheet.relative_to(html)}: loads {url} from outside")
    return wrong


def _broken(url: str, page: Path, ids: dict[Path, set[str]]) -> Iterator[str]:
    parts = urlsplit(url)
    if parts.scheme or parts.netloc or url in ("", "#"):
        return
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
    if not target.exists():
        yield "leads to no file"
    elif parts.fragment and target in ids and not _there(unquote(parts.fragment), ids[target]):
        yield "leads to no such place on that page"


def _there(place: str, ids: set[str]) -> bool:
    """Whether a page has a place: an id, or a figure with settings, each value with its own id."""
    name, _, settings = place.partition(":")
    return place in ids or {name, *(f"{name}:{one}" for one in settings.split("&"))} <= ids


# --- all of it -----------------------------------------------------------------------------------


def build(out: Path, profile: str = "replay") -> int:
    """Build the book into ``out/html`` and return the exit status."""
    start = time.perf_counter()
    out = out.resolve()
    tree, html = out / "tree", out / "html"
    missing = [page for page in toc_pages() if not list(ROOT.glob(f"{page}.[im][pd]*"))]
    if missing:
        print("The table of contents names pages that are not there: " + ", ".join(missing))
        return 1
    shutil.rmtree(html, ignore_errors=True)
    fresh_tree(tree)
    rows = {name: judged(name) for name in paths.papers("claims.toml")}
    (out / "judged.json").write_text(json.dumps(rows), "utf-8")
    os.environ["FEDLIB_JUDGED"] = str(out / "judged.json")  # so that no notebook judges them again
    if wrong := run_notebooks(tree, profile):
        print(wrong)
        return 1
    print("Building the pages; every warning is an error.", flush=True)
    if status := build_site(tree, html):
        return status
    (html / "corrections.xml").write_bytes(feed())
    plain.write(tree, toc_notebooks(), out)
    shutil.copytree(out / "notebooks", html / "_sources" / "notebooks", dirs_exist_ok=True)
    if lost := check_links(html):
        print("\n".join(lost))
        print(f"{len(lost)} links lead nowhere.")
        return 1
    seconds = time.perf_counter() - start
    print(f"Links checked. Built in {seconds:.0f} s. Open {html / 'index.html'}")
    return 0


def main() -> int:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(description="Run every notebook and build the book.")
    parser.add_argument("--profile", default="replay", help="replay, smoke, quick or paper")
    parser.add_argument("--out", type=Path, default=ROOT / "_build", help="default: _build")
    given = parser.parse_args()
    return build(given.out, given.profile)


if __name__ == "__main__":
    sys.exit(main())
