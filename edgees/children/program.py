"""One run of somebody's program: its output bounded, its time limited, all that it started ended with it.

Round the program runs ``supervise.py``, which ends it also when this process dies. POSIX only. Not caught: a program
that kills its supervisor after a child of it has moved to a session of its own; outside Linux, any process that has.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GRACE_S = 15.0
"""Seconds the supervisor has for ending a program."""
PIECE = 1 << 16


@dataclass(frozen=True)
class Ran:
    """status: as of ``subprocess`` (-9: SIGKILL), None: unknown. error: why the program could not be started.

    late: it was ended at its deadline. left: processes that could not be ended. stdout, stderr: their last bytes.
    """

    status: int | None
    error: str
    late: bool
    left: int
    seconds: float
    stdout: bytes
    stderr: bytes


class Tail:
    """The last ``most`` bytes of what was added; never holds more than twice as many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > 2 * self.most:
            del self.data[: -self.most]

    def last(self) -> bytes:
        return bytes(self.data[-self.most :])


class Program:
    """A program to be run once.

    command: its first word is a path or found on PATH. environment: all of it. folder: where it runs, its own: removed
    should this process die. stdin: a file.
    limits: {"AS": bytes, "CPU": seconds, "FSIZE": bytes, ...}. stdout, stderr: bytes to keep of each.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stdin: Path,
        limits: Mapping[str, int],
        stdout: int = 1 << 20,
        stderr: int = 4096,
    ) -> None:
        self.command, self.environment, self.folder, self.stdin = list(command), dict(environment), folder, stdin
        self.limits = ",".join(f"{name}={value}" for name, value in limits.items())
        self.stdout, self.stderr = Tail(stdout), Tail(stderr)
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    def stop(self) -> None:
        """End it now, from any thread; if it does not run yet it ends as it begins."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Afterwards, whether it ran or not."""
        self._ours.close()
        self._theirs.close()

    def run(self, seconds: float) -> Ran:
        """:raises OSError: no process can be made."""
        began = time.monotonic()
        with open(self.stdin, "rb") as stdin:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(FOLDER / "supervise.py"), str(self._theirs.fileno()), self.limits,
                 *self.command],
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment, cwd=self.folder,
                pass_fds=[self._theirs.fileno()], start_new_session=True, bufsize=0,
            )  # fmt: skip
        try:
            self._theirs.close()
            said, late = self._follow(process, began + seconds)
        finally:
            self.stop()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:  # then the program itself goes with it, by PR_SET_PDEATHSIG
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
        words = dict(line.split(" ", 1) for line in said.decode("utf-8", "replace").splitlines() if " " in line)
        status = int(words["status"]) if "status" in words else None
        taken = time.monotonic() - began
        error = words.get("error", "")
        left = int(words.get("left", 0))
        return Ran(status, error, late, left, taken, self.stdout.last(), self.stderr.last())

    def _follow(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
        """(the supervisor's words, whether the deadline came first), read until the supervisor has ended."""
        assert process.stdout is not None and process.stderr is not None
        said, late, until = bytearray(), False, deadline
        tails = {process.stdout.fileno(): self.stdout, process.stderr.fileno(): self.stderr}
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._ours.fileno(), *tails):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if now >= until:
                    if late:
                        break
                    late, until = True, now + GRACE_S
                    self.stop()
                for key, _ in selector.select(until - now):
                    try:
                        data = os.read(key.fd, PIECE)
                    except BlockingIOError:
                        continue
                    if key.fd in tails:
                        tails[key.fd].add(data)
                    said += data if key.fd not in tails else b""
                    if not data:
                        selector.unregister(key.fd)
                if self._ours.fileno() not in selector.get_map():
                    break
        for descriptor, tail in tails.items():  # nobody writes any more, outside Linux perhaps an escaped process
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    if not (data := os.read(descriptor, PIECE)):
                        break
                    tail.add(data)
        return bytes(said), late
