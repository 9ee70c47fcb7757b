"""Every way in which edgees refuses: one exception per cause, each with an exit code and a hint.

The command line prints ``error: <message>`` and ``hint: <hint>`` and leaves with
``exit_code``; library users catch :class:`EdgeesError`.
"""

from __future__ import annotations


class EdgeesError(Exception):
    """Base of all refusals. ``exit_code``: 1 runtime, 2 usage, 3 will not fit, 4 scorer, 130 interrupted."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(EdgeesError):
    """A flag, configuration key or path that cannot mean anything."""

    exit_code = 2


class DataError(UsageError):
    """A row of the user's data is unreadable: file and line are in the message."""


class ModelError(UsageError):
    """The model file is missing, damaged, or of a kind that cannot be tuned."""


class RunError(UsageError):
    """A run folder is missing, damaged, or contradicts what is asked of it."""


class MissingExtra(UsageError):
    """An optional package is needed for what was asked."""


class WillNotFit(EdgeesError):
    """Not enough memory or disk; nothing was written."""

    exit_code = 3


class ScorerError(EdgeesError):
    """The user's scorer (or agent) raised, hung, or returned something that is no reward."""

    exit_code = 4


class NoSignal(EdgeesError):
    """Rewards do not differ between members, whatever the size of their perturbation: nothing could be learned."""


class TemplateError(EdgeesError):
    """A chat template was refused, failed, or ran over its limits of time or memory."""


class NativeError(EdgeesError):
    """The compiled library is missing, of another version, or reported an internal fault."""


class EngineError(EdgeesError):
    """The inference engine failed or could not be trusted (self-test, unmapped columns)."""


class ExportError(EdgeesError):
    """An export could not be written or did not verify."""


class Interrupted(EdgeesError):
    """Ctrl-C: the state is saved and ``edgees resume`` goes on from it."""

    exit_code = 130
