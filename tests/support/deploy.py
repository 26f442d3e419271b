"""Checkers of generated files."""

import re
import subprocess

from tests.deploy.compose import DEPLOY


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, check=False
    )


ROOT = DEPLOY.parent


def settings_of_vitals() -> set[str]:
    """Return every variable that the code of Vitals reads."""
    rooms = ("trainvitals", "agent", "collector", "dashboard")
    texts = [path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")]
    return set(re.findall(r"VITALS_[A-Z_]+\b", "".join(texts)))
