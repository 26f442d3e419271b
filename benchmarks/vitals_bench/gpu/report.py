"""Texts from the results of the GPU check: its page, and the sentences of the documentation.

The documentation is generated from the committed results in ``docs/gpu-results/``. It names what
passed there and nothing else. A result without a GPU changes nothing.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
"""Content of a result file."""
CLAIMED_GROUPS = ("check", "tests", "agent")
"""Groups whose parts are right or wrong; the others measure."""
RESULTS = Path(__file__).parents[3] / "docs" / "gpu-results"
NOT_RUN = "Not yet run on GPUs."
_WIDTH = 110


def make_text(result: Result) -> str:
    """Return the page about one result: a line per part, and the figures."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if value)
    lines = [
        f"Vitals GPU check of {result['date']}, commit {result['commit']}",
        describe_gpus(result),
        machine,
    ]
    groups = dict.fromkeys(part["group"] for part in result["parts"].values())
    for group in groups:
        parts = {n: p for n, p in result["parts"].items() if p["group"] == group}
        lines += ["", f"{group}: {summarize(parts.values())}"]
        for name, part in parts.items():
            if part["status"] == "omitted":
                continue
            why = (part["why"].splitlines() or [""])[0][:400]
            lines.append(f"{part['status']:8} {part['seconds']:6.1f} s  {name}  {why}".rstrip())
            lines += [f"{'':19}{line}" for line in _format_rows(part)]
    return "\n".join(lines) + "\n"


