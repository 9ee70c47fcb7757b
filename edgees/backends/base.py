"""The engine protocol: all that the loop knows about whatever runs the model.

An engine holds one quantised base model and answers for many *members* at once. A member is
the base plus what has been learned so far (``delta``) plus one seeded perturbation; no
perturbed copy of the weights exists anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edgees.noise import tensor_id

if TYPE_CHECKING:
    from edgees.delta import Delta


@dataclass(frozen=True)
class TensorInfo:
    """One tuned tensor.

    name: canonical (Hugging Face) name, the one the noise is seeded by.
    source: the engine's own name (GGUF name, module path).
    rows, cols: shape in Hugging Face layout; ``rows == 1`` and ``vector`` for 1-D tensors.
    rho: root-mean-square of the base weights, float32 exact, > 0.
    heads: ``n_head`` if llama.cpp stores the rows permuted for rotary embeddings, else 0;
        row ``h*hd + 2*j + i`` in the file is row ``h*hd + i*hd/2 + j`` here (hd = rows/heads).
    amplitude: multiplies sigma and steps for this tensor (setting ``amplitudes``); engines leave it at 1.
    """

    name: str
    source: str
    rows: int
    cols: int
    vector: bool
    rho: float
    heads: int = 0
    amplitude: float = 1.0

    @property
    def id(self) -> int:
        return tensor_id(self.name)

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def source_to_canonical(self) -> np.ndarray | None:
        """int32 [rows]: canonical row of each row of the file, or None where they agree."""
        if not self.heads:
            return None
        hd = self.rows // self.heads
        index = np.arange(self.rows, dtype=np.int32).reshape(self.heads, 2, hd // 2)
        return np.ascontiguousarray(index.transpose(0, 2, 1).reshape(-1))


@dataclass(frozen=True)
class Member:
    """One perturbation: ``amplitude * rho_T * eps(key)`` is added to every tuned tensor.

    ``amplitude = sign * sigma``; 0 is the unperturbed centre, whatever the key.
    ``slot`` counts perturbations over the whole run (``generation * pairs + pair``): the adapter view
    takes its right factors from the pool by it.
    """

    key: int
    amplitude: float
    slot: int = 0
    pair: int = 0
    sign: int = 1


CENTRE = Member(key=0, amplitude=0.0)


@dataclass(frozen=True)
class Request:
    """One text to complete. ``seed`` drives sampling and is shared by all members of a row.

    grammar: GBNF that the reply has to follow, where :meth:`Engine.check_grammar` does not refuse it; empty: none.
    """

    member: Member
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    grammar: str = ""


@dataclass(frozen=True)
class Completion:
    """``outcome``: ``stop`` (end of turn), ``length`` (token limit), ``overflow`` (context full).

    ``text`` excludes the end-of-turn token and any stop string; a multi-byte character cut by the limit is
    dropped. ``tokens`` are those generated, without the end-of-turn token.
    """

    text: str
    tokens: tuple[int, ...]
    outcome: str


@dataclass(frozen=True)
class Score:
    """Likelihood of a reference answer: ``sum`` of natural log-probabilities over ``tokens`` target tokens."""

    sum: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.sum / max(self.tokens, 1)


@dataclass
class Memory:
    """Bytes: what the engine itself allocated, by purpose (``weights`` is file-backed)."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    learned: int = 0
    extra: dict[str, int] = field(default_factory=dict)


class Source(Protocol):
    """Requests that come while others are being answered: turns of episodes, clients of an endpoint.

    Everything here is called from the engine's thread, between two steps.
    """

    def take(self, room: int, idle: bool) -> Sequence[tuple[int, Request]] | None:
        """At most ``room`` new requests, each with a ticket of the source's own choice; None: no more will come.

        idle: nothing is running, so that the source may wait for a request, for a fraction of a second.
        """

    def piece(self, ticket: int, data: bytes) -> bool:
        """More of a reply, as UTF-8, perhaps cut within a character or a stop string; False: nobody wants the rest."""

    def done(self, ticket: int, completion: Completion) -> None:
        """A reply is complete. May make new requests available to ``take``."""


Progress = Callable[[int, int], None]
"""Called with (requests finished, tokens processed so far) now and then."""


class Engine(Protocol):
    """What ``tune`` needs. All methods are called from one thread."""

    name: str

    @property
    def tensors(self) -> list[TensorInfo]:
        """Tuned tensors, in a fixed order."""

    @property
    def frozen(self) -> list[tuple[str, str]]:
        """(tensor, reason) of those that stay as they are."""

    @property
    def base_hash(self) -> str:
        """``sha256:...`` of the base model's file(s)."""

    @property
    def context_length(self) -> int:
        """Tokens one sequence may have."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of the conversation by the model's chat template, generation prompt added.

        messages: as in OpenAI's chat API (``tool_calls`` and the role ``tool`` included), contents as text; what stands
        in them is text to the model, even where it looks like a control token. tools: function schemas of that API.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no special tokens added or parsed."""

    def check_grammar(self, grammar: str) -> None:
        """:raises UsageError: no reply can be made to follow it."""

    def attach(self, delta: Delta) -> None:
        """Make ``delta`` part of every member from now on."""

    def refresh(self) -> None:
        """``delta`` has changed: rebuild whatever is derived from it (planes, factors)."""

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]: ...

    def serve(self, source: Source, progress: Progress | None = None) -> None:
        """Answer requests as they come, until the source has no more. A request's answer is that of ``generate``."""

    def loglik(
        self, requests: Sequence[tuple[Member, tuple[int, ...], tuple[int, ...]]], progress: Progress | None = None
    ) -> list[Score]:
        """For each (member, prompt, target): the log-likelihood of target after prompt."""

    def memory(self) -> Memory: ...

    def close(self) -> None: ...
