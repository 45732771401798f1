"""What rests on what, held against four small pages whose answer is plain to see."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pages
import pytest
import rests

ROOTS = r"""# Roots

(root-section)=
## A section

:::{prf:theorem} First
:label: first

$$
x=1
$$ (first-eq)
:::

:::{prf:lemma} Helper, $S=0$ and $\lambda$
:label: helper

Nothing.
:::
"""
STEM = r"""# Stem

See {ref}`the section <root-section>`, [all of it](../a/roots.ipynb), {eq}`first-eq`, and
[what comes](../c/leaf.ipynb).

:::{prf:corollary} Second
:label: second

By {eq}`an equation <first-eq>`.
:::

::::{dropdown} Proof of it
A nested box.
:::{note}
Uses {prf:ref}`helper`.
:::
::::

:::{prf:theorem} Third
:label: third

Alone so far.
:::

*{prf:ref}`second` follows.*

:::{prf:proof}
With {prf:ref}`the third <third>`.
:::

:::{dropdown} A remark, and no proof
{prf:ref}`helper` once more.
:::
"""
LEAF = "# Leaf\n\nAs {prf:ref}`third` says, and {prf:ref}`third` again. {ref}`CLAIM-1`.\n"
TEXTS = {"a/roots": ROOTS, "b/stem": STEM, "c/leaf": LEAF, "c/other": "# Other\n\n{eq}`first-eq`"}
CAPTIONS = {"a": "The roots", "b": "The stem", "c": "The leaves"}


def test_a_statement_rests_on_what_it_and_its_proof_name():
    found = rests.read(TEXTS)
    assert list(found.statements) == ["first", "helper", "second", "third"]
    assert found.statements["second"] == ("corollary", "Second", "b/stem")
    assert found.uses == {
        "first": set(), "helper": set(), "third": set(), "second": {"first", "helper", "third"}
    }  # fmt: skip
    assert found.pages == {
        "first": {"b/stem", "c/other"}, "helper": {"b/stem"}, "second": set(), "third": {"c/leaf"}
    }  # fmt: skip


def test_a_chapter_rests_on_earlier_ones_only():
    found = rests.read(TEXTS)
    assert found.chapters == {("b", "a"): 6, ("c", "b"): 2, ("c", "a"): 1}
    assert ("b", "c") not in found.chapters, "what a page says comes next is nothing it rests on"


def test_each_chapter_in_the_picture_is_a_link_with_its_name_and_each_use_an_arc():
    text = "\n".join(rests.picture(TEXTS, CAPTIONS))
    picture = ElementTree.fromstring(text[: text.index("</div>") + 6]).find("svg")
    links = {"".join(link.itertext()): link.get("href") for link in picture.iter("a")}
    assert links == {
        "The roots": "../notebooks/a/roots.html", "The stem": "../notebooks/b/stem.html",
        "The leaves": "../notebooks/c/leaf.html",
    }  # fmt: skip
    assert picture.get("aria-label")
    arcs = [path for path in picture.iter("path") if path.get("class") == "arc"]
    ends = [tuple(map(int, re.findall(r"M300 (\d+)C.* 304 (\d+)$", arc.get("d"))[0]))
            for arc in arcs]  # fmt: skip
    assert ends == [(24, 68), (24, 112), (68, 112)]  # from the one that is used, downwards
    assert arcs[0].get("stroke-width") > arcs[1].get("stroke-width")
    assert "| [The stem](../notebooks/b/stem.ipynb) | The roots | The leaves |" in text


def test_the_table_has_a_row_for_what_is_linked_and_a_line_for_the_rest():
    text = "\n".join(rests.table({**TEXTS, "c/other": "# Other"}, CAPTIONS))
    first, second, third = text.split("### ")[1:]
    title = "Helper, S=0 and λ <helper>"
    assert f"| {{prf:ref}}`Lemma: {title}` |  | {{prf:ref}}`Second <second>`; *[Stem](" in first
    assert "| {prf:ref}`Theorem: Third <third>` |  | {prf:ref}`Second <second>`; *[Leaf](" in second
    assert f"`First <first>`; {{prf:ref}}`{title}`; {{prf:ref}}`Third <third>` |  |" in second
    assert "{prf:ref}" not in third and "Named by no other" not in text
    alone = "# Page\n\n:::{prf:lemma} Idle\n:label: idle\n:::\n"
    assert "page: {prf:ref}`Idle <idle>`." in "\n".join(rests.table({"d/p": alone}, {"d": "D"}))


@pytest.mark.parametrize(
    ("name", "rests_on"),
    [
        ("hier-thm-merges", "hier-thm-sharp"),
        ("hier-thm-2", "hier-thm-sharp"),
        ("part-thm-main", "part-lem-c2"),
        ("part-cor-rates", "part-thm-main"),
    ],
)
def test_what_the_proofs_of_the_book_use_is_seen(name, rests_on):
    assert rests_on in rests.read(rests.book(pages.ROOT)[0]).uses[name]


def test_no_statement_of_the_book_rests_on_itself_by_way_of_others():
    found = rests.read(rests.book(pages.ROOT)[0])
    below = {name: set(uses) for name, uses in found.uses.items()}
    for _ in below:
        below = {name: uses.union(*(below[other] for other in uses))
                 for name, uses in below.items()}  # fmt: skip
    assert [name for name, uses in below.items() if name in uses] == []


def test_a_summary_is_no_use_of_what_it_names(tmp_path):
    cell = {"cell_type": "markdown", "source": ["(here)=\n", "# A page on {ref}`x`\n"]}
    (tmp_path / "notebooks" / "01_a").mkdir(parents=True)
    for page in ("1_derive", "2_summary"):
        text = json.dumps({"cells": [cell, {"cell_type": "code", "source": ["1"]}]})
        (tmp_path / "notebooks" / "01_a" / f"{page}.ipynb").write_text(text)
    toc = "parts:\n- caption: Ours\n  numbered: true\n  chapters:\n"
    toc += "".join(f"  - file: notebooks/01_a/{page}\n" for page in ("1_derive", "2_summary"))
    toc += "- caption: Not numbered\n  chapters:\n  - file: book/other\n"
    (tmp_path / "_toc.yml").write_text(toc)
    texts = {"01_a/1_derive": "(here)=\n# A page on {ref}`x`\n", "01_a/2_summary": "(here)="}
    assert rests.book(tmp_path) == (texts, {"01_a": "Ours"})
