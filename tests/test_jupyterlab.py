"""Notebooks in a real JupyterLab, as a student opens them. Without a browser they are skipped."""

import json
import os
import re
import shutil

import build
import jupyter
import nbformat
import pytest
from jupyter import CELLS, CURRENT, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
]
CHAPTERS = {  # a notebook of each, that with the panel
    path.parent.name: path
    for path in sorted((build.ROOT / "notebooks").glob("*/*.ipynb"))
    if "panel = Live(" in "".join(c.source for c in nbformat.read(path, 4).cells)
}
RAW = re.compile(r":::|\{prf:|\{ref\}|\{eq\}|\{cite|^\([a-z][a-z-]+\)=$", re.M)
LIVE = "[...document.querySelectorAll('.fedx-live')]"
PANEL = f"{LIVE}.find(e => e.innerText.includes('Train'))"
OVERLAPS = """[...document.querySelectorAll('.fedx')].flatMap(figure => {
  const all = [...figure.querySelectorAll('dt, dd')].map(e => [e, e.getBoundingClientRect()]);
  return all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) => p.right > q.left + 1 &&
    q.right > p.left + 1 && p.bottom > q.top + 1 && q.bottom > p.top + 1)
    .map(([b]) => a.innerText + ' | ' + b.innerText))}).join('; ')"""

WIDER = """[...document.querySelectorAll('.jp-RenderedSVG img')].map(image =>
  image.getBoundingClientRect().width - image.parentElement.clientWidth).filter(over => over > 1)"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """JupyterLab on a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    for path in CHAPTERS.values():
        (folder / path.parent.name).mkdir()
        shutil.copy(path, folder / path.parent.name)
    paths = [str(build.ROOT), os.environ.get("PYTHONPATH", "")]
    with jupyter.lab(folder, build.KERNEL | {"PYTHONPATH": os.pathsep.join(paths)}) as address:
        yield address


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_reads_runs_and_answers(chapter, chromium, address):
    path = CHAPTERS[chapter]
    notebook = opened(chromium, address, f"{chapter}/{path.name}", dark=chapter[1] in "246")
    notebook.run()
    failed = f"{CELLS}.flatMap(w => w.model.type == 'code' ? w.outputArea.model.toJSON() : [])"
    failed += ".filter(o => o.output_type == 'error').map(o => o.evalue)"
    assert notebook.page.evaluate(failed) == []
    for number, cell in enumerate(nbformat.read(path, 4).cells):
        node = f"{CELLS}[{number}].node"
        if cell.cell_type == "markdown":
            raw = RAW.search(notebook.until(f"{node}.innerText"))
            assert not raw, f"cell {number}: {raw[0]}"
        else:
            height = notebook.page.evaluate(f"{node}.querySelector('.cm-content')?.offsetHeight")
            folded = "source_hidden" in cell.metadata.get("jupyter", {})
            assert folded == (not height), f"cell {number}: folded {folded}, height {height}"
    folds, opened_ = (
        notebook.page.evaluate(f"document.querySelectorAll('.jp-Notebook details{which}').length")
        for which in ("", "[open]")
    )
    written = path.read_text("utf-8").count(":class: dropdown")
    assert not opened_ and folds >= written
    notebook.until(f"{PANEL} && 1")
    assert not notebook.page.evaluate(OVERLAPS)
    assert notebook.page.evaluate(WIDER) == []
    slides(notebook)
    trains(notebook, stops=chapter.startswith("02"))
    notebook.page.evaluate(f"{CURRENT}.sessionContext.shutdown()")  # or all kernels stay to the end
    notebook.page.close()


def slides(notebook):
    """Move the first slider by keyboard: its value is said, and an explorer's figure changes."""
    box = f"{LIVE}.find(e => e.querySelector('.noUi-handle'))"
    handle = f"{box}.querySelector('.noUi-handle')"
    notebook.until(f"{handle} && 1")
    explores = notebook.page.evaluate(f"{box}.innerText.includes('Keep these lines')")
    before = notebook.until(f"{box}.querySelector('.fedx').innerHTML")
    notebook.page.evaluate(f"{handle}.focus()")
    notebook.page.press("ArrowRight", 39)
    said = [notebook.page.evaluate(f"{handle}.{name}") for name in ("ariaLabel", "ariaValueText")]
    assert re.match(r".+\(.+ to .+\)", said[0]) and re.match(r"[\d.−]+$", said[1]), said
    changed = f"{box}.querySelector('.fedx').innerHTML != {json.dumps(before)}"
    assert not explores or notebook.until(changed)


def trains(notebook, stops):
    """Start a training and see it end; or pause it, go on, stop it, and interrupt a second one."""

    def press(name):
        buttons = f"[...{PANEL}.querySelectorAll('button')]"
        button = f"{buttons}.find(e => e.innerText.includes('{name}'))"
        notebook.until(f"{button} && !{button}.disabled")
        notebook.page.evaluate(f"{button}.click()")

    drawn = f"{PANEL}.querySelector('.fedx').innerHTML"
    first = notebook.until(drawn)
    if not stops:
        press("Train")
        notebook.until(f"{drawn} != {json.dumps(first)} && {PANEL}.innerText.includes('done')")
        return
    notebook.tell("panel.rounds = 10**6")
    press("Train")
    press("Pause")
    notebook.until(f"/paused after [0-9]+ of [0-9]+ rounds/.test({PANEL}.innerText)")
    press("Go on")
    notebook.until(f"/[0-9]+ s left/.test({PANEL}.innerText)")
    press("Stop")
    notebook.until(f"/stopped after [0-9]+ of [0-9]+ rounds/.test({PANEL}.innerText)")
    press("Train")
    notebook.until(f"/[0-9]+ s left/.test({PANEL}.innerText)")
    notebook.command("notebook:interrupt-kernel")
    notebook.until(f"/stopped after [0-9]+ of [0-9]+ rounds/.test({PANEL}.innerText)")
    notebook.tell("assert not panel.run.thread.is_alive()")
