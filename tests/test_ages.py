"""Which came first, the rule or the look: small histories made for it, and the book's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import ages, claims

if shutil.which("git") is None:
    pytest.skip("there is no git", allow_module_level=True)

RULE = """[[claim]]
id = "TOY-C1"
kind = "measured"
statement = "A wins."
smallest = { loss = 0.1 }
[[claim.check]]
asks = "better"
experiment = "fig1"
measure = "gap"
what = "A minus B"
with = { a = "A", b = "B", metric = "loss" }
"""
CONTROL = """[[claim.check]]
asks = "better"
experiment = "fig2"
measure = "other"
what = "the same on another set"
essential = false
with = { a = "A", b = "B", metric = "accuracy" }
"""
SECOND = RULE.replace("C1", "C2").replace("fig1", "fig2")
EXPERIMENTS = """[profiles.smoke]
[profiles.quick]
seeds = 5
[fig1]
where = "Figure 1"
title = "A and B"
[fig2]
where = "Figure 2"
title = "A and B again"
[rates]
where = "Figure 1"
title = "Rates"
tunes = "lr"
"""
MEASURES = """
FINAL = 0.1
class Measured:
    low: list
def _exactly(values, text=""):
    return Measured(values * 2, values, text)
def gap(record):
    return _exactly(late(record))
def late(record):
    return Rows(record).last() * FINAL
class Rows:
    def last(self):
        return self[-1]
    def words(self):
        return "rows"
def other(record):
    return record[0]
"""


class Checkout:
    """A repository with a paper ``toy``, whose commits have the times that a test gives."""

    def __init__(self, top: Path) -> None:
        self.top, self.home = top, top / "data" / "papers" / "toy"
        self.source = top / "measures.py"
        top.mkdir()
        self.git("init", "-q", "-b", "main")
        self.put(self.home / "experiments.toml", EXPERIMENTS)

    def git(self, *command: str, at: str = "00:00") -> None:
        day = f"2026-01-01T{at}:00+00:00"
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(
            ["git", *who, *command], cwd=self.top, check=True, capture_output=True,
            env=os.environ | {"GIT_AUTHOR_DATE": day, "GIT_COMMITTER_DATE": day},
        )  # fmt: skip

    def put(self, page: Path, words: str) -> None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(words, "utf-8")

    def commit(self, at: str, rule: str = "", source: str = "", record: dict | None = None) -> None:
        """Commit the files that are given; a record ends at the minute of its manifest."""
        if rule:
            self.put(self.home / "claims.toml", rule)
        if source:
            self.put(self.source, source)
        if record:
            name = f"{record['experiment']}.{record['profile']}.json"
            self.put(self.home / "results" / name, json.dumps(record))
        self.git("add", "-A", at=at)
        self.git("commit", "-q", "--allow-empty", "-m", "a step", at=at)

    def told(self) -> dict:
        return ages.history({"toy": self.home}, [self.source])

    def age(self, monkeypatch, *manifests: dict, told: dict | None = None) -> dict:
        """Return the age of the present first rule, judged by some records."""
        known = self.told() if told is None else told
        monkeypatch.setattr(ages, "_stored", lambda: known)
        monkeypatch.setattr(ages, "SOURCE", self.source)
        claim = ages._claims(ages._page(self.home))["TOY-C1"]
        return ages.of("toy", claim, [SimpleNamespace(manifest=m) for m in manifests])


NOTHING = {"claims": {}, "looks": {}, "measures": {}}


def record(end: str, minutes: float = 30, experiment: str = "fig1", profile: str = "quick", **more):
    """Return the manifest of a record that was done at a time of the day."""
    held = dict(paper="toy", experiment=experiment, profile=profile, settings={"lr": 1}, commit="?")
    return held | dict(date=f"2026-01-01T{end}:00+00:00", wall_seconds=60 * minutes) | more


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path / "book")
    made.commit("08:00", source=MEASURES)
    return made


@pytest.fixture
def book(checkout, monkeypatch):
    """Return a checkout whose papers are the book's own."""
    checkout.commit("09:00", RULE + SECOND)
    monkeypatch.setattr(paths, "data_folder", lambda: checkout.top / "data")
    return checkout


