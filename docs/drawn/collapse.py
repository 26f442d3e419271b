"""The collapse of a policy in the post-training guide: a real small GRPO run, judged when drawn.

Its scalars are in ``real/`` next to this file: those of the benchmark's training "learning rate
x100" (`benchmarks/vitals_bench/posttraining/kinds.py`). ``python -m docs.drawn.collapse`` trains it
again.
"""

import csv

from docs.drawn.runs import check
from docs.drawn.svg import Line, Mark, Panel
from docs.drawn.trained import FOLDER
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.records import Finding

TITLE = "A policy collapses: reward, entropy and KL divergence"
_FILE = FOLDER / "collapse.csv"
_KIND, _SEED, _STEPS = "learning rate x100", 1, 140
_FAULT = 80
"""Step from which the learning rate is a hundred times as high."""
_SCALARS = {"reward": "reward", "entropy": "nats per token", "kl": "nats per token"}
"""Scalars that are drawn, with the names of their axes."""


def read() -> list[dict[str, float]]:
    """Return the scalars of each step."""
    with _FILE.open(newline="") as file:
        return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]


def panels() -> list[Panel]:
    """Return a panel for each scalar, with the step of the fault and that of the report."""
    rows, detectors, findings = read(), PostTrainingDetectors("grpo"), list[Finding]()
    for step, row in enumerate(rows):
        findings += detectors.update(row, step=step, attempt=1, time_unix_ns=0)
    finding = check(TITLE, findings, "policy_collapse")[0]
    title = f"the learning rate rises at step {_FAULT} (gray), reported at {finding.step} (red)"
    return [
        Panel(
            title=f"{'KL divergence' if name == 'kl' else name}: {title}",
            x_label="step",
            y_label=unit,
            lines=[Line(label="", points=[(n, row[name]) for n, row in enumerate(rows)])],
            marks=[
                Mark(x=step, y=rows[step][name], level=level, word="")
                for step, level in ((_FAULT, "other"), (finding.step, finding.level))
            ],
            findings=(finding,),
            log=name == "entropy",
        )
        for name, unit in _SCALARS.items()
    ]


def write() -> None:
    """Train without Vitals, and write the scalars: a second."""
    import torch

    from vitals_bench.posttraining.kinds import KINDS
    from vitals_bench.posttraining.policy import TRUTH, Sampled, Writer, train_policy

    run = KINDS[_KIND].run
    assert isinstance(run, Sampled), "the kind samples completions"
    torch.manual_seed(_SEED)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.learning_rate)
    with _FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for step, (_, scalars) in enumerate(train_policy(model, optimizer, _STEPS, run)):
            row = {name: value for name, value in scalars.items() if name != TRUTH}
            if not step:
                writer.writerow(row)
            writer.writerow([f"{value:.4g}" for value in row.values()])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    write()
