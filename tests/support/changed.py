"""Selection of the tests that a change can reach: `make test-changed`.

Changed are the files that differ from the merge base with ``main``, and new ones. A test file is
selected if it imports a changed module, directly or through others, or names it in a text: tests
start programs by their name. A changed file that is no Python source counts as a change of the
modules that name it. The result is a guess for the inner loop; ``make test`` runs everything.
"""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

import trainvitals
from trainvitals.cli.programs import COMMANDS, GROUP

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "trainvitals": "trainvitals",
    "trainer_hooks": "trainer_hooks",
    "vitals_agent": "agent/vitals_agent",
    "vitals_collector": "collector/vitals_collector",
    "vitals_dashboard": "dashboard/vitals_dashboard",
    "vitals_deploy": "deploy/vitals_deploy",
    "vitals_plugins": "plugins/vitals_plugins",
    "vitals_bench": "benchmarks/vitals_bench",
    "tests": "tests",
}
EVERYTHING = frozenset({"Makefile", "pyproject.toml", "constraints.txt", "tests/conftest.py"})
"""Files that every test depends on."""
OF_ALL_SOURCES = (
    "tests/house/test_coupling.py",
    "tests/house/test_imports.py",
    "tests/house/test_privacy.py",
    "tests/house/test_style.py",
)
"""Tests that read all Python sources, and are selected with any of them."""
_DOTTED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_OF_HOOKS = re.compile(rf"(?<![\w.])(?:train)?vitals\.(?:{'|'.join(trainvitals.__all__)})\b")
"""A name of the training library that ``trainvitals`` looks up at its first use."""
_COMMAND_LINE = re.compile(r'"(?:train)?vitals"|\bVITALS\b|\b(?:vitals|run_cli)\(')
_QUOTED = re.compile(r'"([\w.-]+)"')


class Sources:
    """The modules of this checkout, with what they import and name."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        for package, folder in PACKAGES.items():
            for path in sorted((ROOT / folder).rglob("*.py")):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                self._paths[".".join((package, *parts)).removesuffix(".__init__")] = path
        self._modules = {path.relative_to(ROOT).as_posix(): m for m, path in self._paths.items()}
        self._texts = {module: path.read_text() for module, path in self._paths.items()}
        self._importers: dict[str, set[str]] = defaultdict(set)
        self._commands = dict(_modules_of_commands())
        graph = grimp.build_graph(
            *PACKAGES,
            exclude_type_checking_imports=True,
            cache_dir=str(ROOT / ".import_linter_cache"),
        )
        for module in self._paths:
            # The graph has no module of a folder that is no package.
            known = module in graph.modules
            used = graph.find_modules_directly_imported_by(module) if known else ()
            for imported in {*used, *self._named(module), *self._conftests(module)}:
                self._importers[imported].add(module)

    def select(self, changed: Iterable[str]) -> dict[str, str]:
        """Return the test files that changes can reach, the nearest first, and the reason of each.

        Args:
            changed: files, relative to the root of the checkout.

        Returns:
            By path, the changed file and the modules between it and the test.
        """
        changed = sorted(changed)
        if everything := EVERYTHING.intersection(changed):
            return {"tests": min(everything)}
        reasons: dict[str, str] = {}
        for file in changed:
            module = self._modules.get(file)
            reasons |= dict.fromkeys([module] if module else self._naming(file), file)
        last = list(reasons)
        while last:  # breadth first: the nearest tests come first, and each by its shortest way
            found: dict[str, str] = {}
            for module in last:
                for importer in sorted(self._importers[module] - reasons.keys()):
                    found.setdefault(importer, f"{reasons[module]} <- {importer}")
            reasons |= found
            last = list(found)
        tests = {
            self._paths[module].relative_to(ROOT).as_posix(): reason
            for module, reason in reasons.items()
            if module.rpartition(".")[2].startswith("test_")
        }
        if any(file.endswith(".py") for file in changed):
            tests |= {file: "reads all sources" for file in OF_ALL_SOURCES if file not in tests}
        return tests

    def _named(self, module: str) -> Iterator[str]:
        """Yield the modules that a source names: dotted, as a file, or as a command of `vitals`."""
        # It imports modules before a program that needs them is known.
        text = "" if module == "tests.support.forked" else self._texts[module]
        for name in set(_DOTTED.findall(text)):
            while name and name not in self._paths:
                name = name.rpartition(".")[0]
            if "." in name:
                yield name
        names = set(_QUOTED.findall(text))
        folder = self._paths[module].parent
        for name in names:
            if name.endswith(".py") and (path := folder / name).exists():
                yield self._modules[path.relative_to(ROOT).as_posix()]
        if module.startswith("tests."):
            if _COMMAND_LINE.search(text):
                yield from (self._commands[name] for name in names & self._commands.keys())
            if _OF_HOOKS.search(text):
                yield "trainer_hooks"

    def _conftests(self, module: str) -> Iterator[str]:
        """Yield the modules whose fixtures a test can use."""
        if module.startswith("tests."):
            parts = module.split(".")
            for num in range(1, len(parts)):
                conftest = ".".join((*parts[:num], "conftest"))
                if conftest in self._paths and conftest != module:
                    yield conftest

    def _naming(self, file: str) -> Iterator[str]:
        """Yield the modules that name a file: by its name, or its folder where they search that."""
        path = Path(file)
        searched = re.compile(rf'"{re.escape(path.parent.name)}"[^\n]*glob\(')
        is_packaged = any(folder in PACKAGES.values() for folder in map(str, path.parents))
        for module, text in self._texts.items():
            if not is_packaged and not module.startswith("tests."):
                continue  # such as a hint that refers to a page
            if path.name in text or (path.parent.name and searched.search(text)):
                yield module


def _modules_of_commands() -> Iterator[tuple[str, str]]:
    """Yield each subcommand of `vitals`, and the module that brings it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][GROUP]
    for program, commands in COMMANDS.items():
        target = points.get(program, f"trainvitals.cli.{program}")
        yield from ((command, target.partition(":")[0]) for command in commands)


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from the merge base with a branch, and new ones.

    Raises:
        SystemExit: the checkout has no such branch.
    """

    def git(*words: str) -> list[str]:
        command = ["git", *words]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}; name another BASE")
        return done.stdout.splitlines()

    (start,) = git("merge-base", "HEAD", base)
    differing = git("diff", "--name-only", "--no-renames", start)
    return sorted({*differing, *git("ls-files", "--others", "--exclude-standard")})


def main() -> None:
    """Print the selected files, and on stderr the reason of each."""
    (base,) = sys.argv[1:]
    changed = changed_files(base)
    print(f"changed since {base}: {', '.join(changed) or 'nothing'}", file=sys.stderr)
    tests = Sources().select(changed)
    for file, reason in tests.items():
        print(f"  {file}: {reason}", file=sys.stderr)
    print(f"selected: {len(tests)}", file=sys.stderr)
    print(*tests)


if __name__ == "__main__":
    main()
