"""Collects what a machine without network needs for the GPU check, except PyTorch and NumPy.

    python -m vitals_bench.gpu.wheels build/gpu-wheels     as `make gpu-wheels` does

One directory with our wheel and the wheels of all packages that it and the tests need, in the
versions that are installed here, for another Python and platform. Nothing there changes the
installed PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vitals_bench.gpu.runner import ROOT

MAX_BYTES = 64 << 20
"""What can be carried to a lent machine."""
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
EXISTING = frozenset({"torch", "numpy", "trainvitals"})
"""Left out: the machine has its own PyTorch and NumPy, and our wheel is built here."""
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 34))
"""Tags that the target accepts; wheels for an older glibc are preferred."""


def find_packages(names: Iterable[str], python: str) -> dict[str, str]:
    """Return the installed versions of packages and everything that they need, by name.

    Args:
        names: distributions that are installed here.
        python: version of the target's Python, for the markers of requirements.
    """
    environment: dict[str, str] = {
        **_default_markers(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "extra": "",
    }
    versions: dict[str, str] = {}
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name in versions or name in EXISTING:
            continue
        package = distribution(name)
        versions[name] = package.version
        for line in package.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                todo.append(canonicalize_name(requirement.name))
    return dict(sorted(versions.items()))


def _default_markers() -> dict[str, str]:
    return {name: str(value) for name, value in default_environment().items()}


def required_names(python: str) -> Iterator[str]:
    """Yield the names of our requirements without extras, and of the tests' tools."""
    environment = {**_default_markers(), "python_version": python, "extra": ""}
    for line in distribution("trainvitals").requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement.name
    yield from TEST_TOOLS


def describe_install(wheels: str, site: str) -> str:
    """Return the lines that install the wheels next to an existing PyTorch and run the check."""
    return (
        "python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade \\\n"
        f"    --target {site} {wheels}/*.whl\n"
        f"PYTHONPATH=$PWD/{site}:$PWD/benchmarks python3 -m vitals_bench gpu"
    )


def collect(out: Path, python: str, platforms: Iterable[str]) -> None:
    """Build our wheel and download the others to ``out``, which is emptied first.

    Raises:
        SystemExit: a wheel cannot be built or downloaded, or all together are too large.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*build, "--wheel-dir", str(out), str(ROOT)])
    packages = find_packages(required_names(python), python)
    download = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(out)]
    download += ["--python-version", python]
    for platform in platforms:
        download += ["--platform", platform]
    _run([*download, *(f"{name}=={version}" for name, version in packages.items())])
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    if num_bytes > MAX_BYTES:
        raise SystemExit(f"error: {out} has {num_bytes >> 20} MiB, at most 64 are allowed")
    sys.stdout.write(
        f"{out}: {len(list(out.iterdir()))} wheels, {num_bytes / 2**20:.1f} MiB, for Python "
        f"{python}.\nCopy the checkout with this directory to the machine, and run there:\n\n"
        f"{describe_install(str(out), 'build/gpu-site')}\n"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(f"error: this command failed: {' '.join(command[:6])} ...")


def main() -> None:
    """Read the options, and collect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory, emptied first")
    parser.add_argument("--python", default="3.12", help="version of the target's Python")
    parser.add_argument("--platform", nargs="*", default=PLATFORMS, help="tags of the target")
    options = parser.parse_args()
    collect(options.out, options.python, options.platform)


if __name__ == "__main__":
    main()