# --- the text and the first look ------------------------------------------------------------------


def test_a_rule_is_older_when_it_was_committed_before_the_run_began(checkout, monkeypatch):
    made = record("11:00")
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    age = checkout.age(monkeypatch, made)
    assert age["text"] == "older" and age["code"] == "same"
    assert age["since"][:16] == "2026-01-01T10:00" and age["first_look"][:16] == "2026-01-01T10:30"
    words = "older than the first look (since 2026-01-01 10:00; first look 2026-01-01 10:30)"
    assert words in ages.age_in_words(age)


@pytest.mark.parametrize("end", ["09:00", "10:20"], ids=["before", "while it ran"])
def test_a_rule_is_younger_when_the_run_had_begun(end, checkout, monkeypatch):
    made = record(end)
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    assert checkout.age(monkeypatch, made)["text"] == "younger"


def test_an_edited_rule_is_younger_and_keeps_the_date_of_its_other_form(checkout, monkeypatch):
    made = record("11:00")
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    checkout.commit("13:00", RULE.replace("0.1", "0.05"))
    age = checkout.age(monkeypatch, made)
    assert (age["text"], age["since"][11:16], age["first"][11:16]) == ("younger", "13:00", "10:00")
    assert "another form since 2026-01-01 10:00" in ages.age_in_words(age)
    checkout.commit("14:00", RULE)
    assert checkout.age(monkeypatch, made)["since"][11:16] == "14:00", (
        "it has not been this all along"
    )


@pytest.mark.parametrize(
    "same",
    [
        RULE + CONTROL,
        RULE.replace("loss = 0.1", "loss = 0.1, accuracy = 0.2") + CONTROL,
        RULE.replace("A minus B", "another word").replace("A wins", "A does win"),
        RULE.replace("[[claim.check]]", 'note = "n"\ndata = "digits"\n[[claim.check]]'),
        RULE + 'reading = "the first"\nessential = true\n',
    ],
    ids=["control", "its own smallest difference", "prose", "new keys", "keys of a check"],
)  # fmt: skip
def test_what_decides_nothing_makes_no_rule_younger(same, checkout, monkeypatch):
    made = record("11:00")
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    checkout.commit("13:00", same)
    assert checkout.age(monkeypatch, made)["text"] == "older"


CHECKS = RULE + RULE[RULE.index("[[claim.check]]") :].replace('"A"', '"C"')


@pytest.mark.parametrize(
    "other",
    [
        RULE.replace("measured", "proved"),
        RULE.replace("better", "same"),
        RULE.replace("gap", "other"),
        RULE.replace('"B"', '"C"'),
        RULE.replace("fig1", "fig2"),
        RULE + "floor = 2\n",
        RULE + "essential = false\n",
        CHECKS,
    ],
)
def test_what_decides_makes_another_rule(other):
    texts = {ages.text(ages._claims(page)["TOY-C1"]) for page in (RULE, other)}
    assert len(texts) == 2


def test_neither_the_order_of_checks_nor_the_kind_of_a_number_is_a_change():
    turned = RULE[: RULE.index("[[claim.check]]")] + "".join(
        f"[[claim.check]]{part}" for part in CHECKS.split("[[claim.check]]")[:0:-1]
    )
    one, other = (ages._claims(page)["TOY-C1"] for page in (CHECKS, turned))
    assert one["check"] == other["check"][::-1] != other["check"]
    assert ages.text(one) == ages.text(other)
    whole, point = (ages._claims(RULE.replace("0.1", x))["TOY-C1"] for x in ("2", "2.0"))
    assert ages.text(whole) == ages.text(point)


