"""A made-up model in NumPy behind the engine protocol: what the loop's tests run on, in milliseconds.

Text is bytes, one token each. The model reads a conversation as a vector of signs, sends it through a hidden layer and
prints the one number that comes out, so every weight decides what is written, and a reward that likes another number
can be climbed::

    x = +-1 by a hash of the conversation     (24)
    y = sum(W2 tanh(W1 x / 4 + b))            text: "%.3f" % y

The perturbed weights of a member are built in full here, from the exact delta, in every view.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgees import noise
from edgees import tools as calls
from edgees.backends.base import Completion, Member, Memory, Progress, Request, Score, Source, TensorInfo
from edgees.errors import EngineError, ModelError, UsageError

if TYPE_CHECKING:
    from edgees.delta import Delta

FEATURES, HIDDEN, OUTPUTS = 24, 12, 2
_ROLES = {"system": 256, "user": 257, "assistant": 258}
_END = 259
_OPTIONS = {"seed": 0.0, "delay": 0.0, "context": 4096.0}


class ToyEngine:
    """``model``: ``toy``, or with options ``toy:seed=3,delay=0.01,context=200`` (delay: seconds per request).

    ``params``: regular expression of the tensors to tune.
    """

    name = "toy"

    def __init__(self, model: str = "toy", *, params: str = "") -> None:
        options = _options(model)
        self.context_length = int(options["context"])
        self._delay = options["delay"]
        seed = int(options["seed"])
        self.base: dict[str, np.ndarray] = {}
        self._tensors: list[TensorInfo] = []
        self._frozen: list[tuple[str, str]] = []
        shapes = {
            "model.hidden.weight": (HIDDEN, FEATURES), "model.hidden.bias": (1, HIDDEN),
            "model.out.weight": (OUTPUTS, HIDDEN),
        }  # fmt: skip
        for name, (rows, cols) in shapes.items():
            vector = name.endswith("bias")
            eps = noise.eps("normal", noise.make_key(seed, 0, 0), noise.tensor_id(name), rows, cols, vector=vector)
            base = (np.round(eps * 4) / 8).astype(np.float32)  # on a coarse grid, as a 4-bit file's weights are
            self.base[name] = base
            rho = float(np.float32(np.sqrt(np.mean(base.astype(np.float64) ** 2))))
            if params and not re.search(params, name):
                self._frozen.append((name, f"not matched by params = {params}"))
                continue
            self._tensors.append(TensorInfo(name, name.replace("model.", "blk."), rows, cols, vector, rho))
        if not self._tensors:
            raise UsageError(f"params = {params!r} matches no tensor", f"there are: {', '.join(shapes)}")
        digest = hashlib.sha256(b"".join(w.tobytes() for w in self.base.values())).hexdigest()
        self.base_hash = f"sha256:{digest}"
        self._delta: Delta | None = None
        self._centre: dict[str, np.ndarray] = dict(self.base)
        self._pools: dict[str, np.ndarray] = {}

    @property
    def tensors(self) -> list[TensorInfo]:
        return list(self._tensors)

    @property
    def frozen(self) -> list[tuple[str, str]]:
        return list(self._frozen)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        said = calls.normal(messages)
        tokens: list[int] = []
        for message in calls.plain(said, tools) if calls.needed(said, tools) else said:
            tokens += [_ROLES[message["role"]], *message["content"].encode(), _END]
        return [*tokens, _ROLES["assistant"]]

    def attach(self, delta: Delta) -> None:
        self._delta = delta
        spec = delta.spec
        wrong = [t.name for t in spec.tensors if t.name not in self.base or self.base[t.name].shape != (t.rows, t.cols)]
        if wrong:
            raise UsageError(f"the toy model lacks tensors of this run, or has them in another shape: {wrong}")
        self._pools = {}
        if spec.view == "adapter":
            for info in spec.tensors:
                if not info.vector:
                    self._pools[info.name] = noise.pool(spec.seed, info.id, info.cols, spec.factors)
        self.refresh()

    def refresh(self) -> None:
        if self._delta is None:
            raise EngineError("refresh before attach")
        self._centre = dict(self.base)
        for info in self._delta.spec.tensors:
            self._centre[info.name] = self.base[info.name] + self._delta.rows(info.name, 0, info.rows)

    def weights(self, member: Member) -> dict[str, np.ndarray]:
        """float32 weights of a member, by name: base + delta + its noise."""
        if member.amplitude == 0.0:
            return self._centre
        if self._delta is None:
            raise EngineError("a perturbed member needs an attached delta")
        weights = dict(self._centre)
        for info in self._delta.spec.tensors:
            weights[info.name] = weights[info.name] + np.float32(
                member.amplitude * self._delta.spec.scale(info)
            ) * self._noise(info, member)
        return weights

    def check_grammar(self, grammar: str) -> None:
        raise UsageError("engine toy answers with numbers, whatever a grammar says", "engine = llamacpp")

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        done: list[Completion] = []
        tokens = 0
        for request in requests:
            value = self._forward(self.weights(request.member), request.prompt)
            if request.temperature > 0.0:
                key = noise.make_key(request.seed, 0, 0)
                value += request.temperature * float(noise.eps("normal", key, 0, 1, 1, vector=True)[0, 0])
            text = f"{value:.3f}"
            for stop in request.stop:
                text = text.partition(stop)[0]
            room = self.context_length - len(request.prompt)
            outcome = "stop"
            if len(text) > min(room, request.max_tokens):
                outcome = "length" if request.max_tokens <= room else "overflow"
                text = text[: max(0, min(room, request.max_tokens))]
            done.append(Completion(text, tuple(text.encode()), outcome))
            tokens += len(request.prompt) + len(text)
            self._tick(progress, len(done), tokens)
        return done

    def serve(self, source: Source, progress: Progress | None = None) -> None:
        done = tokens = 0
        while (taken := source.take(32, True)) is not None:
            for ticket, request in taken:
                [completion] = self.generate([request])
                source.piece(ticket, completion.text.encode())
                source.done(ticket, completion)
                done, tokens = done + 1, tokens + len(request.prompt) + len(completion.tokens)
                self._tick(progress, done, tokens)

    def loglik(
        self, requests: Sequence[tuple[Member, tuple[int, ...], tuple[int, ...]]], progress: Progress | None = None
    ) -> list[Score]:
        """A normal density round the number that the model would print: mean per token is -(y - target)^2."""
        scores: list[Score] = []
        tokens = 0
        for member, prompt, target in requests:
            value = self._forward(self.weights(member), prompt)
            try:
                wanted = float(bytes(t for t in target if t < 256).decode())
            except ValueError:
                wanted = value + 10.0
            scores.append(Score(-((value - wanted) ** 2) * len(target), len(target)))
            tokens += len(prompt) + len(target)
            self._tick(progress, len(scores), tokens)
        return scores

    def memory(self) -> Memory:
        size = sum(w.nbytes for w in self.base.values())
        return Memory(weights=size, learned=size)

    def close(self) -> None:
        self._delta = None

    def _noise(self, info: TensorInfo, member: Member) -> np.ndarray:
        assert self._delta is not None
        spec = self._delta.spec
        if spec.view != "adapter" or info.vector:
            eps = noise.eps(spec.kind, member.key, info.id, info.rows, info.cols, rank=spec.rank, vector=info.vector)
            return np.asarray(eps)
        total = np.zeros((info.rows, info.cols), np.float32)
        for j in range(spec.rank):
            a = noise.sign_vector(member.key, info.id, noise.LEFT + j, info.rows)
            total += np.outer(a, self._pools[info.name][:, (member.slot * spec.rank + j) % spec.factors])
        return np.asarray(total * np.float32(1 / np.sqrt(spec.rank)))

    def _forward(self, weights: dict[str, np.ndarray], prompt: Sequence[int]) -> float:
        digest = hashlib.blake2b(b"".join(t.to_bytes(2, "little") for t in prompt), digest_size=4).digest()
        bits = np.unpackbits(np.frombuffer(digest, np.uint8))[:FEATURES]
        x = 1.0 - 2.0 * bits.astype(np.float64)
        hidden = np.tanh((weights["model.hidden.weight"] * x).sum(axis=1) / 4 + weights["model.hidden.bias"][0])
        return float((weights["model.out.weight"] * hidden).sum())

    def _tick(self, progress: Progress | None, done: int, tokens: int) -> None:
        if self._delay:
            time.sleep(self._delay)
        if progress is not None:
            progress(done, tokens)


def _options(model: str) -> dict[str, float]:
    name, _, rest = model.partition(":")
    options = dict(_OPTIONS)
    if name != "toy":
        raise ModelError(f"engine toy runs the model 'toy', not {model!r}", "--model toy")
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            if key not in options:
                raise ValueError
            options[key] = float(value)
        except ValueError:
            raise ModelError(f"{model!r}: {item!r} is none of {', '.join(options)} with a number") from None
    return options
