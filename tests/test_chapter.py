"""What the reproduce notebooks share: parameters, records or what stands in for them, verdicts."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, claims, duration, records
from fedlib.lab.show import chapter
from fedlib.lab.show.chapter import Chapter

PAPER = "participation"
GIVEN = dict(profile="replay", experiments_to_run="all", seeds=None, device="auto", out=None)


@pytest.fixture(autouse=True)
def looks():
    """Put matplotlib back as it was, and leave no figure behind."""
    with mpl.rc_context():
        yield
    plt.close("all")


def test_begin_reads_the_parameters():
    page = chapter.begin(PAPER, {"np": 0, "known": {}, "_i1": "", **GIVEN}, {"np"})
    assert page == Chapter(PAPER) and page.where is None
    page = chapter.begin(PAPER, {**GIVEN, "profile": "smoke", "experiments_to_run": "figB1"}, set())
    assert (page.experiments_to_run, page.where) == (["figB1"], "runs")


def test_begin_refuses_what_does_not_exist():
    with pytest.raises(FedlibError, match=r"'profle'\. Did you mean 'profile'"):
        chapter.begin(PAPER, {**GIVEN, "profle": "quick"}, set())
    with pytest.raises(FedlibError, match="Unknown claim 'C99'"):
        Chapter(PAPER).verdict("C99")
    with pytest.raises(FedlibError, match=r"'fig7'\. Did you mean 'fig"):
        chapter.begin(PAPER, {**GIVEN, "experiments_to_run": ["fig7"]}, set())


@pytest.mark.parametrize(
    "given",
    [{"profile": "fast"}, {"profile": None}, {"device": "tpu"}, {"experiments_to_run": 3},
     {"experiments_to_run": None}, {"experiments_to_run": ""}],
)  # fmt: skip
def test_begin_refuses_values_that_do_not_exist(given):
    with pytest.raises(FedlibError, match="Unknown"):
        chapter.begin(PAPER, {**GIVEN, **given}, set())


def test_replay_reads_the_folder_that_is_named(tmp_path):
    assert chapter.begin(PAPER, {**GIVEN, "out": tmp_path}, set()).frame("figB1") is None
    held = records.load(PAPER, "figB1")
    records.save(tmp_path, held.frame.iloc[:1], held.manifest)
    assert len(Chapter(PAPER, out=tmp_path).frame("figB1")) == 1


def test_parameters_of_any_notebook():
    chapter.check_parameters(["profile", "known", "_x"], ["profile", "seeds"])
    with pytest.raises(FedlibError, match=r"'profle'\. Did you mean 'profile'"):
        chapter.check_parameters(["profle"], ["profile", "seeds"])


def test_show_draws_a_record_and_says_where_it_comes_from(capsys):
    drawn = []
    Chapter(PAPER).show("figB1", drawn.append)
    record = records.load(PAPER, "figB1")
    assert drawn[0].equals(record.frame)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == record.provenance() and max(map(len, lines)) <= 88


def test_a_missing_record_is_told_with_a_command_that_works(capsys, tmp_path):
    page = Chapter(PAPER, out=tmp_path)
    page.show("fig1-cifar", pytest.fail)
    told = plt.gcf().axes[0].texts[0].get_text()
    assert told == (
        f"There is no stored record of participation fig1-cifar in {tmp_path}. To make one:\n"
        f"  fedlib run participation fig1-cifar --profile quick --out {tmp_path}"
    )
    assert capsys.readouterr().out == "\n"
    assert page.frame("fig1-cifar") is None
    page.table("fig1-cifar", pytest.fail)
    assert capsys.readouterr().out == (told + "\n") * 2


def test_every_command_names_a_profile_of_its_experiment():
    for paper in catalogue.papers():
        for name in catalogue.experiment_names(paper):
            for profile in (None, *catalogue.PROFILES):
                words = catalogue.command(paper, name, profile=profile).split()
                assert words[4] == "--profile" and words[5] in catalogue.profiles(paper, name)


def test_a_profile_that_an_experiment_lacks_leaves_a_note_and_no_error(capsys, monkeypatch):
    page = Chapter(PAPER, "quick")
    monkeypatch.setattr(catalogue, "profiles", lambda *names: ("smoke", "paper"))
    assert page.frame("fig1-cifar") is None
    assert "does not run at the profile 'quick'" in capsys.readouterr().out


def test_an_experiment_that_is_not_to_be_run_counts_as_missing(capsys):
    assert Chapter(PAPER, experiments_to_run=["figB1"]).frame("figB2") is None
    assert capsys.readouterr().out == "'figB2' is not among experiments_to_run.\n"


def test_an_experiment_runs_once_and_its_rows_stay_as_they_are(tmp_path, monkeypatch):
    runs = []
    run = chapter.experiments.run
    monkeypatch.setattr(
        chapter.experiments, "run", lambda *args, **kw: runs.append(args) or run(*args, **kw)
    )
    page = Chapter(PAPER, "smoke", seeds=1, out=tmp_path)
    first = page.frame("figB1")
    first["value"] = 0
    assert page.frame("figB1")["value"].any()
    assert len(runs) == 1 and (tmp_path / PAPER / "figB1.smoke.csv.gz").is_file()


def test_a_table_is_printed_from_the_rows(capsys):
    page = Chapter(PAPER)
    page.table("figB1", lambda frame: frame.head(2)[["run"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "figB1:" and lines[1].strip() == "run" and len(lines) == 4


def test_verdicts_and_claims(capsys, verdicts):
    page = Chapter(PAPER)
    table = page.verdict("GFA-C6", "GFA-C7").data
    judged = {row["id"]: row for row in verdicts[PAPER]}
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88  # a page joins them again
    assert " ".join(lines) == " ".join(
        f"{name}: {judged[name]['finding'].upper()}. {judged[name]['tally'].capitalize()}. "
        f"{at}{judged[name]['note']}"
        for name, at in (("GFA-C6", "At the paper's own scale. "), ("GFA-C7", ""))
    )
    found = [check for name in ("GFA-C6", "GFA-C7") for check in claims.checks(PAPER, name)]
    told = [check.quantity + " (control)" * (not check.essential) for check in found]
    assert list(table["quantity"]) == told
    assert any(words.endswith(" (control)") for words in page.verdict("GFA-C3").data["quantity"])
    once = [words.count("control") for words in page.verdict("GFA-C4").data["quantity"]]
    assert set(once) == {0, 1}, "what says that it is a control is not said to be one again"
    shown = page.claims().data
    assert list(shown["finding"]) == [*map(claims.finding_in_words, judged.values())]
    at = dict(zip(shown["id"], shown["measured"], strict=True))
    assert Chapter("beyond").verdict("AMP-C1").data.empty, "what is proved has no checks"
    assert at["GFA-C7"] == "" and at["GFA-C1"].startswith("Not at the paper's scale (")


def test_a_verdict_says_why_a_check_is_open(monkeypatch):
    sure = claims.Check("one", "above 0", "0.2", "holds")
    open_ = claims.Check("two", "above 0", "0", "open", why="about 12 seeds would decide")
    row = dict(id="C1", finding="open", tally="", note="", scale=[], data="", readings={})
    row |= dict(checks=[vars(sure), vars(open_)], own={})
    monkeypatch.setattr(claims, "judge", lambda *_: [row])
    shown = list(Chapter(PAPER).verdict("C1").data["outcome"])
    assert shown == ["holds", "open (about 12 seeds would decide)"]


def test_commands(capsys):
    Chapter(PAPER).commands()
    lines = capsys.readouterr().out.splitlines()
    command, _, took = lines[0].partition("  # ")
    assert command.rstrip() == "fedlib run participation rates --profile quick --out data/papers"
    assert took == duration.took_in_words(PAPER, "rates", "quick")
    assert [line.split()[3] for line in lines] == catalogue.experiment_names(PAPER)


def test_the_seeds_of_a_notebook_are_those_that_run(tmp_path):
    page = Chapter(PAPER, "smoke", seeds=[7], out=tmp_path)
    assert page.record("figB1").manifest["seeds"] == [7]


def test_what_a_page_says_holds_at_its_own_values_only(capsys):
    at_the_page = chapter.AsPrinted({"N": 20, "seeds": (1, 2)}, N=20, seeds=(1, 2))
    with pytest.raises(AssertionError), at_the_page:
        assert 1 > 2
    elsewhere = chapter.AsPrinted({"N": 7, "seeds": (1, 3), "lr": 1}, N=20, seeds=(1, 2), lr=1)
    with elsewhere:
        assert 1 > 2
    assert capsys.readouterr().out == "differs from the page, since you changed N and seeds\n"
    with pytest.raises(NameError), elsewhere:  # a mistake stays one
        raise NameError
