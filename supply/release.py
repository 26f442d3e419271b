"""Builds a release from the last commit to dist/: the same commit gives the same bytes.

    make release        python supply/release.py build/sbom.json

Wheel and sdist are built twice, from two exports of the commit in different directories, and must
be the same. dist/ also gets the SBOM, SHA256SUMS of all three, and provenance.json: an in-toto
statement (SLSA provenance, version 1) about them. Nothing is signed: sign when you publish.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("build", "hatchling")
BUILD_TYPE = "urn:trainvitals:make-release:1"


def git(*words: str) -> bytes:
    """Return the output of a git command in this checkout.

    Raises:
        SystemExit: git failed; with its error message.
    """
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def check(version: str, changelog: str, changed: str) -> None:
    """Refuse to release uncommitted changes, or a version without a changelog section.

    Raises:
        SystemExit: one of these; the message names the fix.
    """
    if changed:
        raise SystemExit(
            f"error: not everything is committed:\n{changed}\n"
            "hint: commit it: what is released is a commit"
        )
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        raise SystemExit(
            f"error: CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'\n"
            "hint: give what is under [Unreleased] that heading, or raise __version__ in "
            "trainvitals/__init__.py"
        )


def built(commit: str, folder: Path) -> dict[str, bytes]:
    """Return sdist and wheel of a commit, by name, built below the directory."""
    source, made = folder / "source", folder / "made"
    source.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(source, filter="data")
    committed = git("log", "-1", "--format=%ct", commit).decode().strip()
    environ = os.environ | {"SOURCE_DATE_EPOCH": committed}
    # The wheel is built from the sdist, which shows that the sdist is complete.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: the build failed:\n{done.stdout}{done.stderr}")
    return {path.name: path.read_bytes() for path in sorted(made.iterdir())}


def sums(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}


def statement(digests: Mapping[str, str], commit: str) -> dict[str, object]:
    """Return the provenance of the files: the commit, and the versions of the tools."""
    tools = {name: importlib.metadata.version(name) for name in TOOLS}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": d}} for name, d in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"commit": commit},
                "internalParameters": {"python": platform.python_version(), **tools},
                "resolvedDependencies": [{"name": "source", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {"builder": {"id": BUILD_TYPE}},
        },
    }


def of_version(sbom: bytes, version: str) -> bytes:
    """Return the SBOM with the version, which its generator cannot read in pyproject.toml."""
    listed = json.loads(sbom)
    listed["metadata"]["component"]["version"] = version
    return json.dumps(listed, indent=2).encode() + b"\n"


def release(sbom: Path, target: Path) -> list[Path]:
    """Write the release of the last commit; return its files.

    Raises:
        SystemExit: it cannot be released; the message names the fix.
    """
    about = (ROOT / "trainvitals" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', about, re.M)
    assert version is not None
    changed = git("status", "--porcelain").decode()
    check(version[1], (ROOT / "CHANGELOG.md").read_text(), changed)
    commit = git("rev-parse", "HEAD").decode().strip()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        files = built(commit, Path(first))
        again = built(commit, Path(second) / "deeper")
    if sums(files) != sums(again):
        raise SystemExit(f"error: two builds differ:\n{sums(files)}\n{sums(again)}")
    files[f"trainvitals-{version[1]}.cdx.json"] = of_version(sbom.read_bytes(), version[1])
    digests = sums(files)
    files["SHA256SUMS"] = "".join(f"{d}  {name}\n" for name, d in digests.items()).encode()
    files["provenance.json"] = json.dumps(statement(digests, commit), indent=2).encode() + b"\n"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)
    return [target / name for name in files]


if __name__ == "__main__":
    for path in release(Path(sys.argv[1]), ROOT / "dist"):
        print(path.relative_to(ROOT))  # noqa: T201
    print("Nothing of it is signed: sign SHA256SUMS and provenance.json where you publish.")  # noqa: T201
