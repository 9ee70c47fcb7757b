"""What a command line becomes before it is run: whole paths, since it runs elsewhere, and a sandbox round it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgees.errors import UsageError


def words_of(command: str) -> list[str]:
    """A command's words, files in it (also after ``--option=``) with their whole paths: it will run elsewhere.

    ``python`` is the one of the active environment, and where none is active the one that edgees itself runs on.

    :raises UsageError: it cannot be read, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the agent command cannot be read: {error}: {command}", "check its quotes") from error
    if not words:
        raise UsageError("the agent command is empty", 'write it as for a shell: "python my_agent.py"')
    active = any(os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    program = None if words[0] in ("python", "python3") and not active else shutil.which(words[0])
    if program is None and words[0] in ("python", "python3"):
        program = sys.executable
    if program is None:
        raise UsageError(f"there is no program {words[0]} that could be run", "give its path, or install it")
    return [os.path.abspath(program), *map(_whole_path, words[1:])]


def _whole_path(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    is_path = os.path.isfile(value) or (os.sep in value and os.path.isdir(value))
    return f"{option}{equals}{os.path.abspath(value)}" if is_path else word


class Sandbox:
    """bubblewrap, where it is there and works; ``note`` says when not. The network stays: the model is on loopback."""

    def __init__(self, command: Sequence[str]) -> None:
        self.program = shutil.which("bwrap")
        self.note = ""
        # An empty /tmp, unless something of the program is there.
        paths = [*command, sys.prefix, os.environ.get("VIRTUAL_ENV", "")]
        self.hidden = [] if any("/tmp/" in path for path in paths) else ["--tmpfs", "/tmp"]
        if self.program is None:
            self.note = "agent programs run without a sandbox, with all your rights: bubblewrap (bwrap) is not there"
            return
        with tempfile.TemporaryDirectory(prefix="edgees-agent-") as folder:
            trial = [*self.prefix(Path(folder).resolve()), sys.executable, "-I", "-S", "-c", ""]
            try:
                subprocess.run(trial, check=True, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error).encode()
                self.program = None
                why = said.decode("utf-8", "replace").strip()[-200:]
                self.note = f"agent programs run without a sandbox, with all your rights: bwrap does not work ({why})"

    def prefix(self, folder: Path) -> list[str]:
        """What comes before a command that may write to ``folder`` alone."""
        if self.program is None:
            return []
        return [
            self.program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", *self.hidden,
            "--bind", str(folder), str(folder), "--unshare-pid", "--unshare-ipc", "--die-with-parent",
            "--chdir", str(folder), "--",
        ]  # fmt: skip
