"""A page to attach to a ticket: it tells the whole story, and nothing in it can act."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.collector.lookback import troubled_run
from tests.collector.rows import RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.served import Served
from tests.support.story import story, through_a_folder
from trainvitals.document.incident import verdict_facts
from trainvitals.policy.actions import rule_words
from trainvitals.printable import escape_markdown
from trainvitals.records import Note, RunEnded, RunInfo, RunStarted
from trainvitals.views import IncidentsQuestion
from vitals_collector.queries.open import open_folder

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\n&amp;\"' | [x](javascript:1) @all " + "x" * 300


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.html = path.read_text()
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def classes(self) -> set[str]:
        return {
            word for name, value in self.attributes if name == "class" for word in value.split()
        }


def check_it_can_do_nothing(page: Page) -> None:
    """No script, no handler, nothing loaded, nothing that would be loaded by its style."""
    allowed = {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "div"),
        *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "b", "pre"),
        *("svg", "g", "rect", "path", "line", "text", "details", "summary"),
    }
    assert set() == set(page.tags) - allowed
    names = {name for name, _ in page.attributes}
    assert set() == {name for name in names if name.startswith("on")} | names & {"href", "src"}
    assert None is re.search(r"url\(|@import|https?://", page.html)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run of the story."""
    with through_a_folder(story(), tmp_path):
        return tmp_path / "runs"


def test_a_page_tells_the_whole_story_and_can_do_nothing(runs: Path, tmp_path: Path):
    file = tmp_path / "incident.html"
    assert 0 == vitals("postmortem", runs, "--html", file)
    page = Page(file)
    check_it_can_do_nothing(page)
    assert page.html.startswith("<!doctype html>")
    assert "Post-mortem of tiny" in page.text
    assert "the loss of step 40 is nan" in page.text
    for words in (
        "Incidents",
        "All actions",
        "Timeline",
        "Checkpoints",
        "c60",
        "Lost work",
    ):
        assert words in page.text, words
    assert {"nan", "line", "left", "skip_step", "rollback", "incident"} <= page.classes()
    assert (
        "loss, logarithmic: 120 steps, 1 of them not finite; 30 discarded by rollbacks" in page.text
    )
    assert "prefers-color-scheme: dark" in page.html
    assert "@media print" in page.html


def test_a_collector_tells_it_as_a_folder_does(served: Served, runs: Path, tmp_path: Path):
    with served.client("ingest") as client:
        for raws in story().values():
            for raw in raws:
                client.ingest(raw)
    tokens = served.settings.data / "tokens.json"
    files = tmp_path / "http.md", tmp_path / "folder.md"
    where = ("--collector", served.url, "--token-file", tokens)
    assert 0 == vitals("postmortem", "tiny", *where, "--md", files[0])
    assert 0 == vitals("postmortem", runs, "--md", files[1])

    def decided(file: Path) -> str:
        return file.read_text().partition("## All actions")[2].partition("## Timeline")[0]

    assert "skip_step" in decided(files[0])
    assert decided(files[0]) == decided(files[1])


def test_the_maps_of_an_incident_have_the_numbers_that_were_rolled_back(
    served: Served, tmp_path: Path
):
    troubled_run(served.store)
    tokens = served.settings.data / "tokens.json"
    where = ("--collector", served.url, "--token-file", tokens)
    html, md = tmp_path / "x.html", tmp_path / "x.md"
    chosen = ("--incident", "1-158-nonfinite_loss", "--html", html, "--md", md)
    assert 0 == vitals("postmortem", RUN, *where, *chosen)
    told = md.read_text()
    of_loss = told.partition("| Loss of each rank |")[2].partition("| Step time")[0]
    assert ["no", "yes"] == re.findall(r"^\| rank:\d .*\| (\w+) \|$", of_loss, re.M)
    assert " | 500 | 158 | yes |" in told.partition("| Gradient norm of each layer |")[2]
    some = "teps 120 to 161 include rollbacks: a cell shows the worst of all attempts"
    assert 3 == told.count(f"S{some}.") == Page(html).text.count(f"; s{some}")


