"""Program that tries to damage files outside of its sandbox; prints the attempts that succeeded."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

OUTSIDE, COPY, BYSTANDER = Path(sys.argv[1]), Path.cwd(), int(sys.argv[2])
VICTIM = OUTSIDE / "model.pt"
LIBC = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), function.__name__)


def exchange():
    (COPY / "mine").write_text("x")
    at, swap = -100, 2
    call(LIBC.renameat2, at, bytes(VICTIM), at, bytes(COPY / "mine"), swap)


def connect_abstract():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{sys.argv[3]}")


def bind_socket():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(OUTSIDE / "s"))


def link_and_write():
    os.link(VICTIM, COPY / "hard")
    (COPY / "hard").write_text("x")


def truncate_by_open():
    os.close(os.open(VICTIM, os.O_RDONLY | os.O_TRUNC))


def in_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(try_one(VICTIM.write_text, "x")))
    thread.start()
    thread.join()
    if results != [False]:
        return
    raise PermissionError


def remount():
    new_user, new_mounts = 0x10000000, 0x20000
    call(LIBC.unshare, new_user | new_mounts)
    remount_bind = 0x1000 | 0x20
    call(LIBC.mount, None, b"/", None, ctypes.c_ulong(remount_bind), None)
    VICTIM.write_text("x")


def unmount():
    call(LIBC.umount2, bytes(COPY), 2)


def trace():
    attach = 16
    call(LIBC.ptrace, attach, BYSTANDER, None, None)


def write_memory():
    with Path(f"/proc/{BYSTANDER}/mem").open("r+b"):
        pass


def child():
    subprocess.run(["sh", "-c", f"echo x > {VICTIM}"], check=True, stderr=subprocess.DEVNULL)


def replace_copy():
    COPY.rename(COPY.with_name("moved"))


ATTEMPTS = {
    "write": lambda: VICTIM.write_text("x"),
    "append": lambda: VICTIM.open("a").close(),
    "truncate": lambda: os.truncate(VICTIM, 0),
    "truncate by open": truncate_by_open,
    "unlink": VICTIM.unlink,
    "rmtree": lambda: shutil.rmtree(OUTSIDE / "empty"),
    "create": lambda: (OUTSIDE / "new").touch(),
    "mkdir": lambda: (OUTSIDE / "directory").mkdir(),
    "rename within": lambda: VICTIM.rename(OUTSIDE / "other"),
    "rename into copy": lambda: VICTIM.rename(COPY / "stolen"),
    "rename from copy": lambda: (COPY / "own").rename(OUTSIDE / "own"),
    "replace": lambda: (COPY / "own").replace(VICTIM),
    "exchange": exchange,
    "hard link into copy": link_and_write,
    "hard link out": lambda: os.link(COPY / "own", OUTSIDE / "hard"),
    "symbolic link": lambda: (OUTSIDE / "link").symlink_to(COPY),
    "through a link": lambda: (COPY / "linked.pt").write_text("x"),
    "through /proc": lambda: Path(f"/proc/self/root{VICTIM}").write_text("x"),
    "through cwd": lambda: Path("/proc/self/cwd", os.path.relpath(VICTIM, COPY)).write_text("x"),
    "through a process": lambda: Path(f"/proc/{BYSTANDER}/root{VICTIM}").write_text("x"),
    "fifo": lambda: os.mkfifo(OUTSIDE / "fifo"),
    "device": lambda: os.mknod(COPY / "device", 0o20600, os.makedev(1, 3)),
    "socket": bind_socket,
    "abstract socket": connect_abstract,
    "signal": lambda: os.kill(BYSTANDER, signal.SIGCONT),
    "trace": trace,
    "memory": write_memory,
    "child": child,
    "thread": in_thread,
    "mount": remount,
    "unmount": unmount,
    "own directory": replace_copy,
    "next to it": lambda: (COPY.parent / "sibling").touch(),
    "/tmp": lambda: Path("/tmp/vitals-drill-intruder").touch(),
    "home": lambda: (Path.home() / ".vitals-drill-intruder").touch(),
    "terminal": lambda: Path("/dev/ptmx").open("r+b").close(),
    "oom score": lambda: Path(f"/proc/{BYSTANDER}/oom_score_adj").write_text("1000"),
    "kernel": lambda: Path("/proc/sys/kernel/core_pattern").open("w").close(),
}
METADATA = {
    "chmod": lambda: VICTIM.chmod(0o666),
    "chmod of a descriptor": lambda: os.fchmod(os.open(VICTIM, os.O_RDONLY), 0o666),
    "chmod through a link": lambda: (COPY / "linked.pt").chmod(0o666),
    "chown": lambda: os.chown(VICTIM, os.getuid(), os.getgid()),
    "times": lambda: os.utime(VICTIM, (1, 1)),
    "attributes": lambda: os.setxattr(VICTIM, "user.x", b"x"),
    "shared memory": lambda: Path(sys.argv[4]).open("r+").close(),
}


def try_one(attempt, *arguments):
    try:
        attempt(*arguments)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


if __name__ == "__main__":
    (COPY / "own").write_text("mine")
    succeeded = [
        [name for name, attempt in attempts.items() if try_one(attempt)]
        for attempts in (ATTEMPTS, METADATA)
    ]
    print(json.dumps(succeeded))
