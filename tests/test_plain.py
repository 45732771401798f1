"""MyST in plain Markdown: a cell of each kind against what a person would write."""

import plain
import pytest

BIB = """\
@misc{hsu2019,
  author = {Hsu, Harry and Qi, Hang and Brown, M},
  year = {2019},
  eprint = {1909.06335}
}
@book{feller1971,
  author = {Feller, William},
  year = {1971}
}
"""
HERE, THERE = "notebooks/02_b/1_x.ipynb", "notebooks/01_a/1_y.ipynb"


@pytest.fixture
def places():
    found = plain.Places()
    found.read(THERE, ["(start)=\n# Where it starts", ":::{prf:theorem} Old\n:label: old\n:::"])
    found.read(HERE, ["$$a=b$$ (first)", "$$\na\n$$ (second)", "```{exercise}\n:label: ex\n```"])
    found.read("book/errata.md", ["(GFA-E5)=\n## An entry"])
    found.read_bibliography(BIB)
    return found


@pytest.mark.parametrize(
    ("myst", "expected"),
    [
        ("Plain *words* and $x_i$.", "Plain *words* and $x_i$."),
        ("(start)=\n# A head", '<a id="start"></a>\n# A head'),
        ("$$\na\n$$ (second)", "$$\na\n\\tag{2} $$"),
        ("see {eq}`second` and {ref}`start`", "see [(2)](#second) and "
         "[Where it starts](../../notebooks/01_a/1_y.ipynb#start)"),
        ("{prf:ref}`old`, {prf:ref}`that one <old>`",
         "[Theorem 1](../../notebooks/01_a/1_y.ipynb#old), "
         "[that one](../../notebooks/01_a/1_y.ipynb#old)"),
        ("{ref}`GFA-E5`, {func}`~fedlib.engine.mix`", "An entry, `fedlib.engine.mix`"),
        ("{cite:t}`hsu2019` says", "[Hsu et al. (2019)](https://arxiv.org/abs/1909.06335) says"),
        ("known {cite:p}`hsu2019,feller1971`",
         "known ([Hsu et al., 2019](https://arxiv.org/abs/1909.06335); Feller, 1971)"),
        (":::{prf:theorem} Bound\n:label: old\n\nIt is\n\n* small\n:::",
         '<a id="old"></a>\n\n> **Theorem 1 (Bound).**\n>\n> It is\n>\n> * small'),
        (":::{admonition} Before you start\n**You need** time.\n:::",
         "> **Before you start.**\n>\n> **You need** time."),
        (":::{solution} ex\n:class: dropdown\n\nSee {eq}`first`.\n:::",
         "<details>\n<summary>Solution</summary>\n\nSee [(1)](#first).\n\n</details>"),
        ("````{exercise} Two\n:label: ex\n\n```python\n1\n```\n````\nafter",
         '<a id="ex"></a>\n\n> **Exercise 1 (Two).**\n>\n> ```python\n> 1\n> ```\nafter'),
    ],
)  # fmt: skip
def test_a_cell_in_plain_markdown(myst, expected, places):
    assert plain.plain(myst, HERE, places) == expected