def summarize(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the number of parts in each status, passed first."""
    statuses = [part["status"] for part in parts]
    counts = {"passed": statuses.count("passed")}
    counts |= {status: statuses.count(status) for status in sorted({*statuses} - {"passed"})}
    listed = ", ".join(f"{num} {status}" for status, num in counts.items())
    return f"{listed} of {len(statuses)}"


def describe_gpus(result: Result) -> str:
    """Return the GPUs of a result, such as "2 x NVIDIA H100"; "no GPU" if there are none."""
    gpus: list[str] = result["machine"]["gpus"]
    names = {name: gpus.count(name) for name in gpus}
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in names.items()) or "no GPU"


def _format_rows(part: Mapping[str, Any]) -> Iterator[str]:
    for row in part.get("facts", {}).get("rows", ()):
        theirs = f", {row['peer']} {row['theirs']:.4g} {row['unit']}" if row["theirs"] else ""
        ratio = f", ratio {row['ours'] / row['theirs']:.4f}" if row["theirs"] else ""
        yield f"{row['name']}: {row['ours']:.4g} {row['unit']}{theirs}{ratio}"


# ------------------------------------------------------------------------------ documentation


def load_results(directory: Path = RESULTS) -> list[Result]:
    """Return the committed results that were measured on a GPU, the latest first."""
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    on_gpus = [result for result in results if result["machine"]["gpus"]]
    return sorted(on_gpus, key=lambda result: str(result["date"]), reverse=True)


def count_claims(result: Result) -> tuple[int, int]:
    """Return how many parts passed, and how many there are, in the groups with checks."""
    parts = [p for p in result["parts"].values() if p["group"] in CLAIMED_GROUPS]
    return sum(part["status"] == "passed" for part in parts), len(parts)


def has_passed(result: Result, name: str) -> bool:
    """Whether a part passed."""
    return name in result["parts"] and result["parts"][name]["status"] == "passed"


def describe_status(results: Sequence[Result]) -> str:
    """Return what the README states about GPUs in its first paragraph."""
    if not results:
        return "not yet run on GPUs.** Everything here"
    latest = results[0]
    passed, total = count_claims(latest)
    parts = [p for p in latest["parts"].values() if p["group"] in CLAIMED_GROUPS]
    num_failed = sum(part["status"] in ("failed", "error", "timeout") for part in parts)
    gpus = describe_gpus(latest).replace("NVIDIA ", "")
    return (
        f"[GPU check](docs/RUN_ON_CUDA.md#results) {latest['date']}, {gpus}, "
        f"torch {latest['machine']['torch']}: {passed} of {total} passed, "
        f"{num_failed or 'none'} failed.** The rest"
    )


def fill_readme(text: str, results: Sequence[Result]) -> str:
    """Return the README with its sentences about GPUs as the results allow.

    Raises:
        ValueError: a sentence is not where it is expected.
    """
    if results:
        tested = "[Not run](docs/RUN_ON_CUDA.md#limits): several GPUs, NVLink, Xid, MIG."
        proof = "You need proof on several GPUs."
        if any(has_passed(result, "nccl_ranks_agree") for result in results):
            tested = "[Not run](docs/RUN_ON_CUDA.md#limits): NVLink, Xid, MIG."
            proof = "You need proof on your GPUs."
    else:
        tested = "NCCL, CUDA streams and NVML on a real GPU were [not run](docs/RUN_ON_CUDA.md)."
        proof = "You need proof on GPUs today."
    (status,) = re.findall(r"^> \*\*Status: .*?\n\n", text, re.M | re.S) or [""]
    words = " ".join(line.removeprefix("> ") for line in status.splitlines()).strip()
    words = re.sub(
        r"(#unreleased\), ).*?\*\* .*?(?= was tested)", rf"\1{describe_status(results)}", words
    )
    wrapped = textwrap.wrap(words, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    quote = "".join(f"> {line}\n" for line in wrapped) + "\n"
    for pattern, replacement in (
        (re.escape(status), quote),
        (r"(?<=parallelism\.\n)  .*?\n(?=- \*\*)", f"  {tested}\n"),
        (r"^- You need proof on .*?\n", f"- {proof}\n"),
    ):
        text, num = re.subn(pattern, lambda _, new=replacement: new, text, flags=re.M | re.S)
        if num != 1 or not status:
            raise ValueError(f"README.md has {num} places like {pattern!r}, expected 1")
    return text


def fill_section(text: str, heading: str, body: str) -> str:
    """Return the page with another body below ``## heading``; the section is added at its end.

    Args:
        text: the page.
        heading: title of the section.
        body: without the heading.
    """
    section = f"## {heading}\n\n{body.strip()}\n"
    before, found, rest = text.partition(f"## {heading}\n")
    if not found:
        return f"{text.rstrip()}\n\n{section}"
    _, next_heading, after = rest.partition("\n## ")
    return before + section + next_heading + after


def make_results(results: Sequence[Result]) -> str:
    """Return the body of the section "Results" of RUN_ON_CUDA.md."""
    if not results:
        return f"{NOT_RUN} There is no result file in `docs/gpu-results/`."
    lines = [
        "| date | GPU | torch | driver | commit | checks passed | not passed |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        passed, total = count_claims(result)
        others = [
            f"{name} ({part['status']})"
            for name, part in result["parts"].items()
            if part["group"] in CLAIMED_GROUPS and part["status"] != "passed"
        ]
        machine = result["machine"]
        cells = (
            result["date"],
            describe_gpus(result),
            machine["torch"],
            machine["driver"],
            result["commit"],
            f"{passed} of {total}",
            ", ".join(others) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_figures(results: Sequence[Result]) -> str:
    """Return the body of the section "gpu" of figures.md."""
    if not results:
        return f"{NOT_RUN} See [run on CUDA](RUN_ON_CUDA.md)."
    import msgspec

    from vitals_bench.page import COLUMNS, cells, markdown_table
    from vitals_bench.rows import Row

    sections = []
    for result in results:
        parts = result["parts"].values()
        rows = [
            msgspec.convert(row, Row)
            for part in parts
            if part["status"] == "passed"
            for row in part["facts"].get("rows", ())
        ]
        missed = [row.name for row in rows if row.met is False]
        lines = [
            f"### {describe_gpus(result)}",
            "",
            f"Measured {result['date']}, torch {result['machine']['torch']}, commit "
            f"{result['commit']}. {summarize(parts)}.",
            "",
            f"Missed: {'; '.join(missed)}." if missed else "No goal was missed.",
            "",
            *markdown_table(COLUMNS, [cells(row) for row in rows]),
        ]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)
