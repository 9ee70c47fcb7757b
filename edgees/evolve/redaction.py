"""What looks like a secret is masked before a text leaves the machine; a user's hook may mask more.

Patterns find what has a pattern. A password in plain words, a name, an address pass: what must not leave the machine
is best kept from a reflecting model elsewhere, or masked by a hook that knows the data.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgees.evolve.function import DEADLINE_S, FunctionFailed, UserFunction

_PATTERNS: list[tuple[str, re.Pattern[str]]] = [
    ("private key", re.compile(r"(?s)-----BEGIN [A-Z\d ]*PRIVATE KEY-----.*?(?:-----END [A-Z\d ]*KEY-----|\Z)")),
    ("token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})")),
    ("token", re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|xox[abprs]-[\w-]{10,})")),
    ("token", re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*")),
    ("key", re.compile(r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{12,}")),
    ("AWS key", re.compile(r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}\b")),
    ("AWS key", re.compile(r"(?i)(?<=aws_secret_access_key)([\"']?\s*[:=]\s*[\"']?)[A-Za-z0-9/+=]{30,}")),
    ("token", re.compile(r"(?i)\b(?:bearer|basic)\s+(?=[\w.~+/=-]*\d)[\w.~+/-]{8,}=*")),
    ("password", re.compile(r"(?i)(?<=://)[^\s/:@]{1,80}:[^\s/@]{1,80}(?=@)")),
    ("secret", re.compile(r"(?i)(?<![a-z])(?:api_?key|secret|password|token)[\"']?\s*[:=]\s*[\"']?[^\s\"',;]{6,}")),
    ("e-mail", re.compile(r"\b[\w.%+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")),
]  # fmt: skip


def masked(text: str) -> str:
    """A text with API keys, AWS keys, bearer tokens, private key blocks, passwords in addresses or assignments and
    e-mail addresses replaced by words such as ``[e-mail]``."""
    for what, pattern in _PATTERNS:
        text = pattern.sub(f"[{what}]", text)
    return text


class Redaction:
    """text -> text that may be sent: what :func:`masked` makes of it, or of what a user's hook made of it.

    hook: ``FILE.py[:FUNCTION]``, a function text -> text (named ``redact`` where none is given), in a child process.
    folder: what a relative file is relative to. deadline: seconds that a call may take. log: file for what it prints.
    :raises UsageError: there is no such file.
    """

    def __init__(
        self, hook: str | None = None, *, folder: Path | None = None, deadline: float = DEADLINE_S,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self._hook: UserFunction | None = None
        if hook:
            self._hook = UserFunction(hook, "redaction hook", "redact", folder=folder, deadline=deadline, log=log)

    def __call__(self, text: str) -> str:
        """:raises FunctionFailed: the hook failed; then nothing may be sent."""
        if self._hook is None:
            return masked(text)
        said = self._hook({"text": text})
        if not isinstance(said, str):
            raise FunctionFailed(f"the redaction hook {self._hook.spec} returned {type(said).__name__}, not a text")
        return masked(said)

    def close(self) -> None:
        """End the hook's process."""
        if self._hook is not None:
            self._hook.close()
