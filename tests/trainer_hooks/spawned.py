"""Runs a function on real ranks and reads what each left, all cases in one launch."""

import atexit
import base64
import json
import os
import pickle
import shutil
import signal
import sys
import time
import traceback

from tests.support.forked import TRAINING

PATIENCE_SECONDS = 240
_RANK = "from tests.trainer_hooks.spawned import be_rank; be_rank()"


class RankError(Exception):
    """A rank has failed; its traceback is in the captured output."""

    def __init__(self, rank, exit_code):
        super().__init__(f"rank {rank} ended with exit code {exit_code}")
        self.exit_code = exit_code


def spawned(main, folder, *, ranks=2):
    """Call ``main(rank, folder)`` on each rank and return its ``RANK.json``, by rank.

    torch 2.13's gloo aborts now and then when a rank exits, watched or not: then all is run again.
    """
    for trial in range(3):
        where = folder / str(trial)
        shm = where / "shm"
        shm.mkdir(parents=True)
        environ = {"VITALS_DIR": str(where / "runs"), "VITALS_SHM": str(shm)}
        processes = start_ranks(main, str(where), ranks=ranks, environ=environ)
        try:
            wait_for_ranks(processes)
            break
        except RankError as error:
            if error.exit_code != -signal.SIGABRT or trial == 2:
                raise
            shutil.rmtree(shm)
    return [json.loads((where / f"{rank}.json").read_text()) for rank in range(ranks)]


def start_ranks(main, *args, ranks, environ):
    """Start ``main(rank, *args)`` on each rank; return their processes.

    They are forks of a process that has imported what they need: without it, most of a short
    case's time would be imports. Neither ``main`` nor an argument may be defined in a function.
    """
    environ = {**os.environ, "VITALS_AGENT": "off", "OMP_NUM_THREADS": "1", **environ}
    words = [base64.b64encode(pickle.dumps((main, rank, args))).decode() for rank in range(ranks)]
    return [TRAINING.Popen([sys.executable, "-c", _RANK, word], env=environ) for word in words]


def wait_for_ranks(processes):
    """Wait until all ranks have ended; once one fails, end the others.

    Raises:
        RankError: a rank failed.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    left = dict(enumerate(processes))
    try:
        while left:
            for rank, process in list(left.items()):
                if process.poll() is None:
                    continue
                del left[rank]
                if process.returncode:
                    raise RankError(rank, process.returncode)
            assert time.monotonic() < deadline, f"ranks {sorted(left)} run for ever"
            time.sleep(0.01)
    finally:
        for process in left.values():
            process.kill()
            process.wait()


def be_rank():
    """Be a rank that ``start_ranks`` started; end without torch's own end, which may abort."""
    code = 0
    try:
        main, rank, args = pickle.loads(base64.b64decode(sys.argv[1]))
        main(rank, *args)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
