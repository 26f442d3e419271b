"""Runs a module as a program that ends with the one that started it, however that ended.

``python -m vitals_dashboard.die_with_parent MODULE ARGUMENTS`` is ``python -m MODULE ARGUMENTS``,
but standard input is a pipe from the parent process: it closes even if the parent is killed.
"""

import os
import runpy
import signal
import sys
import threading
import time

END_SECONDS = 5.0


def exit_with_parent() -> None:
    """End this child of `vitals dashboard` once its parent has ended, if possible gracefully."""
    while os.read(0, 4096):
        pass  # the parent writes nothing; data shows that it is alive
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module that the arguments name as a child process of `vitals dashboard`."""
    threading.Thread(target=exit_with_parent, name="end-with-the-starter", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