def test_a_rule_that_was_merged_is_as_old_as_on_its_branch(checkout, monkeypatch):
    made = record("11:30")
    checkout.commit("09:00", SECOND)
    checkout.git("checkout", "-q", "-b", "rule")
    checkout.commit("10:00", RULE + SECOND)
    checkout.git("checkout", "-q", "main")
    checkout.commit("10:30", SECOND + "# a remark\n")
    checkout.git("merge", "-q", "-X", "theirs", "--no-edit", "rule", at="12:00")
    checkout.commit("12:30", record=made)
    age = checkout.age(monkeypatch, made)
    assert (age["text"], age["since"][11:16]) == ("older", "10:00")


def test_a_file_that_moved_is_followed(checkout, monkeypatch):
    elsewhere, made = checkout.top / "claims" / "toy.toml", record("11:00")
    checkout.put(elsewhere, RULE)
    checkout.commit("10:00")
    elsewhere.rename(checkout.home / "claims.toml")
    checkout.commit("12:00", record=made)
    assert checkout.age(monkeypatch, made)["since"][11:16] == "10:00"


def test_what_a_claim_says_was_seen_is_an_experiment_that_was_looked_at():
    stored = ages._stored()["looks"]
    seen = [f"{paper}/{name}" for paper in paths.papers("claims.toml")
            for claim in claims.claims_of(paper) for name in claim.get("seen", [])]  # fmt: skip
    assert seen and {*seen} <= {*stored}


def test_a_look_at_another_record_with_the_same_runs_makes_the_rule_younger(checkout, monkeypatch):
    checkout.commit("09:00", record=record("08:59", experiment="all"))
    named = RULE.replace("[[claim]]", '[[claim]]\nseen = ["all"]')
    for rule, word in ((RULE, "older"), (named, "younger")):
        checkout.commit("10:00", rule)
        assert checkout.age(monkeypatch, record("11:00"))["text"] == word


def test_the_first_look_is_the_earliest_record_there_ever_was(checkout, monkeypatch):
    """Deleted, made anew with other settings: it was seen. A smoke run or tuning is no look."""
    checkout.commit("08:30", record=record("08:20", profile="smoke"))
    checkout.commit("08:40", record=record("08:35", experiment="rates"))
    checkout.commit("09:00", record=record("08:59", 1, settings={"lr": 2}))
    (checkout.home / "results" / "fig1.quick.json").unlink()
    checkout.commit("10:00", RULE)
    made, again = record("11:00"), record("13:00")
    checkout.commit("12:00", record=made)
    checkout.commit("14:00", record=again)
    age = checkout.age(monkeypatch, again)
    assert (age["text"], age["first_look"][11:16], age["anew"][11:16]) == (
        "younger",
        "08:58",
        "10:30",
    )
    assert (
        "older than the first run with the present settings (2026-01-01 10:30)"
        in ages.age_in_words(age)
    )


# --- the code of the measures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, word",
    [
        (("* FINAL", "* FINAL + 1"), "changed"),
        (("values * 2", "values * 3"), "changed"),
        (("late(record))", "late(record), ratio=True)"), "changed"),
        (("0.1", "0.2"), "changed"),
        (("self[-1]", "self[-2]"), "changed"),
        (("record[0]", "record[1]"), "same"),
        (('"rows"', '"no rows"'), "same"),
        (("    low: list", '    low: list\n    beside: str = ""'), "same"),
        (
            (
                'text=""):\n    return Measured(values * 2, values, text)',
                "**words):\n    return Measured(values * 2, values, **words)",
            ),
            "same",
        ),
        (("late(record))", 'late(record), beside="b")'), "same"),
        (("def late(record):", 'def late(record):\n    """Late."""\n    # later'), "same"),
    ],
    ids=[
        "a helper",
        "what is returned",
        "what kind of value it is",
        "a constant",
        "a method",
        "another measure",
        "another method",
        "a field for words",
        "words passed on",
        "words on a value",
        "words",
    ],
)
def test_whether_the_code_of_the_measures_has_changed(change, word, checkout, monkeypatch):
    made = record("11:00")
    checkout.commit("10:00", RULE)
    young = made | {"rules": rules_of(checkout, monkeypatch)}
    checkout.commit("12:00", source=MEASURES.replace(*change), record=made)
    for m in (made, young):
        assert checkout.age(monkeypatch, m)["code"] == word
    if word == "changed":
        before = checkout.told()
        checkout.commit("13:00", source=MEASURES)
        assert checkout.age(monkeypatch, made)["code"] == "changed", "there and back again"
        assert checkout.age(monkeypatch, young)["code"] == "same", "the very code"
        assert checkout.age(monkeypatch, made, told=before)["code"] == "changed", "after the file"


