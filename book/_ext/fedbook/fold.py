"""Sections of long pages that open with a click, so that a page can be looked through."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

ENDS = "all-claims what-the-paper-leaves-out where-we-deviate exercises run-it-yourself"
FOLDED = {
    "02_participation/1_derive": "five-tools how-far-clients-drift-from-each-other "
    "choosing-the-rates exercises",
    "02_participation/3_reproduce": "figure-1-on-cifar-10 "
    "figure-d-1-everybody-is-always-there figures-b-1-and-b-2-the-toy "
    f"linear-speed-up {ENDS}",
    "03_hierarchy/1_derive": "two-other-merges exercises",
    "03_hierarchy/2_build": "many-runs-in-one-batch details-that-matter exercises",
    "03_hierarchy/3_reproduce": "the-clocks a-rate-for-each-sync-time other-merges "
    "figure-3-the-groups-settle "
    "the-ends-of-figures-4-and-5 "
    "figure-6-as-good-with-fewer-rounds figure-8-four-groups-of-writers figure-9-how-many-groups "
    "figure-10-who-belongs-to-the-slow-group "
    "figure-11-equal-groups-and-waiting figure-12-a-server-farther-and-farther-away "
    "figure-13-sync-times-that-grow the-lemma-and-the-theorems beyond-the-paper-choose-s "
    f"beyond-the-paper-groups-that-do-not-wait {ENDS}",
    "04_personalization/1_derive": "the-weights-exactly "
    "wrong-weights-move-the-model-lemmas-1-and-2 how-good-is-the-global-model-lemmas-4-to-6 "
    "a-wrong-global-model-moves-the-weights-lemma-3 an-epoch-of-visits exercises",
    "04_personalization/2_build": "mixing-weights-a-level-and-some-water the-minibatch-trap "
    "smaller-models-for-weaker-clients details-that-matter exercises",
    "04_personalization/3_reproduce": "a-rate-for-each-method figure-3-what-a-round-costs "
    "figures-4-and-5-writers figure-6-alike-and-as-different-as-can-be the-theorems-rates "
    f"beyond-the-paper-when-is-it-worth-it beyond-the-paper-how-many-clients {ENDS}",
    "05_tiers/3_reproduce": "what-a-local-step-costs a-rate-for-each-q-and-each-crowd "
    "and-at-the-rate-that-reaches-the-target-first "
    "per-iteration-and-with-more-clients "
    "figure-9-how-many-silos batchnorm-or-groupnorm theorem-1 "
    f"beyond-the-paper-hubs-that-do-not-wait {ENDS}",
    "06_vertical/1_derive": "how-long-is-a-step-lemma-2 saga-without-convexity-theorem-6 "
    "how-far-is-a-late-step-from-a-fresh-one-lemma-3 svrg-without-convexity-theorem-5 exercises",
    "06_vertical/2_build": "run-it-on-your-machines details-that-matter exercises",
    "06_vertical/3_reproduce": "a-rate-for-each-method figure-6-regression-twelve-parties "
    "against-passes-sgd-svrg-saga remark-1-rates remark-2-rates-without-convexity "
    f"{ENDS}",
    "06_vertical/4_attack": "s4-to-s6-what-real-masks-let-through "
    "s7-many-scores-of-the-same-weights s8-all-distances-knowing-no-patient "
    "r5-the-regulariser-that-gives-the-axes-away exercises",
}
"""Ids of sections, by notebook. Headings stay, and a link to a section opens it."""


def chosen(page: str, doctree: nodes.document) -> list[str]:
    """Return the ids of the sections of a page that are folded."""
    if page == "book/corrections":  # a section a day, the newest first: that one stays open
        below = (s for s in doctree.findall(nodes.section) if s.parent.parent is doctree)
        return [day["ids"][0] for day in below][1:]
    if page.startswith("book/scoreboard/"):
        return ["to-make-these-records-again"]
    return FOLDED.get(page.removeprefix("notebooks/"), "").split()


def fold(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put what stands below some headings of a page into a box that opens with a click."""
    there = {place: s for s in doctree.findall(nodes.section) for place in s["ids"]}
    for place in chosen(page, doctree):
        if place not in there:
            logging.getLogger(__name__).warning("no section %s to fold on %s", place, page)
            continue
        opened = '<details class="folded"><summary>Show this section</summary>'
        there[place].insert(1, nodes.raw("", opened, format="html"))
        there[place].append(nodes.raw("", "</details>", format="html"))
