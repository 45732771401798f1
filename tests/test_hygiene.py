"""What is committed is clean: notebooks, prose, docstrings, and no number typed by hand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import build
import nbformat
import pytest
import rests
import strip

ROOT = build.ROOT
MEASURED = [  # pages on which a number is a measurement unless data/ says otherwise
    *sorted(ROOT.glob("notebooks/*/1_derive.ipynb")),
    *sorted(ROOT.glob("notebooks/*/2_build.ipynb")),
    *sorted(ROOT.glob("notebooks/*/3_reproduce.ipynb")),
    *sorted(ROOT.glob("notebooks/*/4_attack.ipynb")),
    ROOT / "notebooks" / "01_foundations" / "4_speed.ipynb",
    *sorted(ROOT.glob("data/papers/*/paper.toml")),
    ROOT / "book" / "index.md",
    ROOT / "book" / "scoreboard.md",
]


def files() -> list[Path]:
    """Return what is, or is about to be, in the repository."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this copy is not a git checkout")
    names = set(filter(None, done.stdout.split("\0")))
    return sorted(ROOT / name for name in names if (ROOT / name).is_file())


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


NOTEBOOKS = sorted(
    path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=named)


# --- notebooks -----------------------------------------------------------------------------------


def test_notebooks_are_stripped():
    command = [*strip.STRIP, "--verify", *map(str, NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + "\nRun: make strip"


@every_notebook
def test_notebook_is_well_formed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.get("kernelspec") == strip.KERNEL, "Run: make strip"
    ids = [cell.get("id") for cell in notebook.cells]
    assert all(ids) and len(set(ids)) == len(ids), "every cell has an id of its own"
    for cell in notebook.cells:
        stored = cell.metadata.get("jupyter")
        strip.close(cell)
        assert cell.metadata.get("jupyter") == stored, f"{cell.id}: run make strip"


@every_notebook
def test_notebook_cells_are_short_and_described(path):
    wrong = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            wrong.extend(f"cell {number}: {why}" for why in faults(cell))
    assert not wrong, "\n".join(wrong)


def faults(cell) -> list[str]:
    """Say what is wrong with a code cell."""
    found = []
    lines = len(cell.source.strip().splitlines())
    if lines > 20:
        found.append(f"{lines} lines; at most 20 are read with pleasure")
    if (width := max(map(len, cell.source.splitlines()), default=0)) > 90:
        found.append(f"a line of {width} characters; 90 fit the column of a page")
    told = cell.metadata.get("mystnb", {})
    if told.get("figure") or told.get("image") or shows(cell.source):
        figure, image = told.get("figure", {}), told.get("image", {})
        lacking = [key for key in ("caption", "name") if not str(figure.get(key, "")).strip()]
        lacking += [] if str(image.get("alt", "")).strip() else ["alt"]
        if lacking:
            found.append(f"a figure without {', '.join(lacking)}")
    tags = set(cell.metadata.get("tags", []))
    if len(tags & {"keep_output", "nbval-check-output"}) == 1:
        found.append("an output is kept exactly where nbval compares it: both tags or none")
    if "keep_output" in tags and not cell.outputs:
        found.append("is tagged keep_output and keeps none")
    return found


def shows(source: str) -> bool:
    """Tell whether a cell shows a figure when it runs; a function that shows one later does not."""
    later = (ast.FunctionDef, ast.ClassDef)
    now = [node for node in ast.parse(source).body if not isinstance(node, later)]
    calls = (call for node in now for call in ast.walk(node) if isinstance(call, ast.Call))
    return any(ast.unparse(call.func) in ("plt.show", "page.show") for call in calls)


def test_figure_and_equation_names_are_used_once():
    seen: dict[str, str] = {}
    twice = []
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            names = re.findall(r"^:label: *(\S+)", cell.source, re.M)
            names += re.findall(r"\$\$ *\(([\w:-]+)\)", cell.source)
            names += re.findall(r"^\(([\w:-]+)\)=", cell.source, re.M)
            if cell.cell_type == "code":
                name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
                names = [name] if name else []
            for name in names:
                if name in seen:
                    twice.append(f"{name}: {seen[name]} and {named(path)}")
                seen[name] = named(path)
    assert not twice, "\n".join(twice)


# --- text ----------------------------------------------------------------------------------------


def text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None


def test_no_path_of_a_machine():
    homes = "|".join(["work", "root", "tmp", "home/[a-z]+", "Users/[A-Za-z]+"])
    pattern = re.compile(rf"(?<![\w.:/~$}}*-])/(?:{homes})/")
    found = []
    for path in files():
        for number, line in enumerate((text(path) or "").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{named(path)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_spelling():
    prose = [p for p in files() if p.suffix in {".md", ".ipynb", ".py", ".toml", ".yml"}]
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, *map(str, prose)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- docstrings ----------------------------------------------------------------------------------


def public(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Return the module's public classes, functions and methods with their dotted names."""
    defs = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found: list[tuple[str, ast.AST]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, defs) and not child.name.startswith("_"):
                found.append((prefix + child.name, child))
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")

    visit(tree, "")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "fedlib").rglob("*.py")), ids=named)
def test_every_public_name_is_documented(path):
    tree = ast.parse(path.read_text("utf-8"))
    lacking = [] if ast.get_docstring(tree) or not tree.body else ["the module itself"]
    lacking += [name for name, node in public(tree) if not ast.get_docstring(node)]
    assert not lacking, f"without a docstring: {', '.join(lacking)}"


# --- numbers -------------------------------------------------------------------------------------

NOT_PROSE = [
    r"^---\n.*?\n---\n",  # front matter
    r"^(`{3,}|~{3,}).*?^\1",  # fenced code and directives
    r"\$\$.*?\$\$(?: *\([^)]*\))?",
    r"(?<![\\$])\$[^$\n]+?\$",
    r"\{[a-z:]+\}`[^`]*`",  # roles
    r"`[^`\n]*`",
    r"<[^>\n]*>",
    r"\]\([^)\n]*\)",  # link targets
    r"^:{3,}\{.*$",  # titles of directives, which name places in a paper
    r"https?://\S+",
    r"^ *:[a-z-]+:.*$",  # directive options
    r"(?:\b(?i:sections?|theorems?|propositions?|corollary|corollaries|lemmas?|tables?|figures?"
    r"|figs?\.|equations?|eqs?\.|appendix|appendices|chapters?|assumptions?|algorithms?|exercises?"
    r"|versions?|python|cc by(?:-sa)?)\s+)"
    r"\(?[A-Z]?\.?\d+(?:\.\d+)*\)?(?:(?:,| and| to| or|, and|–|-)\s*\(?[A-Z]?\.?\d+(?:\.\d+)*\)?)*",
]
NUMBER = re.compile(
    r"(?<![\w.])\d+(?:\.\d+)+(?![\w.]*\d)"  # a decimal
    r"|(?<![\w.])\d+(?:\.\d+)?(?= ?%| per ?cent)"  # a percentage
)


def typed_numbers(markdown: str) -> list[str]:
    """Return the decimals and percentages that stand in the prose itself."""
    for pattern in NOT_PROSE:
        markdown = re.sub(pattern, " ", markdown, flags=re.M | re.S)
    return NUMBER.findall(markdown)


def test_the_search_for_typed_numbers_finds_them():
    page = "Reaches 0.83 (91% of it, 12 per cent).\n\n```python\nx = 0.5\n```\nAt $a=0.1$, `0.2`,"
    page += " Theorem 3.1 and Sections 4.2, 4.3 and B.1, {numref}`a-1.5`, 250 clients.\n\n$$ 0.7 $$"
    page += "\n\n:::{prf:lemma} Drift (3.4)\n:::\n"
    assert typed_numbers(page) == ["0.83", "91", "12"]


@pytest.mark.parametrize("path", MEASURED, ids=named)
def test_no_measured_number_is_typed(path):
    if not path.exists():
        pytest.fail(f"{named(path)} is not there")
    facts = "\n".join(
        fact.read_text("utf-8")
        for name in ("experiments", "claims")
        for fact in sorted((ROOT / "data" / "papers").glob(f"*/{name}.toml"))
    )
    known = set(re.findall(r"\d+(?:\.\d+)*", facts))
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        prose = path.read_text("utf-8")
    typed = sorted(set(typed_numbers(prose)) - known)
    assert not typed, f"typed by hand, found neither among the experiments nor the claims: {typed}"


BARE = re.compile(r"\{(?:eq|ref|numref|prf:ref)\}`([\w-]+)`")
NAMED = re.compile(r"[A-Z]+\d?-[EC]\d+(-\w+)?")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reference_that_jupyterlab_cannot_follow_says_what_it_means(path):
    """It knows the places in a notebook's own text. Errata and claims go by their labels."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    there = {"".join(found) for found in rests.PLACE.findall(text)}
    unknown = {label for label in BARE.findall(text) if label not in there}
    assert not [label for label in unknown if not NAMED.fullmatch(label)], "give them words"


def test_no_link_in_html_has_a_formula_which_jupyterlab_would_show_as_it_is_written():
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        assert not re.findall(r"<a [^>]*>[^<]*\$[^<]*</a>", text), path