def test_a_measure_that_moved_to_another_module_is_as_old_as_there(checkout, monkeypatch):
    old, made = checkout.top / "claims.py", record("11:00")
    checkout.commit("09:00", RULE)
    checkout.put(old, "VERDICT = 1\n" + MEASURES)
    checkout.source.unlink()
    checkout.commit("10:00")
    checkout.put(old, "VERDICT = 2\n")
    checkout.commit("12:00", source=MEASURES, record=made)
    told = ages.history({"toy": checkout.home}, [old, checkout.source])
    assert told["measures"]["gap"]["since"][11:16] == "08:00"
    assert checkout.age(monkeypatch, made, told=told)["code"] == "same"


def rules_of(checkout, monkeypatch) -> dict:
    """Return what a record made now would keep."""
    monkeypatch.setattr(ages, "SOURCE", checkout.source)
    monkeypatch.setattr(paths, "paper_folder", lambda paper: checkout.home)
    return ages.rules("toy", "fig1")


# --- without a history ----------------------------------------------------------------------------


def test_without_a_history_nothing_is_known(checkout, tmp_path, monkeypatch):
    made = record("11:00", rules={"TOY-C1": "one hash of both"})
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    age = checkout.age(monkeypatch, made, told=NOTHING)
    assert (age["text"], age["code"]) == ("not known", "not known")
    assert ages.age_in_words(age).count("not known") == 2
    shallow = tmp_path / "shallow"
    checkout.git("clone", "-q", "--depth", "1", f"file://{checkout.top}", str(shallow))
    assert (
        ages.history({"toy": shallow / "data" / "papers" / "toy"}, [shallow / "measures.py"])
        is None
    )
    shutil.rmtree(checkout.top / ".git")
    assert checkout.told() is None


def test_a_young_record_tells_by_itself(checkout, monkeypatch):
    checkout.commit("10:00", RULE + SECOND)
    rules = rules_of(checkout, monkeypatch)
    assert set(rules) == {"TOY-C1"}, "the other asks for another experiment"
    made = record("11:00", rules=rules)
    age = checkout.age(monkeypatch, made, told=NOTHING)
    assert (age["text"], age["code"]) == ("older", "same")
    assert "than the first look that is known here" in ages.age_in_words(age)
    seen = made | {"looked": "2026-01-01T09:00:00+00:00"}
    assert checkout.age(monkeypatch, seen, told=NOTHING)["text"] == "younger", (
        "one was there before"
    )
    checkout.put(checkout.home / "claims.toml", RULE.replace("0.1", "0.2"))
    assert checkout.age(monkeypatch, made, told=NOTHING)["text"] == "younger"


def test_a_first_look_before_the_parts_of_a_joined_record_makes_no_rule_older(
    checkout, monkeypatch
):
    checkout.commit("10:00", RULE)
    parts = record("11:00", rules=rules_of(checkout, monkeypatch), joined=["one", "other"])
    early = "2026-01-01T09:00:00+00:00"
    for looked, stood, word in (
        ("2026-01-01T10:30:00+00:00", {"TOY-C1": "2026-01-01T10:30:00+00:00"}, "older"),
        (early, {"TOY-C1": "2026-01-01T10:30:00+00:00"}, "younger"),
        (early, {}, "younger"),  # of a time when parts were not asked
    ):
        made = parts | {"looked": looked, "stood": stood}
        assert checkout.age(monkeypatch, made, told=NOTHING)["text"] == word


