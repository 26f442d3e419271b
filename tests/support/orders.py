"""Commands as a person signs them, with a control key of these tests' own."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from trainvitals.io.control_key import make_control_key, sign_manual_command
from trainvitals.records import Command
from trainvitals.views import CommandRequest


@functools.cache
def keys() -> Path:
    """Return a folder with both halves of the key."""
    folder = Path(tempfile.mkdtemp(prefix="vitals-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_control_key(folder)
    return folder


def signed(
    run_id: str, request: CommandRequest, *, now_unix_ns: int, after: int = 0, by: str = "alice"
) -> Command:
    """Return the request as the signed command that a person sends."""
    command = request.command(run_id, issued_by=by, now_unix_ns=now_unix_ns, after=after)
    return sign_manual_command(command, keys())
