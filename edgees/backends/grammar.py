"""Replies that a grammar lets through: tokens are offered to llama.cpp's own grammar sampler, best first."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from edgees.errors import UsageError

FEW = 64
"""Candidates that are tried before the whole vocabulary is."""


class Grammar:
    """How far one reply has come in a grammar (GBNF, the form that llama.cpp's ``grammars/README.md`` specifies).

    stop: the engine's tokens that end a turn; they may come where the grammar may end. control: whether a token is none
    of text; such a one never may.

    :raises UsageError: llama.cpp cannot read the grammar.
    """

    def __init__(self, api: Any, vocab: Any, text: str, stop: frozenset[int], control: Callable[[int], bool]) -> None:
        self._api, self._vocab, self._stop, self._control = api, vocab, stop, control
        self._end = next((t for t in sorted(stop) if api.llama_vocab_is_eog(vocab, t)), api.llama_vocab_eos(vocab))
        readable = bool(text) and "\0" not in text  # an empty one would allow everything
        self._own(api.llama_sampler_init_grammar(vocab, text.encode(), b"root") if readable else None)

    def _own(self, sampler: Any) -> None:
        if not sampler:
            raise UsageError(
                "the grammar cannot be read",
                'GBNF as llama.cpp reads it, with a rule named root: root ::= "yes" | "no"',
            )
        self._sampler = sampler
        weakref.finalize(self, self._api.llama_sampler_free, sampler)

    def begin(self) -> Grammar:
        """The same grammar for another reply."""
        other = object.__new__(Grammar)
        other.__dict__.update(self.__dict__)
        other._own(self._api.llama_sampler_clone(self._sampler))
        return other

    def allowed(self, tokens: np.ndarray) -> np.ndarray:
        """Of int tokens [n] whether each may come next, bool [n]."""
        api = self._api
        data = (api.llama_token_data * len(tokens))()
        for at, token in enumerate(map(int, tokens)):
            data[at].id = self._end if token in self._stop else token
        array = api.llama_token_data_array(data, len(tokens), -1, False)
        api.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.array(
            [
                d.logit == 0.0 and (token in self._stop or not self._control(token))
                for d, token in zip(data, map(int, tokens), strict=True)
            ]
        )

    def choose(self, scores: np.ndarray) -> int:
        """The token of the highest score (of equal ones the first) that may come next, which is then taken as said.

        scores: float32 [vocabulary]. Where none may, the turn ends.
        """
        token = int(np.argmax(scores))
        if not self.allowed(np.array([token]))[0]:
            token = self._best(scores)
        if token not in self._stop:
            self._api.llama_sampler_accept(self._sampler, token)
        return token

    def _best(self, scores: np.ndarray) -> int:
        order = np.argsort(-scores, kind="stable")
        for part in (order[1:FEW], order[FEW:]):
            good = np.flatnonzero(self.allowed(part))
            if len(good):
                return int(part[good[0]])
        return min(self._stop)
