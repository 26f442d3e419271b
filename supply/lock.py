"""Writes requirements.lock: what development and CI install, each file by its hash.

    make lock

The versions are those of the environment that runs this; pip says which file of each this platform
gets, and its hash. Not torch: its build is the machine's (CPU, CUDA), so it and what only it needs
are installed before.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
_NOT_LOCKED = {"torch", "trainvitals"}
_HEAD = """\
# Written by `make lock`: what development and CI install beside PyTorch, each file by its hash.
#     pip install --no-deps --require-hashes -r requirements.lock
# The files are those for Linux on x86-64 with Python 3.11.
"""


def required() -> dict[str, str]:
    """Return name and version of all that ``[all]`` and the group ``dev`` bring, as installed here.

    Raises:
        SystemExit: something of it is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, str] = {}
    own = {
        extra
        for line in project["project"]["optional-dependencies"]["all"]
        for extra in _extras(line)
    }
    waiting = [("trainvitals", extra) for extra in ("", *own)]
    waiting += _split(project["dependency-groups"]["dev"])
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here: run `make setup`") from None
        if name not in _NOT_LOCKED:
            found[name] = distribution.version
        for following in _split(distribution.requires or [], extra) if name != "torch" else ():
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return dict(sorted(found.items()))


def _extras(line: str) -> set[str]:
    return Requirement(line).extras


def _split(lines: list[str], extra: str = "") -> list[tuple[str, str]]:
    """Return (name, extra) of the requirements that hold here, with that extra of ours."""
    parts: list[tuple[str, str]] = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            parts += [(name, each) for each in ("", *sorted(requirement.extras))]
    return parts


def hashes_of(versions: dict[str, str]) -> dict[str, str]:
    """Return the sha256 of the file that pip would take of each; nothing is installed."""
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, *wanted]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        canonicalize_name(item["metadata"]["name"]): _sha256(item["download_info"])
        for item in report["install"]
    }


def _sha256(download: dict[str, object]) -> str:
    info = download.get("archive_info")
    hashes = info.get("hashes", {}) if isinstance(info, dict) else {}
    parts = urlsplit(str(download["url"]))
    if "sha256" not in hashes and parts.scheme == "file":
        return hashlib.sha256(Path(unquote(parts.path)).read_bytes()).hexdigest()
    return str(hashes["sha256"])


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Return the lock's entries: name to version and hash."""
    found = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.M)
    return {name: (version, digest) for name, version, digest in found}


def main() -> None:
    """Write the lock."""
    versions = required()
    hashes = hashes_of(versions)
    lines = [
        f"{name}=={version} --hash=sha256:{hashes[name]}\n" for name, version in versions.items()
    ]
    LOCK.write_text(_HEAD + "".join(lines))
    sys.stderr.write(f"{LOCK.name}: {len(lines)} distributions\n")


if __name__ == "__main__":
    main()
