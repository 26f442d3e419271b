"""Ten questions of a post-mortem, each answered in a browser in at most two clicks from the fleet.

Over a real collector that reads a folder: a run of two ranks was halted at night, after the same
NaN came back behind a rollback; another run had it before.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.collector.rows import OTHER_RUN, RUN, SECOND, Writer
from tests.dashboard.folder import open_spool
from tests.support.dashboards import CHART, at, dashboard
from tests.support.examples import one_in
from trainvitals.records import (
    AttemptStarted,
    BatchNoted,
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    RunEnded,
    RunInfo,
    RunStarted,
)

pytestmark = [pytest.mark.browser, pytest.mark.nightly]
BAD, BACK_TO, AGAIN = 540, 378, 541
MAX_CLICKS = 2


class Night:
    """Writes the two runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_decisions = 0
        self._before()
        self._night()

    def _before(self) -> None:
        spool = open_spool(self._folder, OTHER_RUN)
        writer = Writer(run=OTHER_RUN, started=time.time_ns() - 9_000 * SECOND)
        spool.append(writer.events(RunStarted(info=RunInfo(name="elder", project="demo"))))
        spool.append(writer.steps(range(100), loss=2.0))
        spool.append(writer.events(self._decided("skip_step", 50), step=50))
        spool.append(writer.events(RunEnded(state="finished"), step=99))
        spool.close()

    def _night(self) -> None:
        spool = open_spool(self._folder, RUN)
        ranks = [Writer(f"rank:{n}", started=time.time_ns() - 1_000 * SECOND) for n in range(2)]
        for number, writer in enumerate(ranks):
            identity = msgspec.structs.replace(writer.identity, gpu_uuid=f"GPU-{number}")
            writer.identity = identity
        head = ranks[0]
        info = RunInfo(name="night", project="demo", world_size=2, mode="heal")
        spool.append(head.events(RunStarted(info=info)))
        for attempt, steps in ((1, range(BAD + 3)), (2, range(BACK_TO, AGAIN + 3))):
            if attempt == 2:
                forked = AttemptStarted(id=2, parent=1, fork_step=BACK_TO, reason="rollback")
                spool.append(head.events(forked, step=BACK_TO, attempt=2, at=head.time_of(BAD + 3)))
            for writer in ranks:
                writer.started += (attempt - 1) * 200 * SECOND
                loss = [math.nan if step >= BAD + attempt - 1 else 2.0 for step in steps]
                spool.append(
                    writer.steps(
                        steps, attempt=attempt, loss=loss, rank_loss=loss, grad_norm=1.0,
                        step_duration_seconds=7.2, tokens_seen=[1_000 * s for s in steps],
                    )
                )  # fmt: skip
            spool.append(self._trouble(head, attempt, BAD + attempt - 1))
        noted = BatchNoted(
            epoch=0, first_batch=77, num_batches=1, sample_ids=(17, "shard-4/9"), num_samples=2
        )
        spool.append(ranks[1].events(noted, step=BAD))
        halted = RunEnded(state="halted", reason="1 rollback (the limit) did not fix it")
        for writer in ranks:
            spool.append(writer.events(halted, step=AGAIN + 2, attempt=2))
        spool.close()

    def _trouble(self, head: Writer, attempt: int, step: int) -> bytes:
        found = Finding(
            kind="nonfinite", level="actionable", step=step, detector="nonfinite", rank=1,
            reason="loss is nan on rank 1", value=math.nan, cause="nonfinite_loss",
        )  # fmt: skip
        then = (
            self._decided(
                "rollback", step + 1, rollback_to_step=BACK_TO, new_attempt=2, skip_batches=50,
                decided_at_step=step + 2, budget_left=0,
            )
            if attempt == 1
            else self._decided("halt", step + 1, attempt=2, reason="1 rollback did not fix it")
        )  # fmt: skip
        skipped = self._decided("skip_step", step, attempt=attempt)
        return head.events(
            FindingRaised(finding=found), skipped, then, step=step, attempt=attempt,
            at=head.time_of(step),
        )  # fmt: skip

    def _decided(self, action: str, step: int, **how: object) -> DecisionMade:
        self._num_decisions += 1
        known: dict[str, object] = {
            "ledger_seq": self._num_decisions, "action": action, "step": step,
            "decided_at_step": step + 1, "attempt": 1, "reason": "loss is nan on rank 1",
            "rule": "nonfinite", "cause": "nonfinite_loss", "rank": 1, "mode": "heal",
        }  # fmt: skip
        return DecisionMade(decision=Decision(**(known | how)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, tmp = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("tmp")
    Night(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VITALS_GPU_HOUR_PRICE", "2.5")
        with dashboard(folder, tmp) as (_, started):
            yield started


@dataclass
class Visitor:
    """Somebody who was woken: sees the fleet, and clicks."""

    page: Any
    clicks: int = 0

    def open_run(self) -> None:
        """Click into the row of the run: not on the box before it."""
        table = self.page.locator("[data-testid=stDataFrame] canvas").first
        table.wait_for()
        self.page.wait_for_timeout(800)
        box = table.bounding_box()
        self.page.mouse.click(box["x"] + 90, box["y"] + 38 + 17)
        self.clicks += 1
        self.page.wait_for_url(re.compile(r"/run\?"))
        self.page.locator(".st-key-verdict_strip").wait_for()

    def press(self, role: str, label: str) -> None:
        """Click a link or a button."""
        self.page.get_by_role(role, name=label).first.click()
        self.clicks += 1

    def verdict(self) -> str:
        """Return what the fold-out says."""
        self.open_run()
        self.press("button", "Verdict")
        panel = self.page.locator(".st-key-prose_verdict")
        panel.wait_for()
        return str(panel.inner_text())

    def incident(self) -> str:
        """Return what the incident's page says."""
        self.open_run()
        self.press("link", "Evidence")
        self.page.locator(".st-key-incident_summary").wait_for()
        self.page.get_by_text("Batches and samples").wait_for()
        tables = self.page.locator("[data-testid=stDataFrame] canvas").all_text_contents()
        return str(self.page.locator("[data-testid=stMain]").inner_text()) + "\n".join(tables)

    def run(self) -> str:
        """Return what the run's page says."""
        self.open_run()
        command = self.page.locator(".st-key-strip_next code")  # of a component of ours
        return str(self.page.locator("[data-testid=stMain]").inner_text()) + command.inner_text()

    def fleet(self) -> str:
        """Return what the first row says."""
        table = self.page.locator("[data-testid=stDataFrame] canvas").first
        table.get_by_text("night").first.wait_for(state="attached")
        return str(table.text_content())

    def alerts(self) -> str:
        """Return what the inbox says."""
        self.press("link", "Alerts")
        card = self.page.locator("[class*='st-key-alert_group']").first
        card.wait_for()
        return str(card.inner_text())


QUESTIONS: dict[str, tuple[Callable[[Visitor], str], tuple[str, ...]]] = {
    "which run needs somebody, and in which state is it": (Visitor.fleet, ("night", "halted")),
    "what was the cause": (Visitor.run, ("Rank 1's loss was NaN at steps 540 to 541.",)),
    "which rank, and from which step on": (
        Visitor.incident,
        ("Rank 1's loss was NaN", "step 540\nDetected: loss is nan on rank 1"),
    ),
    "what did Vitals do": (
        Visitor.run,
        ("Rolled back to step 378; skipped 50 batches.", "Halted the run at step 543"),
    ),
    "what did it cost": (
        Visitor.verdict,
        (r"166 steps \(166 k tokens, 19 min 55 s x 2 ranks, "
         r"0.66 GPU-hours, 1.66 at 2.5 a GPU-hour\)",
         "50 batches dropped"),
    ),
    "did it happen before": (
        Visitor.verdict,
        ("First time in this run.", "Also in 1 of 1 other runs: elder."),
    ),
    "what is the next command": (Visitor.run, (rf"vitals resume {RUN}",)),
    "which batches and samples fed it": (Visitor.incident, ("17, shard-4/9",)),
    "who was paged, and has anybody taken it": (
        Visitor.alerts,
        ("Page", "TrainingHalted", "Halted|halted"),
    ),
    "is it over": (Visitor.verdict, (r"Halted at step 543. This incident stopped it",)),
}  # fmt: skip


@pytest.mark.parametrize("question", one_in(3, QUESTIONS))
def test_each_question_is_answered_in_two_clicks(question: str, tab: Any, address: str) -> None:
    answer, expected = QUESTIONS[question]
    tab.goto(address)
    visitor = Visitor(tab)
    said = answer(visitor)
    for words in expected:
        assert re.search(words, said), said
    assert visitor.clicks <= MAX_CLICKS


def test_the_summary_of_an_incident_fits_a_laptops_screen(tab: Any, address: str) -> None:
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.goto(address)
    visitor = Visitor(tab)
    visitor.incident()
    box = tab.locator(".st-key-incident_summary").bounding_box()
    assert box["y"] + box["height"] <= 720


def test_the_first_curve_of_a_halted_run_begins_above_the_fold(tab: Any, address: str) -> None:
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.goto(address)
    visitor = Visitor(tab)
    visitor.open_run()
    curve = tab.locator(CHART).first
    curve.wait_for()
    tab.wait_for_timeout(500)
    assert curve.bounding_box()["y"] <= 720 - 120, "enough of it to see how it ended"


@pytest.mark.parametrize(("width", "theme"), one_in(2, [(390, "dark"), (1440, "light")]))
def test_the_verdict_can_be_read_by_everybody(
    tab: Any, address: str, width: int, theme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=theme)
    tab.goto(address)
    tab.locator("[data-testid=stDataFrame] canvas").first.wait_for()
    ready = {
        "": "[data-testid=stDataFrame] canvas",
        f"run?run={RUN}": ".st-key-strip_next",
        f"incident?run={RUN}": ".st-key-incident_summary",
        "alerts": "[class*='st-key-alert_group']",
    }
    for path, selector in ready.items():
        tab.goto(at(address, path))
        tab.locator(selector).first.wait_for()
        tab.wait_for_timeout(1_500)
        grave = [
            (each["id"], node["target"], node["failureSummary"])
            for each in axe.run(tab).response["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]
        assert [] == grave, path
        assert tab.locator("h1").count() == 1, path
