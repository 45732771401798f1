"""The page that puts the papers side by side says what the records say."""

import re
import tomllib

import build
import pytest

PAGE = (build.ROOT / "book" / "what_we_learned.md").read_text("utf-8")
REF = re.compile(r"\{ref\}`([A-Z0-9]+-[\w-]+)`")
SAID = {  # what the page says of a claim as a whole, outside its computed lists
    "proved": "GFA-C7 GFA-C8 HFL-C15 TDCD-C13",
    "confirmed": "AMP-C2 AMP-C5 PERM-C1-control PERM-C8 TDCD-C2-control VFB2-C10",
    "confirmed in direction": "AMP-C6 GFA-C1-control GFA-C2-control",
    "open in part": "PERM-C2 VFB2-C3",
    "contradicted": "AMP-C4 AMP-C9 PERM-C5",
    "depends on the reading": "HFL-C2 HFL-C5 PERM-C6",
}
FOUND = {claim: finding for finding, ids in SAID.items() for claim in ids.split()}
CHECKED = [  # what it says of some of a claim's checks, by words that they contain
    ("GFA-C1", "training loss: amplified ends lower than wait-minibatch", "smaller"),
    ("GFA-C1", "test accuracy: amplified ends higher than wait-minibatch", "level"),
    ("GFA-C1", "CIFAR-10 at the paper's rates: amplified ends", "holds"),
    ("GFA-C1-control", "the paper's network at the paper's rates", "open"),
    ("GFA-C2-control", "at equal γη = 1e-2: η = 10 every cycle", "reversed"),
    ("GFA-C4", "rate 1e-4 runs smoother than", "holds"),
    ("HFL-C2", "split between the groups: large alone over small", "open"),
    ("HFL-C5", "at the end, split between the groups: S=5, near over", "reversed"),
    ("HFL-C5", "at the end, split between the groups and minibatches of two", "reversed"),
    ("HFL-C5", "at the end, split over the clients and minibatches of ten", "open"),
    ("HFL-C5", "at the end, split over the clients and minibatches of two", "open"),
    ("PERM-C3", "test accuracy at the end: PERM over perFedAvg", "holds"),
    ("PERM-C3", "test accuracy at the end: PERM over pFedMe", "level"),
    ("PERM-C3", "test loss at the end: PERM below perFedAvg", "holds"),
    ("PERM-C3", "test loss at the end: PERM below pFedMe", "holds"),
    ("TDCD-C11", "training loss: N = 4 ends lower than N = 16", "reversed"),
    ("TDCD-C11", "training loss, one rate: N = 4 ends lower than N = 16", "smaller"),
    ("TDCD-C4-control", "sooner than Q = 1", "holds"),
    ("TDCD-C4-control", "ends below one who always says", "outside"),
    ("TDCD-C6-control", "sooner than Q = 1", "reversed"),
    ("VFB2-C3", "SGD: how many times as fast", "holds"),
    ("VFB2-C3", "SAGA: how many times as fast", "holds"),
    ("VFB2-C3", "robust, SVRG: how many times as fast", "holds"),
    ("VFB2-C3", "year-like, squares, SVRG: how many times as fast to a gap", "holds"),
    ("VFB2-C8", "share of labels that a party without labels reads", "outside"),
]


@pytest.fixture
def judged(verdicts) -> dict[str, dict]:
    return {row["id"]: row for rows in verdicts.values() for row in rows}


def test_the_tables_name_what_the_page_names_and_all_of_it_exists(judged):
    pages = build.ROOT.glob("data/papers/*/errata.toml")
    errata = {e["id"] for page in pages for e in tomllib.loads(page.read_text("utf-8"))["erratum"]}
    named = set(FOUND) | {claim for claim, _, _ in CHECKED}
    assert set(REF.findall(PAGE)) - errata == named <= set(judged)


def test_each_claim_has_the_finding_and_each_check_the_outcome_of_which_the_page_speaks(judged):
    assert {claim: judged[claim]["finding"] for claim in FOUND} == FOUND
    for claim, words, outcome in CHECKED:
        found = {c["outcome"] for c in judged[claim]["checks"] if words in c["quantity"]}
        assert found - {"no record"} == {outcome}, (claim, words)


def test_every_result_leads_to_its_check_and_no_number_is_typed():
    results = re.search(r"## What was proved.*(?=\n## Which ideas)", PAGE, re.S)[0].strip()
    parts = re.split(r"\n+(?=\* )|\n\n+", results)
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        heads = not part.startswith("* ") and after.startswith("* ")  # a line before a list
        assert REF.search(part) or part.startswith("## ") or heads, part
    assert not re.search(r"\d", re.sub(r"\{ref\}`.*?`|\]\(.*?\)", "", PAGE))
