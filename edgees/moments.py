"""Second moments of what a model's matrices are multiplied with, gathered while it reads examples.

They say which rounding errors matter to a layer's output. llama.cpp shows every product to an evaluation callback
(public API; its imatrix tool does the same).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np

from edgees.backends.base import CENTRE
from edgees.backends.llamacpp import LlamaCppEngine, install

LARGEST = 8192
"""Columns up to which a full matrix of moments is kept: it takes 4 * columns^2 bytes."""
BUDGET = 1 << 30
"""Bytes that all of them may take; matrices that come later than that have none."""


class _Tensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml.h up to the name; the backend's self-test has compared the library with it."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    ]  # fmt: skip


class Moments:
    """means: by GGUF name of a matrix, float32 [cols, cols], mean of x x^T over the tokens seen (shared by matrices
    that are multiplied with the same thing)."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._tokens: dict[str, int] = {}
        self._owner: dict[str, str] = {}
        self._last = (0, "")

    def means(self) -> dict[str, np.ndarray]:
        done = {name: total / max(self._tokens[name], 1) for name, total in self._sums.items()}
        return {name: done[owner] for name, owner in self._owner.items() if owner in done}

    def see(self, name: str, source: int, x: np.ndarray) -> None:
        """``x`` float32 [tokens, cols], at address ``source`` in the graph, came to matrix ``name``. Matrices with a
        common input (q, k, v; gate, up) come one after the other."""
        before, self._last = self._last, (source, name)
        if name not in self._owner:
            self._owner[name] = self._owner[before[1]] if before[0] == source else name
            cols = x.shape[1]
            used = sum(total.nbytes for total in self._sums.values())
            if self._owner[name] == name and cols <= LARGEST and used + 4 * cols * cols <= BUDGET:
                self._sums[name], self._tokens[name] = np.zeros((cols, cols), np.float32), 0
        if name in self._sums:
            self._sums[name] += x.T @ x
            self._tokens[name] += len(x)


def gather(engine: LlamaCppEngine, texts: Sequence[Sequence[int]], names: Collection[str]) -> dict[str, np.ndarray]:
    """:meth:`Moments.means` of the matrices ``names`` while ``engine`` reads token ids.

    engine: freshly opened, ours with a delta attached, or plain; it goes on watching, so close it afterwards.
    """
    install()  # has compared our idea of ggml's structures with the library's
    wanted = {name.encode(): name for name in names}
    found = Moments()

    def watch(address: int, ask: bool, _: object) -> bool:
        node = _Tensor.from_address(address)
        name = wanted.get(_Tensor.from_address(node.src[0]).name) if node.src[0] and node.src[1] else None
        if name is None or ask:
            return name is not None
        x = _Tensor.from_address(node.src[1])
        tokens = x.ne[1] * x.ne[2] * x.ne[3]
        if tokens:
            flat = (ctypes.c_float * (x.ne[0] * tokens)).from_address(x.data)
            found.see(name, node.src[1], np.ctypeslib.as_array(flat).reshape(tokens, x.ne[0]))
        return True

    engine.context_options["cb_eval"] = engine.api.ggml_backend_sched_eval_callback(watch)
    engine.loglik([(CENTRE, tuple(text[:-1]), tuple(text[-1:])) for text in texts if len(text) > 1])
    return found.means()
