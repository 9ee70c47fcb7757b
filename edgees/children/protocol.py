"""The child's side of the JSON lines. Run inside the child only; imports the standard library alone."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def serve(handle: Callable[[dict[str, Any]], Any], traced: bool = True) -> None:
    """Answer each line of standard input with one line; ends with the input or with the parent.

    The protocol moves to private descriptors first, so that whatever the guest code prints goes to stderr and
    whatever it reads is empty. ``handle`` gets the request and returns what JSON can hold. ``traced``: at the
    deadline the child says where the guest was (a thread per call, about half a millisecond); else it is just killed.
    """
    inward, outward = os.dup(0), os.dup(1)  # dup'ed descriptors are not inherited by processes the guest starts
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    with open(inward, "rb") as requests, open(outward, "wb", buffering=0) as answers:
        _send(answers, {"hello": True})
        for line in requests:
            request = json.loads(line)
            if traced:  # a C thread, so it works even where the guest holds the interpreter lock
                faulthandler.dump_traceback_later(float(request["seconds"]), exit=True, file=answers)
            answer = handle(request)
            if traced:
                faulthandler.cancel_dump_traceback_later()
            _send(answers, answer)


def limit(size: int) -> None:
    """Bytes of address space beyond what is in use now; 0: none. A no-op where the system has no such limit."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return
    # The deadline's and the watcher's threads reserve stacks of 8 MiB and an arena of 64 MiB each.
    resource.setrlimit(resource.RLIMIT_AS, (in_use + size + (256 << 20), resource.RLIM_INFINITY))


def _send(stream: Any, answer: Any) -> None:
    data = memoryview(json.dumps(answer).encode("ascii") + b"\n")
    while data:
        data = data[stream.write(data) :]


def _follow_parent(parent: int) -> None:
    # A parent killed by `kill -9` cannot close us, and guest code in an endless loop never reads the end of its input.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
