"""Script round somebody's program: runs it in a session of its own under limits, and ends all that it has started.

Arguments: the descriptor of a socket; limits (``AS=1000,CPU=60``, names of ``resource.RLIMIT_*``, "" for none); the
command. The program's standard streams are ours. It is ended when it has run its course, or when the other side shuts
the socket, even by dying. What is written to the socket, a line each: ``status N`` (as of ``subprocess``), or ``error
WORDS`` where it could not be started; ``left N`` where N processes resisted. The current folder is the program's own:
it is removed here should the parent have died.

On Linux processes that moved to a session of their own are ended too: this process inherits them as their parents end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_S = 5.0
"""Seconds that killing may take: a process that waits for a disk dies late."""


def prctl(option: int, value: int) -> None:
    """Of Linux; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def limit(limits: str) -> None:
    for item in filter(None, limits.split(",")):
        name, _, value = item.partition("=")
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(kind, (most, most))


def start(control: int, limits: str, command: list[str]) -> int:
    """The process of the program."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
            signal.signal(number, signal.SIG_DFL)
        limit(limits)
        os.execvp(command[0], command)
    except BaseException as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        os.write(control, f"error {words}\n".encode())
        os._exit(127)


def wait(pid: int, control: int, awake: int) -> int | None:
    """The program's wait status; None: it is to be ended. Reaps whatever else ends."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(awake, select.POLLIN)
    while True:
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == pid:
                return status
            if not ended:
                break
        for descriptor, _ in poll.poll():
            if descriptor == control:
                return None
            os.read(awake, 4096)


def below(top: int) -> list[int]:
    """All processes that descend from ``top``, by /proc; none where there is no such thing."""
    children: dict[int, list[int]] = {}
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
        children.setdefault(parent, []).append(pid)
    found, new = list[int](), [top]
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        found += new
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def end(pid: int) -> tuple[int | None, int]:
    """Kill the program's session and all other descendants: (the program's wait status if it ran, how many live)."""
    kill(-pid)
    status, until = None, time.monotonic() + END_S
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    status = ended[1]
        except ChildProcessError:
            return status, 0
        found = below(os.getpid())
        if time.monotonic() > until:
            return status, len(found)
        for other in found:  # again and again: they may have forked meanwhile
            kill(other)
        kill(-pid)
        time.sleep(0.002)


def main() -> None:
    control, parent = int(sys.argv[1]), os.getppid()
    os.set_inheritable(control, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = start(control, sys.argv[2], sys.argv[3:])
    status = wait(pid, control, awake)
    late, left = end(pid)
    status = late if status is None else status
    try:
        if status is not None:
            os.write(control, f"status {os.waitstatus_to_exitcode(status)}\n".encode())
        if left:
            os.write(control, f"left {left}\n".encode())
    except OSError:  # the parent has died, which may take a while to show
        time.sleep(0.1)
    if os.getppid() != parent:
        import shutil

        shutil.rmtree(os.getcwd(), ignore_errors=True)


if __name__ == "__main__":
    main()
