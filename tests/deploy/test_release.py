"""A release: the same bytes from the same commit, with sums and provenance, and nothing unsaid."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from trainvitals import __version__

ROOT = Path(__file__).parents[2]
NAME = f"trainvitals-{__version__}"


def load_release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "supply" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_release()


def test_what_is_not_committed_is_not_released():
    with pytest.raises(SystemExit, match="not everything is committed"):
        release.check("1.2.3", "## [1.2.3] - 2026-01-02\n", " M README.md\n")


@pytest.mark.parametrize(
    "heading",
    ["## [Unreleased]", "## [1.2.4] - 2026-01-02", "## [1.2.3]", "## [1x2.3] - 2026-01-02"],
)
def test_what_the_changelog_does_not_tell_of_is_not_released(heading):
    with pytest.raises(SystemExit, match=r"no section '## \[1\.2\.3\] - YYYY-MM-DD'"):
        release.check("1.2.3", f"# Changelog\n\n{heading}\n", "")
    release.check("1.2.3", "# Changelog\n\n## [1.2.3] - 2026-01-02\n", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_release_of_a_commit_is_whole_and_its_provenance_is_true(tmp_path):
    checkout = tmp_path / "checkout"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"PYTHONPATH": ""}

    def git(*words: object) -> str:
        line = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *map(str, words)]
        return subprocess.run(
            line, cwd=checkout, env=environ, capture_output=True, text=True, check=True
        ).stdout.strip()

    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    shutil.copytree(
        ROOT,
        checkout,
        ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__"),
    )
    git("init", "--quiet")
    changelog = checkout / "CHANGELOG.md"
    text = changelog.read_text().replace("[Unreleased]", f"[{__version__}] - 2026-01-02", 1)
    changelog.write_text(text)
    git("add", "--all")
    git("commit", "--quiet", "--message", "release")
    sbom = tmp_path / "sbom.json"
    sbom.write_text('{"metadata": {"component": {"name": "trainvitals"}}}')

    command = [sys.executable, checkout / "supply" / "release.py", sbom]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "Nothing of it is signed" in done.stdout
    dist = checkout / "dist"
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}
    told = made.keys() - {"SHA256SUMS", "provenance.json"}
    assert {f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl", f"{NAME}.cdx.json"} == told
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    assert {f"{made[name]}  {name}" for name in told} == set(lines)
    statement = json.loads((dist / "provenance.json").read_text())
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert {name: made[name] for name in told} == subjects
    build = statement["predicate"]["buildDefinition"]
    assert {"commit": git("rev-parse", "HEAD")} == build["externalParameters"]
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "deploy/compose/compose.yaml", "supply/release.py"} <= names
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        assert f"{NAME}.dist-info/METADATA" in wheel.namelist()

    listed = json.loads((dist / f"{NAME}.cdx.json").read_text())
    assert {"name": "trainvitals", "version": __version__} == listed["metadata"]["component"]

    before = made
    (checkout / "stray.txt").write_text("not committed")
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert 0 != refused.returncode
    assert "stray.txt" in refused.stderr
    (checkout / "stray.txt").unlink()
    subprocess.run(command, env=environ, capture_output=True, check=True)
    assert before == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in dist.iterdir()}