def test_a_rule_edited_after_the_file_was_made_is_as_young_as_now(checkout, monkeypatch):
    made = record("11:00")
    checkout.commit("10:00", RULE)
    checkout.commit("12:00", record=made)
    told = checkout.told()
    checkout.put(checkout.home / "claims.toml", RULE.replace("0.1", "0.2"))
    age = checkout.age(monkeypatch, made, told=told)
    assert (age["text"], age["since"]) == (
        "younger",
        "",
    ) and "changed of late" in ages.age_in_words(age)
    checkout.put(checkout.home / "claims.toml", RULE.replace("C1", "C3") + RULE)
    assert checkout.age(monkeypatch, made, told=told)["text"] == "older", "another claim is another"


def test_what_the_history_says_is_written_down_and_read_again(book, monkeypatch):
    book.commit("12:00", record=record("11:00"))
    monkeypatch.setattr(ages, "_stored", ages._stored.__wrapped__)
    assert ages._stored() == NOTHING
    ages.write_ages()
    told = ages._stored()
    assert set(told["claims"]) == {"toy/TOY-C1", "toy/TOY-C2"} and set(told["looks"]) == {
        "toy/fig1"
    }
    shutil.rmtree(book.top / ".git")
    with pytest.raises(SystemExit, match="no history"):
        ages.write_ages()
    assert ages._stored() == told


# --- first the rule, then the run -----------------------------------------------------------------


def test_a_run_waits_until_its_rules_are_committed(book):
    page = book.home / "claims.toml"
    ages.committed("toy", "fig1", "quick")
    book.put(page, (RULE + SECOND).replace("A wins", "A wins at last") + CONTROL)
    ages.committed("toy", "fig1", "quick")
    book.put(page, RULE + SECOND.replace("0.1", "0.2"))
    ages.committed("toy", "fig1", "quick")  # a rule on another experiment
    with pytest.raises(FedlibError, match=r"^fig2 .* not committed .*: TOY-C2\. .*claims\.toml"):
        ages.committed("toy", "fig2", "quick")
    ages.committed("toy", "fig2", "smoke")
    ages.committed("toy", "rates", "quick")
    book.commit("10:00")
    ages.committed("toy", "fig2", "quick")
    book.put(page, RULE + SECOND + RULE.replace("C1", "C3"))
    with pytest.raises(FedlibError, match=r": TOY-C3\."):
        ages.committed("toy", "fig1", "quick")


def test_nobody_waits_outside_a_checkout(book, monkeypatch, tmp_path):
    book.put(book.home / "claims.toml", RULE.replace("0.1", "0.2"))
    with pytest.raises(FedlibError):
        ages.committed("toy", "fig1", "quick")
    with monkeypatch.context() as patch:
        patch.setattr(paths, "data_folder", lambda: tmp_path / "library")
        patch.setenv("FEDLIB_PAPERS", str(book.home.parent))
        ages.committed("toy", "fig1", "quick")  # a paper of the reader's own
    book.git("rm", "-rq", "--cached", "data")
    ages.committed("toy", "fig1", "quick")  # a library in somebody's project
    shutil.rmtree(book.top / ".git")
    ages.committed("toy", "fig1", "quick")


# --- the book's own -------------------------------------------------------------------------------


def test_the_stored_ages_are_what_the_history_says():
    found = ages.history(ages.papers_of_the_book())
    if found is None:
        pytest.skip("there is no history here, or a part of one")
    stored = ages._stored()
    for part in found:
        assert stored[part] == found[part], "then: make ages"


def test_a_check_may_stand_for_several():
    several = {"what": "{d[t]}, {m}", "with": {"a": "VFB-{m}"}, "bounds": [0, 1]}
    several["each"] = {"d": [{"t": "A"}, {"t": "B"}], "m": ["p", "q"]}
    alone = {"what": "in {braces}"}
    claim = ages.spelled_out({"id": "X", "check": [several, alone]})
    assert [check["what"] for check in claim["check"]] == [
        "A, p", "A, q", "B, p", "B, q", "in {braces}"
    ]  # fmt: skip
    assert claim["check"][1]["with"] == {"a": "VFB-q"} and "each" not in claim["check"][1]
    longhand = {"id": "X", "check": claim["check"]}
    assert ages.text(claim) == ages.text(longhand), "the same rule, written out or not"