def test_every_output_has_every_fact_of_the_verdict(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = tmp_path / "x.html", tmp_path / "x.md"
    assert 0 == vitals("postmortem", runs, "--html", files[0], "--md", files[1])
    assert 0 == vitals("show", runs)
    shown, html, md = capsys.readouterr().out, Page(files[0]).text, files[1].read_text()
    with open_folder(runs) as opened:
        (incident,) = opened.reader.ask(IncidentsQuestion(run_id=RUN))
    facts = verdict_facts(incident.verdict).pairs
    assert len(facts) > 5
    first, second = incident.verdict.commands
    assert f"<pre>{first}\n{second}</pre>" in files[0].read_text()
    for name, text in facts:
        assert f"{name} {text}" in html
        assert f"- **{name}**: {escape_markdown(text)}" in md
        assert text in shown


def test_json_has_the_facts_of_the_report(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("postmortem", runs, "--format", "json")
    facts = json.loads(capsys.readouterr().out)
    assert RUN == facts["detail"]["summary"]["run_id"]
    assert {"skip_step", "rollback"} <= {one["decision"]["action"] for one in facts["decisions"]}


def test_markdown_goes_to_stdout_with_its_curves(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("postmortem", runs)
    said = capsys.readouterr().out
    assert said.startswith("# Post-mortem of tiny\n")
    assert "not finite |" in said
    because = rule_words("nonfinite")
    assert f"| 40 | skip_step | {because} | 1 | yes | the loss of step 40 is nan |" in said


def test_a_terminal_shows_words_as_they_are_without_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    writer = Writer()
    name = "lr=3e-4 & *warm* [2] <b> ~1 $x$ _a_ a|b @all"
    leave(
        tmp_path / "runs",
        writer.events(RunStarted(info=RunInfo(name=name, user="\x1b[31m"))),
        writer.steps(range(3), loss=1.0),
    )
    assert 0 == vitals("postmortem", tmp_path / "runs")
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert 0 == vitals("postmortem", tmp_path / "runs")
    shown = capsys.readouterr().out
    assert shown.startswith(f"# Post-mortem of {name}\n")
    assert name not in piped
    assert "\\" not in shown
    assert "&amp;" not in shown
    assert all(c.isprintable() or c == "\n" for c in shown), "no terminal code of a stranger's"


def test_one_incident_alone_can_be_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == vitals("postmortem", runs)
    ids = re.findall(r"^Incident (\S+)\. Severity: ", capsys.readouterr().out, re.M)
    assert 1 == len(ids)
    assert 0 == vitals("postmortem", runs, "--incident", ids[0])
    assert f"Incident {ids[0]}. Severity: " in capsys.readouterr().out
    assert 2 == vitals("postmortem", runs, "--incident", "nope")
    said = capsys.readouterr().err
    assert "there is no incident 'nope'" in said
    assert ids[0] in said


def test_a_hostile_name_stays_text_everywhere(tmp_path: Path):
    writer = Writer()
    info = RunInfo(name=HOSTILE, user=HOSTILE, tags=(HOSTILE,), config={HOSTILE: HOSTILE})
    leave(
        tmp_path / "runs",
        writer.events(RunStarted(info=info), Note(code="N1", text=HOSTILE)),
        writer.steps(range(3), loss=1.0),
        writer.events(RunEnded(state="failed", reason=HOSTILE)),
    )
    html, md = tmp_path / "x.html", tmp_path / "x.md"
    assert 0 == vitals("postmortem", tmp_path / "runs", "--html", html, "--md", md)
    page = Page(html)
    check_it_can_do_nothing(page)
    assert "<script>alert(1)</script> [31m &amp;\"' | [x](javascript:1) @all xxx" in page.text
    for text in (page.html, md.read_text()):
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "<script" not in md.read_text()
    assert "@all" not in md.read_text()
    assert "](" not in md.read_text().replace("\\](", "")


@pytest.mark.parametrize("num", [0, 30], ids=["empty", "quiet"])
def test_a_run_without_an_incident_has_a_report_too(num: int, tmp_path: Path):
    writer = Writer()
    parts = [writer.events(RunStarted(info=RunInfo(name="calm")))]
    parts += [writer.steps(range(num), loss=1.0)] if num else []
    leave(tmp_path / "runs", *parts)
    file = tmp_path / "x.html"
    assert 0 == vitals("postmortem", tmp_path / "runs", "--html", file)
    page = Page(file)
    assert "No incidents." in page.text
    assert "Vitals took no action." in page.text
    assert ("svg" in page.tags) == (num > 0)


def test_a_file_that_is_there_stays_unless_it_is_forced(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "x.html"
    file.write_text("precious")
    assert 2 == vitals("postmortem", runs, "--html", file)
    assert "overwrite it with --force" in capsys.readouterr().err
    assert "precious" == file.read_text()
    assert 0 == vitals("postmortem", runs, "--html", file, "--force")
    assert RUN in file.read_text()
    assert 1 == vitals("postmortem", runs, "--html", tmp_path / "no" / "x.html")
    assert "cannot be written" in capsys.readouterr().err
    assert 2 == vitals("postmortem", runs, "--html", file, "--md", file)
    assert "give two different files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("- x", "\\- x"),
        ("1. a", "1\\. a"),
        ("    code", "code"),
        ("snake_case _em_", "snake_case \\_em\\_"),
        ("*a* `b` a|b $x$ ~c~", "\\*a\\* \\`b\\` a\\|b \\$x\\$ \\~c\\~"),
        ("[x](http://y) <b> & @all", "\\[x\\](http://y) &lt;b> &amp; &#64;all"),
    ],
    ids=["list", "number", "indent", "emphasis", "marks", "link"],
)
def test_text_stays_text_in_markdown(text: str, written: str):
    assert written == escape_markdown(text)
