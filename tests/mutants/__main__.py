"""Draws mutants, runs the tests over them, and compares with the tests of another commit.

python -m tests.mutants [--number 200] [--seed 1] [--jobs 2] [--seconds 20] [--commit COMMIT]

Everything is kept in ``build/mutants``: the same command goes on after an interruption, and
removing the folder starts over. With ``--commit``, each mutant that survives and whose file is the
same at that commit is run with those of the commit's tests that the present suite does not have
unchanged; all other tests would do the same again. ``report.txt`` and ``report.json`` have the
tables.
"""

import argparse
import ast
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from tests.mutants.draw import FOLDERS, Mutant, digest, draw
from tests.mutants.run import USUAL, Checkout, Result, record, run_all

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "mutants"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant")
    parser.add_argument("--commit", help="compare with the tests of this commit")
    parser.add_argument("--tests", nargs="*", default=[], help="only these test files, for a trial")
    options = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    checkouts = [Checkout.of(ROOT, OUTPUT / f"now-{i}") for i in range(options.jobs)]
    mutants = drawn(checkouts[0].folder, options.number, options.seed)
    arguments = ["-m", USUAL, *options.tests]
    reach = record(checkouts[0], OUTPUT / "recorded-now", arguments, 2 * options.jobs)
    results = run_all(mutants, checkouts, reach, OUTPUT / "results-now.jsonl", options.seconds)
    before = compare(results, options) if options.commit else []
    report(results, before, options)


def drawn(root: Path, number: int, seed: int) -> list[Mutant]:
    """Return the mutants of this number and seed; they are drawn once."""
    path = OUTPUT / f"mutants-{number}-{seed}.json"
    if not path.exists():
        path.write_bytes(msgspec.json.encode(draw(root, number, seed)))
    return msgspec.json.decode(path.read_bytes(), type=list[Mutant])


def compare(results: list[Result], options: argparse.Namespace) -> list[Result]:
    """Run the survivors with the tests of the other commit that were changed or removed since."""
    checkouts = []
    for i in range(options.jobs):
        folder = OUTPUT / f"then-{i}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        archive = subprocess.run(
            ["git", "archive", options.commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "--extract"], cwd=folder, input=archive.stdout, check=True)
        # The plugin that records, which that commit may not have.
        shutil.copytree(
            ROOT / "tests" / "mutants", folder / "tests" / "mutants", dirs_exist_ok=True
        )
        checkouts.append(Checkout(folder))
    then = checkouts[0].folder
    comparable = [
        result.mutant
        for result in results
        if result.outcome != "killed"
        and (then / result.mutant.path).exists()
        and digest((then / result.mutant.path).read_text()) == result.mutant.sha256
    ]
    gone = sorted(
        tests_of(checkouts[0], "not slow", options.tests)
        - tests_of(Checkout(ROOT), USUAL, options.tests)
    )
    print(f"{len(comparable)} survivors, {len(gone)} tests of {options.commit} changed since")
    names = OUTPUT / "tests-then"
    names.write_text("\n".join(name for name, _ in gone))
    reach = record(checkouts[0], OUTPUT / "recorded-then", [f"@{names}"], 2 * options.jobs)
    path = OUTPUT / "results-then.jsonl"
    return run_all(comparable, checkouts, reach, path, 2 * options.seconds)


def tests_of(checkout: Checkout, marks: str, files: list[str]) -> set[tuple[str, str]]:
    """Return the name of each test that is selected, and the code of its function."""
    _, output = checkout.pytest("--collect-only", "-m", marks, *files, seconds=600)
    names = [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]
    functions: dict[str, dict[str, str]] = {}
    tests = set()
    for name in names:
        file, *parts = name.partition("[")[0].split("::")
        if file not in functions:
            functions[file] = dict(functions_of(ast.parse((checkout.folder / file).read_text())))
        tests.add((name, functions[file].get(".".join(parts), "")))
    if not tests:
        raise SystemExit(f"no tests were found in {checkout.folder}: {output[-500:]}")
    return tests


def functions_of(tree: ast.AST, prefix: str = "") -> list[tuple[str, str]]:
    """Return the dotted name and the code of each function and method."""
    functions = []
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((prefix + node.name, digest(ast.dump(node))))
        elif isinstance(node, ast.ClassDef):
            functions += functions_of(node, f"{prefix}{node.name}.")
    return functions


def report(results: list[Result], before: list[Result], options: argparse.Namespace) -> None:
    """Write the tables: per folder, and each survivor."""
    then = {result.mutant.name: result for result in before}
    rows = []
    for folder in FOLDERS:
        of_folder = [r for r in results if r.mutant.path.startswith(f"{folder}/")]
        counts = Counter(result.outcome for result in of_folder)
        more = sum(
            r.mutant.name in then and then[r.mutant.name].outcome == "killed" for r in of_folder
        )
        rows.append(
            (folder, len(of_folder), counts["killed"], counts["survived"], counts["no test"], more)
        )
    total = ("all", *(sum(row[i] for row in rows) for i in range(1, 6)))
    lines = [
        f"{options.number} mutants, seed {options.seed}, {options.seconds:.0f} s of tests each",
        "",
    ]
    head = ("folder", "mutants", "killed", "survived", "no test", "only then")
    for row in (head, *rows, total):
        lines.append(f"{row[0]:36}" + "".join(f"{cell!s:>10}" for cell in row[1:]))
    if options.commit:
        lines += ["", f"only then: survives now, and tests of {options.commit} notice it."]
        lines += [f"Compared were {len(then)} survivors, whose file is the same at that commit."]
    lines += ["", "Survivors:"]
    for result in results:
        if result.outcome != "killed":
            other = then.get(result.mutant.name)
            note = "" if other is None else f"; then: {other.outcome} {other.killer}"
            lines.append(
                f"  {result.mutant.name}: {result.outcome}, {result.num_tests} tests{note}"
            )
    (OUTPUT / "report.txt").write_text("\n".join(lines) + "\n")
    (OUTPUT / "report.json").write_bytes(msgspec.json.encode({"now": results, "then": before}))
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
