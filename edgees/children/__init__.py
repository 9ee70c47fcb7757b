"""Child processes for code that we did not write: chat templates and the user's scorers.

A :class:`Child` is one long-lived Python process that answers one JSON line per JSON line. It has a wall deadline
per call, is killed (with everything it started) when it overruns, and starts again at the next call. What runs in
it is a script of this folder (``render.py``, ``score.py``), which imports nothing of edgees.

Imports only ``errors``' neighbours in the standard library: usable from every layer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
STARTUP_S = 60.0
"""Seconds that starting the interpreter may take: generous, since a busy laptop takes seconds for it."""
GRACE_S = 1.0
"""The child ends itself at the deadline and says where it was; we end it this much later if it could not."""


class ChildTimeout(Exception):
    """The call ran past its deadline; ``trace`` is the child's stack at that moment ("" if it could not say)."""

    def __init__(self, seconds: float, trace: str) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds
        self.trace = trace


class ChildDied(Exception):
    """The process ended by itself in the middle of a call (crash, ``os._exit``, killed for memory)."""

    def __init__(self, status: int | None) -> None:
        super().__init__(describe_status(status))
        self.status = status


def describe_status(status: int | None) -> str:
    """Words for a return code of :class:`subprocess.Popen`."""
    if status is None:
        return "its process closed the connection"
    if status >= 0:
        return f"its process ended with exit status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"


class Child:
    """``Child(script, options)``: one process, started at the first call.

    script: file name in this folder. options: JSON object that the script gets as its only argument.
    isolated: run Python with ``-I`` (no user site, no ``PYTHON*`` variables).
    log: file that the child's stdout and stderr are appended to; None: our own stderr.
    Calls from several threads wait for each other.
    """

    def __init__(
        self,
        script: str,
        options: Mapping[str, Any] | None = None,
        *,
        isolated: bool = False,
        log: Path | None = None,
    ) -> None:
        flags = ["-I"] if isolated else []
        self._argv = [sys.executable, *flags, str(FOLDER / script), json.dumps(dict(options or {}))]
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        _ALIVE.add(self)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def call(self, request: Mapping[str, Any], seconds: float) -> Any:
        """The answer to one request (anything JSON can say). Raises ChildTimeout, ChildDied, TypeError, ValueError."""
        line = json.dumps({**request, "seconds": seconds}).encode("ascii") + b"\n"
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            return self._exchange(line, seconds, GRACE_S)

    def close(self) -> None:
        """End the process, if there is one. The next call would start another."""
        with self._lock:
            self._stop()

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._stop()
        environment = {"PYTHONHASHSEED": "0", **os.environ}  # the order of a scorer's sets must not vary over a resume
        with contextlib.ExitStack() as stack:
            sink: int | IO[bytes] | None = None
            if self._log is not None:
                sink = stack.enter_context(open(self._log, "ab"))
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is ours to handle, and a kill reaches what the child started
            )
        if os.name == "posix":
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
        self._owner = os.getpid()
        self._exchange(b"", STARTUP_S, 0.0)  # the script says hello

    def _exchange(self, line: bytes, seconds: float, grace: float) -> Any:
        process = self._process
        assert process is not None
        until = time.monotonic() + seconds + grace
        try:
            answer = (_talk if os.name == "posix" else _talk_watched)(process, line, until)
        except BaseException:
            self._stop()
            raise
        if answer.startswith(b"Timeout ("):  # faulthandler's words: the stack follows, then the end
            self._stop()
            raise ChildTimeout(seconds, answer.decode("utf-8", "replace"))
        if not answer.endswith(b"\n"):
            late = time.monotonic() >= until - grace
            status = self._stop(wait=0.0 if late else 1.0)
            if late:
                raise ChildTimeout(seconds, "")
            raise ChildDied(status)
        return json.loads(answer)

    def _stop(self, wait: float = 0.0) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        status: int | None = None
        if self._owner == os.getpid():  # after a fork the process is the parent's: only our copies of the pipes go
            if wait:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(wait)
            _kill(process)
            process.wait()
        else:
            process.returncode = 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status


def _talk(process: subprocess.Popen[bytes], line: bytes, until: float) -> bytes:
    """Write a line, read a line; whatever came by ``until`` or by the end of the child's output (see ``_exchange``)."""
    assert process.stdin is not None and process.stdout is not None
    inward, outward = process.stdin.fileno(), process.stdout.fileno()
    poll = select.poll()
    poll.register(outward, select.POLLIN)
    rest = memoryview(line)
    if rest:
        poll.register(inward, select.POLLOUT)
    answer = bytearray()
    while True:
        ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        if not ready:
            return bytes(answer) if answer.startswith(b"Timeout (") else b""
        for descriptor, _ in ready:
            if descriptor == inward:
                try:
                    rest = rest[os.write(inward, rest) :]
                except BlockingIOError:
                    continue
                except OSError:  # it has died: its output tells
                    rest = rest[len(rest) :]
                if not rest:
                    poll.unregister(inward)
            else:
                try:
                    piece = os.read(outward, 1 << 16)
                except BlockingIOError:
                    continue
                answer += piece
                if not piece or (piece.endswith(b"\n") and not answer.startswith(b"Timeout (")):
                    return bytes(answer)


def _talk_watched(process: subprocess.Popen[bytes], line: bytes, until: float) -> bytes:
    """The same with blocking pipes and a timer that kills: for systems that cannot poll pipes (slower)."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(max(0.0, until - time.monotonic()), _kill, (process,))
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline()
        return answer + process.stdout.read() if answer.startswith(b"Timeout (") else answer
    finally:
        timer.cancel()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


_ALIVE: weakref.WeakSet[Child] = weakref.WeakSet()


def trace_lines(trace: str, skip: Sequence[str] = ()) -> list[tuple[str, int, str]]:
    """(file, line, function) of a faulthandler dump's first thread, innermost first, without the files in ``skip``."""
    found: list[tuple[str, int, str]] = []
    for line in trace.splitlines():
        text = line.strip()
        if not text:
            if found:
                break
            continue
        if text.startswith("File ") and ", line " in text and " in " in text:
            file, _, rest = text[5:].rpartition(", line ")
            number, _, function = rest.partition(" in ")
            file = file.strip('"')
            if number.isdigit() and file not in skip:
                found.append((file, int(number), function))
    return found


def guest_place(trace: str) -> str:
    """``file:line in function`` of a faulthandler dump's main thread: of the guest's own code where it shows, else of
    any that is not ours; "" if the child could not say."""
    ours = tuple(str(path) for path in FOLDER.glob("*.py"))
    blocks = trace.split("\n\n")  # a thread each, the main one last
    main = next((block for block in reversed(blocks) if any(path in block for path in ours)), trace)
    frames = [frame for frame in trace_lines(main, ours) if not frame[0].startswith("<")]
    if not frames:
        return ""
    guest = [frame for frame in frames if not frame[0].startswith((sys.prefix, sys.base_prefix))]
    file, line, function = (guest or frames)[0]
    return f"{Path(file).name}:{line} in {function}"


@atexit.register
def close_all() -> None:
    """End every child of this process."""
    for child in list(_ALIVE):
        child.close()
