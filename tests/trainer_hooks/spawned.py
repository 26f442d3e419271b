"""Runs a function on real ranks and reads what each left, all cases in one launch."""

import atexit
import json
import multiprocessing
import os
import sys

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException

PRELOADED = ["tests.trainer_hooks.preloaded"]


def spawned(main, folder, *, ranks=2):
    """Call ``main(rank, folder)`` on each rank and return its ``RANK.json``, by rank.

    torch 2.13's gloo aborts now and then when a rank exits, watched or not: then all is run again.
    """
    for trial in range(3):
        where = folder / str(trial)
        (where / "shm").mkdir(parents=True)
        try:
            _spawn(main, where, ranks)
            break
        except ProcessExitedException as error:
            if error.signal_name != "SIGABRT" or trial == 2:
                raise
    return [json.loads((where / f"{rank}.json").read_text()) for rank in range(ranks)]


def start_ranks(main, *args, ranks):
    """Start ``main(rank, *args)`` on each rank, in the present environment; return their context.

    They are forks of one process that has imported what they need: without it, most of a short
    case's time would be imports.
    """
    _context()
    return mp.start_processes(
        _rank,
        args=(dict(os.environ), main, args),
        nprocs=ranks,
        join=False,
        start_method="forkserver",
    )


def start_rank(rank, main, *args):
    """Start ``main(rank, *args)`` on one rank; return its process."""
    environ = dict(os.environ)
    process = _context().Process(target=_rank, args=(rank, environ, main, args))
    process.start()
    return process


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(rank, environ, main, args):
    assert PRELOADED[0] in sys.modules, (
        "the process that ranks are forks of ignores a failed import"
    )
    os.environ.clear()
    os.environ.update(environ)
    try:
        main(rank, *args)
    finally:
        atexit._run_exitfuncs()  # a fork ends without them


def _spawn(main, folder, ranks):
    before = dict(os.environ)
    os.environ |= {
        "VITALS_DIR": str(folder / "runs"),
        "VITALS_SHM": str(folder / "shm"),
        "VITALS_AGENT": "off",
        "OMP_NUM_THREADS": "1",
    }
    try:
        context = start_ranks(main, str(folder), ranks=ranks)
        while not context.join(timeout=240):
            pass
    finally:
        os.environ.clear()
        os.environ.update(before)
