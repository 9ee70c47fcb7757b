"""What every engine promises the loop: one suite over the toy, llama.cpp and torch, each against its own oracle.

The oracle of an engine is a model whose weights were written out in full: base as the engine holds it, plus what was
learned, plus the member's noise from :mod:`edgees.noise`. It runs in NumPy, in stock llama.cpp, in transformers.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_models
import hf_tokenizers
import numpy as np
import pytest
from models import tiny_gguf
from test_llamacpp import SEED, member, perturbation

from edgees import noise
from edgees.backends.base import CENTRE, Completion, Member, Request, TensorInfo
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.backends.toy import ToyEngine
from edgees.delta import Delta, DeltaSpec, Step
from edgees.errors import EdgeesError, UsageError
from edgees.gguf_file import GgufFile, write_like

QUESTIONS = (
    "a", "one two three four five six seven eight nine ten", "the cat sat", "x" * 40, "hello, hello", "zz 9",
)  # fmt: skip
Weights = dict[str, np.ndarray]


class Kind:
    """How to open an engine, and its oracle. exact: order and company change no bit; bound: nats per token."""

    exact = True
    bound = 0.01

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.make("model", 0)

    def make(self, name: str, seed: int) -> Any:
        raise NotImplementedError

    def open(self, model: Any = None, **options: Any) -> Any:
        raise NotImplementedError

    def held(self, engine: Any, t: TensorInfo) -> np.ndarray:
        """float32 [rows, cols]: what the centre is computed with, in the order of :func:`perturbation`."""
        return np.asarray(engine.effective(t.source))

    def oracle(self, engine: Any, weights: Weights, prompt: Sequence[int], target: Sequence[int]) -> float:
        """Log-likelihood per token of ``target`` under a model of these weights (by ``source``)."""
        raise NotImplementedError


class Toy(Kind):
    bound = 1e-6

    def make(self, name: str, seed: int) -> Any:
        return f"toy:seed={seed}"

    def open(self, model: Any = None, **options: Any) -> Any:
        context = f",context={options['context']}" if "context" in options else ""
        return ToyEngine(f"{model or self.model}{context}", params=options.get("params", ""))

    def held(self, engine: Any, t: TensorInfo) -> np.ndarray:
        return np.asarray(engine.weights(CENTRE)[t.name])

    def oracle(self, engine: Any, weights: Weights, prompt: Sequence[int], target: Sequence[int]) -> float:
        names = {t.source: t.name for t in engine.tensors}
        w = {names[source]: x.astype(np.float64) for source, x in weights.items()}
        bits = ToyEngine._forward(engine, w, prompt)
        return -((bits - float(bytes(target))) ** 2)


class LlamaCpp(Kind):
    bound = 0.02

    def make(self, name: str, seed: int) -> Any:
        return tiny_gguf(self.folder / f"{name}.gguf", "llama", quant="Q4_1", seed=seed)

    def open(self, model: Any = None, **options: Any) -> Any:
        return LlamaCppEngine(model or self.model, threads=2, **options)

    def oracle(self, engine: Any, weights: Weights, prompt: Sequence[int], target: Sequence[int]) -> float:
        out = self.folder / "written.gguf"
        data = {
            n: ("F32", lambda w=w: iter([w.astype(np.float32).reshape(-1).view(np.uint8)])) for n, w in weights.items()
        }
        with GgufFile(engine.path) as file:
            write_like(file, out, data)
        with LlamaCppEngine(out, plain=True) as stock:
            return float(stock.loglik([(CENTRE, tuple(prompt), tuple(target))])[0].mean)


class Torch(Kind):
    exact = False
    bound = 0.02

    def make(self, name: str, seed: int) -> Any:
        return hf_models.tiny_hf(self.folder / name, "llama", seed=seed)

    def open(self, model: Any = None, **options: Any) -> Any:
        from edgees.backends.torch_nf4 import TorchEngine

        return TorchEngine(model or self.model, device="cpu", threads=2, **options)

    def oracle(self, engine: Any, weights: Weights, prompt: Sequence[int], target: Sequence[int]) -> float:
        from test_torch_engine import logits_of, reference

        logits = logits_of(reference(engine, weights), [*prompt, *target[:-1]])[len(prompt) - 1 :]
        return sum(float(row[t] - np.log(np.exp(row).sum())) for row, t in zip(logits, target, strict=True)) / len(
            target
        )


KINDS = {"toy": Toy, "llamacpp": LlamaCpp, "torch": Torch}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "torch":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


def attach(
    engine: Any, folder: Path, view: str = "refined", bits: int = 4, kind: str = "lowrank", rank: int = 1
) -> Delta:
    spec = DeltaSpec(tuple(engine.tensors), view, bits if view == "refined" else 0, 8, kind, rank, SEED)
    delta = Delta.create(folder / "delta.safetensors", spec)
    engine.attach(delta)
    return delta


def step(delta: Delta, size: float = 0.05) -> None:
    """One update of ``size`` times each tensor's RMS."""
    g = delta.generation
    keys = tuple(noise.make_key(SEED, g, p) for p in range(4))
    coefs = tuple(float(np.float32(size / 2 * s)) for s in (1, -1, 1, 1))
    delta.apply(Step(g, keys, tuple(4 * g + p for p in range(4)), coefs, 1.0))


def prompt_of(engine: Any, text: str = "count to ten, please") -> tuple[int, ...]:
    return tuple(engine.encode_chat([{"role": "user", "content": text}]))


def target_of(engine: Any) -> tuple[int, ...]:
    return tuple(engine.encode("0.5"))


def asked(engine: Any, temperature: float = 0.0) -> list[Request]:
    members = (member(0, 0.1), member(1, -0.1), CENTRE)
    return [
        Request(m, prompt_of(engine, text), 5 + 3 * i, temperature=temperature, seed=i)
        for i, text in enumerate(QUESTIONS)
        for m in members
    ]


# ---- what it is
def test_tensors(kind: Kind) -> None:
    engine, again = kind.open(), kind.open()
    try:
        tensors = engine.tensors
        assert tensors == again.tensors and not engine.frozen
        assert len({t.name for t in tensors}) == len({t.source for t in tensors}) == len({t.id for t in tensors})
        for t in tensors:
            assert re.fullmatch(r"(model|lm_head)(\.\w+)+", t.name)
            w = kind.held(engine, t)
            assert w.shape == (t.rows, t.cols) and (t.rows == 1 or not t.vector)
            assert t.rho == np.float32(t.rho) > 0
            assert t.rho == pytest.approx(np.sqrt(np.mean(w.astype(np.float64) ** 2)), rel=1e-5)
            assert t.amplitude == 1.0
        some = kind.open(params="(hidden|q_proj).weight")
        assert {t.name for t in some.tensors} < {t.name for t in tensors}
        assert [t for t in tensors if re.search("(hidden|q_proj).weight", t.name)] == some.tensors
        assert len(some.frozen) == len(tensors) - len(some.tensors) and all("params" in why for _, why in some.frozen)
        some.close()
        with pytest.raises(EdgeesError, match="no tensor"):
            kind.open(params="nothing is called so")
    finally:
        engine.close()
        again.close()


def test_the_hash_is_the_base_s(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    found = engine.base_hash
    assert re.fullmatch("sha256:[0-9a-f]{64}", found)
    step(delta := attach(engine, tmp_path))
    engine.refresh()
    engine.generate(asked(engine)[:2])
    assert engine.base_hash == found
    engine.close()
    delta.close()
    for model, same in [(None, True), (kind.make("other", 1), False)]:
        other = kind.open(model)
        assert (other.base_hash == found) is same
        other.close()


def test_texts(kind: Kind) -> None:
    engine = kind.open()
    assert engine.encode("") == [] and engine.encode("ab") == engine.encode("ab") != engine.encode("ba")
    one = prompt_of(engine, "Größe 日本 \n 12")
    assert one == prompt_of(engine, "Größe 日本 \n 12") != prompt_of(engine, "Größe 日本 \n 13")
    inner = engine.encode("Größe 日本 \n 12")
    assert any(list(one[i : i + len(inner)]) == inner for i in range(len(one)))
    longer = engine.encode_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert longer[: len(prompt_of(engine, "a"))] == list(prompt_of(engine, "a"))  # so that prefixes can be shared
    engine.close()


def test_both_real_engines_read_alike(tmp_path: Path) -> None:
    """The GGUF of a folder and the folder: the same tokens for hostile texts, ends of a turn, and pieces."""
    pytest.importorskip("torch")
    from test_replay import four_bit_twin

    from edgees.backends.torch_nf4 import TorchEngine

    folder = hf_models.tiny_hf(tmp_path / "folder", "llama")
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
    with TorchEngine(folder, device="cpu") as a, LlamaCppEngine(four_bit_twin(folder, tmp_path / "m.gguf")) as b:
        for text in hf_tokenizers.TEXTS:
            assert a.encode(text) == b.encode(text), text
            chat = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
            assert a.encode_chat(chat) == b.encode_chat(chat), text
        assert a.end_of_turn() <= b.end_of_turn()  # llama.cpp has more, by their names
        assert all(a.piece(i) == b.piece(i) for i in range(a.vocabulary))
        assert {t.name: (t.rows, t.cols) for t in a.tensors} == {t.name: (t.rows, t.cols) for t in b.tensors}


# ---- answers
def test_outcomes(kind: Kind) -> None:
    engine = kind.open(context=64)
    prompts = [prompt_of(engine, text) for text in "abcdefgh"]
    whole = engine.generate([Request(CENTRE, p, 6) for p in prompts])
    for done in whole:
        assert done.outcome in ("stop", "length") and len(done.tokens) <= 6
    prompt, full = next((p, c) for p, c in zip(prompts, whole, strict=True) if len(c.tokens) >= 5)
    [short] = engine.generate([Request(CENTRE, prompt, 2)])
    assert (short.outcome, short.tokens) == ("length", full.tokens[:2]) and full.text.startswith(short.text)
    middle = full.text[2]
    [cut] = engine.generate([Request(CENTRE, prompt, 6, stop=("never to be seen", middle))])
    assert (cut.outcome, cut.text) == ("stop", full.text.partition(middle)[0])
    # Case 18: a full context ends that answer and no other.
    filler = (prompt[0], *engine.encode("ab" * 64))
    near, over, beside = engine.generate(
        [Request(CENTRE, filler[:62], 10), Request(CENTRE, (*filler, *prompt)[-64:], 10), Request(CENTRE, prompt, 2)]
    )
    assert len(near.tokens) <= 2 and near.outcome in ("overflow", "stop")
    assert (over.outcome, over.tokens, over.text) == ("overflow", (), "")
    assert beside == short
    fits, lacks, nothing = engine.loglik(
        [(CENTRE, prompt, target_of(engine)), (CENTRE, filler[:60], (9,) * 20), (CENTRE, prompt, ())]
    )
    assert math.isfinite(fits.sum) and fits.tokens == len(target_of(engine))
    assert (nothing.sum, nothing.tokens) == (0.0, 0)
    if isinstance(kind, Toy):  # its likelihood reads a number, of any length
        assert lacks.tokens == 20
    else:
        assert math.isnan(lacks.sum)
    engine.close()


def test_order_company_and_what_came_before_change_nothing(kind: Kind, tmp_path: Path) -> None:
    """Case 17. Torch's own sums depend on the shape of a batch: there the same call gives the same bits, any other
    order or company the same words and nearly the same likelihoods."""
    engine = kind.open(**({} if isinstance(kind, Toy) else {"parallel": 5}))
    attach(engine, tmp_path)
    for temperature in (0.0, 1.0):
        requests = asked(engine, temperature)
        together = engine.generate(requests)
        targets = [
            (r.member, r.prompt, (*target_of(engine), *target_of(engine))[: 1 + i % 6]) for i, r in enumerate(requests)
        ]
        likely = engine.loglik(targets)
        assert engine.generate(requests[::-1])[::-1] == together
        assert [engine.generate([r])[0] for r in requests[:6]] == together[:6]
        assert engine.generate(requests) == together and engine.loglik(targets) == likely
        backwards = engine.loglik(targets[::-1])[::-1]
        alone = [engine.loglik([t])[0] for t in targets]
        for a, b, c in zip(likely, backwards, alone, strict=True):
            assert (a == b == c) if kind.exact else max(abs(a.sum - b.sum), abs(a.sum - c.sum)) < 1e-4 * a.tokens
        assert len({s.sum for s in likely[:3]}) == 3  # three members, three models
    engine.close()


class Turns:
    """Conversations of several turns at once, each turn's prompt the last with its reply and some more behind it.

    ``seen``: requests and their answers by conversation. cancel: conversation whose second turn nobody waits for.
    """

    def __init__(self, requests: Sequence[Request], turns: int = 4, cancel: int = -1) -> None:
        self.ready = list(enumerate(requests))
        self.left = [turns] * len(requests)
        self.seen: list[list[tuple[Request, Completion]]] = [[] for _ in requests]
        self.out: dict[int, Request] = {}
        self.data: dict[int, bytes] = {}
        self.cancel = cancel
        self.refused = 0

    def take(self, room: int, idle: bool) -> list[tuple[int, Request]] | None:
        if not self.ready and not self.out:
            return None
        taken, self.ready = self.ready[:room], self.ready[room:]
        self.out |= dict(taken)
        return taken

    def piece(self, ticket: int, data: bytes) -> bool:
        self.data[ticket] = self.data.get(ticket, b"") + data
        if ticket == self.cancel and len(self.seen[ticket]) == 1:
            self.refused += 1
            return False
        return True

    def done(self, ticket: int, completion: Completion) -> None:
        request = self.out.pop(ticket)
        told = codecs.getincrementaldecoder("utf-8")("replace").decode(self.data.pop(ticket, b""), False)
        assert told == completion.text
        self.seen[ticket].append((request, completion))
        self.left[ticket] -= 1
        if self.left[ticket] and completion.outcome != "overflow":
            more = (request.prompt[5:] * 3)[: 3 + 7 * ticket]
            prompt = (*request.prompt, *completion.tokens, *more)
            self.ready.append((ticket, dataclasses.replace(request, prompt=prompt)))


def test_requests_that_come_while_others_run(kind: Kind, tmp_path: Path) -> None:
    """Each turn is answered as it would be alone, whatever the company, the streams' number and what they held."""
    engine = kind.open(**({} if isinstance(kind, Toy) else {"parallel": 5}))
    attach(engine, tmp_path)
    alone = kind.open(**({} if isinstance(kind, Toy) else {"parallel": 1}))
    (tmp_path / "alone").mkdir()
    attach(alone, tmp_path / "alone")
    for temperature in (0.0, 1.0):
        turns = Turns(asked(engine, temperature))
        engine.serve(turns)
        assert [len(seen) for seen in turns.seen] == [4] * len(turns.seen)
        told = [pair for seen in turns.seen for pair in seen]
        assert max(len(r.prompt) for r, _ in told) > 2 * max(len(r.prompt) for r, _ in told[::4])
        for request, completion in told if kind.exact else told[:6]:
            assert alone.generate([request]) == [completion]
    for some in (2, 4, 3):  # streams that were in use before the weights changed ride along
        engine.refresh()
        turns = Turns(asked(engine)[:some], turns=1 + some)
        engine.serve(turns)
        for request, completion in (pair for seen in turns.seen for pair in seen):
            assert not kind.exact or alone.generate([request]) == [completion]
    cancelled = Turns(asked(engine), turns=2, cancel=3)
    engine.serve(cancelled)
    assert all(len(seen) == 2 for seen in cancelled.seen)
    if not isinstance(kind, Toy):
        assert cancelled.refused == 1 and len(cancelled.seen[3][1][1].tokens) == 1
    engine.close()
    alone.close()


def test_a_conversation_that_outgrows_its_stream(kind: Kind, tmp_path: Path) -> None:
    """Case 18: streams are remade longer where one needs it; at the context's end that conversation overflows alone."""
    engine = kind.open(**({"context": 1100} if isinstance(kind, Toy) else {}))
    attach(engine, tmp_path)
    limit = engine.context_length
    requests = asked(engine)[::3]
    long = dataclasses.replace(requests[0], prompt=(requests[0].prompt * limit)[: limit - 3], max_tokens=9)
    over = dataclasses.replace(long, prompt=(*long.prompt, *long.prompt[:9]))
    turns = Turns([*requests, long, over], turns=2)
    engine.serve(turns)
    outcomes = [[c.outcome for _, c in seen] for seen in turns.seen]
    assert outcomes[-1] == ["overflow"] and outcomes[-2][0] in ("overflow", "stop")
    assert all(len(o) == 2 and "overflow" not in o for o in outcomes[:-2])
    engine.close()


def test_seeds_of_sampling(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    attach(engine, tmp_path)
    prompt = prompt_of(engine)

    def texts(m: Member, seeds: Sequence[int]) -> list[str]:
        return [c.text for c in engine.generate([Request(m, prompt, 8, temperature=1.0, seed=s) for s in seeds])]

    some = texts(CENTRE, range(6))
    assert texts(CENTRE, range(6)) == some and len(set(some)) > 3
    assert texts(member(0, 1e-7), range(6)) == some  # the draw is the row's, not the member's
    [greedy] = engine.generate([Request(CENTRE, prompt, 8, temperature=0.0, seed=3)])
    assert greedy == engine.generate([Request(CENTRE, prompt, 8, seed=4)])[0]
    engine.close()


def test_members(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    with pytest.raises(EdgeesError, match=r"noise|delta"):
        engine.generate([Request(member(0, 0.1), prompt_of(engine), 1)])
    with pytest.raises(EdgeesError, match=r"noise|delta"):
        engine.loglik([(member(0, 0.1), prompt_of(engine), target_of(engine))])
    attach(engine, tmp_path)
    members = [CENTRE, member(1, 0.0), dataclasses.replace(member(2, 0.0), sign=-1)]
    members += [member(0, 0.1), member(0, -0.1), member(1, 0.1), member(0, 0.05)]
    found = [s.sum for s in engine.loglik([(m, prompt_of(engine), target_of(engine)) for m in members])]
    assert found[0] == found[1] == found[2]
    assert len(set(found)) == 5
    engine.close()


def test_progress_is_told(kind: Kind) -> None:
    engine = kind.open()
    seen: list[tuple[int, int]] = []
    engine.generate(
        [Request(CENTRE, prompt_of(engine, q), 4) for q in QUESTIONS], lambda done, n: seen.append((done, n))
    )
    assert seen == sorted(seen) and seen[-1][0] == len(QUESTIONS) and seen[-1][1] > len(QUESTIONS)
    seen.clear()
    engine.loglik([(CENTRE, prompt_of(engine), target_of(engine))] * 3, lambda done, n: seen.append((done, n)))
    assert seen[-1][0] == 3

    def stop(done: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(CENTRE, prompt_of(engine, q), 4) for q in QUESTIONS], stop)
    again = engine.generate([Request(CENTRE, prompt_of(engine), 4)])  # an interrupted call leaves nothing behind
    assert again == engine.generate([Request(CENTRE, prompt_of(engine), 4)])
    engine.close()


# ---- against the oracle
VIEWS = [
    ("refined", 2, "lowrank", 3), ("refined", 4, "sign", 1), ("refined", 8, "normal", 1), ("adapter", 0, "lowrank", 2),
]  # fmt: skip


@pytest.mark.parametrize("view,bits,noise_kind,rank", VIEWS)
def test_a_member_is_the_written_out_model(
    kind: Kind, tmp_path: Path, view: str, bits: int, noise_kind: str, rank: int
) -> None:
    """Base, what was learned (two updates), and noise of every kind; the view follows the exact delta."""
    engine = kind.open()
    base = {t.source: kind.held(engine, t).astype(np.float64) for t in engine.tensors}
    delta = attach(engine, tmp_path, view, bits, noise_kind, rank)
    m, prompt, target = member(5, 0.1), prompt_of(engine), target_of(engine)

    def check(members: Sequence[Member]) -> list[float]:
        held = {t.source: kind.held(engine, t).astype(np.float64) for t in engine.tensors}
        found = []
        for who in members:
            noisy = {
                t.source: held[t.source] + (perturbation(t, delta.spec, who) if who.amplitude else 0)
                for t in engine.tensors
            }
            want = kind.oracle(engine, noisy, prompt, target)
            got = engine.loglik([(who, prompt, target)])[0].mean
            assert got == pytest.approx(want, abs=kind.bound), who
            found.append(got)
        return found

    before = check([CENTRE, m])
    step(delta)
    step(delta, 0.03)
    engine.refresh()
    after = check([CENTRE, m, dataclasses.replace(m, amplitude=-m.amplitude)])
    values = [*before, *after]
    assert np.ptp(values) > 5 * kind.bound and len(set(values)) == 5  # five models, not one
    for t in engine.tensors:
        exact = delta.vector(t.name)[None] if t.vector else delta.rows(t.name, 0, t.rows)
        order = t.source_to_canonical()
        off = kind.held(engine, t) - base[t.source] - (exact if order is None else exact[order])
        if t.vector or view == "adapter" or isinstance(kind, Toy):
            assert np.abs(off).max() < 1e-5 * t.rho
        else:
            assert np.sqrt(np.mean(off**2)) < {2: 0.2, 4: 0.05, 8: 0.01}[bits] * t.rho
    engine.close()


def test_amplitudes_and_absolute_sigma(kind: Kind, tmp_path: Path) -> None:
    """Each tensor moves by its own factor, and what was not chosen stays."""
    engine = kind.open(params=r"hidden|q_proj|norm|down_proj")
    everything = kind.open()
    tensors = tuple(dataclasses.replace(t, amplitude=3.0 if t.vector else 0.5) for t in engine.tensors)
    assert len(tensors) < len(everything.tensors)
    for absolute in (False, True):
        spec = DeltaSpec(tensors, "refined", 4, 0, "lowrank", 1, SEED, absolute=absolute)
        engine.attach(delta := Delta.create(tmp_path / "delta.safetensors", spec))
        m, prompt, target = member(3, 0.05), prompt_of(engine), target_of(engine)
        weights = {t.source: kind.held(everything, t).astype(np.float64) for t in everything.tensors}
        weights |= {t.source: weights[t.source] + perturbation(t, spec, m) for t in tensors}
        want = kind.oracle(everything, weights, prompt, target)
        centre, got = (s.mean for s in engine.loglik([(CENTRE, prompt, target), (m, prompt, target)]))
        assert got == pytest.approx(want, abs=kind.bound) and abs(got - centre) > kind.bound
        delta.close()
    engine.close()
    everything.close()


def test_another_delta_leaves_nothing_of_the_first(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    scored = [(CENTRE, prompt_of(engine), target_of(engine))]
    delta = attach(engine, tmp_path)
    untuned = engine.loglik(scored)
    step(delta, 0.2)
    engine.refresh()
    tuned = engine.loglik(scored)
    assert tuned != untuned
    (tmp_path / "b").mkdir()
    attach(engine, tmp_path / "b", "adapter")
    assert engine.loglik(scored)[0].sum == pytest.approx(untuned[0].sum, abs=1e-5)
    engine.attach(delta)
    assert engine.loglik(scored) == tuned
    engine.close()


def test_200_evaluations_leave_the_weights(kind: Kind, tmp_path: Path) -> None:
    """Case 20."""
    engine = kind.open()
    attach(engine, tmp_path)
    prompt, target = prompt_of(engine, "a"), target_of(engine)
    before = engine.base_hash, {t.name: kind.held(engine, t).tobytes() for t in engine.tensors}
    centre = engine.loglik([(CENTRE, prompt, target)])
    for i in range(10):
        engine.loglik([(member(20 * i + j, 0.1), prompt, target) for j in range(20)])
    assert engine.loglik([(CENTRE, prompt, target)]) == centre
    assert (engine.base_hash, {t.name: kind.held(engine, t).tobytes() for t in engine.tensors}) == before
    engine.close()
    fresh = kind.open()
    assert fresh.base_hash == before[0]
    fresh.close()


def test_a_foreign_delta_is_refused(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    first, *rest = engine.tensors
    wider = dataclasses.replace(first, cols=first.cols + 64)
    stranger = dataclasses.replace(first, name="model.stranger.weight", source="stranger.weight")
    for wrong in (wider, stranger):
        spec = DeltaSpec((wrong, *rest), "refined", 4, 0, "lowrank", 1, SEED)
        with (
            Delta.create(tmp_path / "delta.safetensors", spec) as delta,
            pytest.raises(UsageError, match="another shape"),
        ):
            engine.attach(delta)
    engine.close()


def test_memory_and_closing(kind: Kind, tmp_path: Path) -> None:
    engine = kind.open()
    delta = attach(engine, tmp_path)
    engine.generate(asked(engine)[:3])
    found = engine.memory()
    size = sum(t.size for t in engine.tensors)
    assert size // 2 < found.weights and found.learned >= size // 2  # 4 bits a weight each, at least
    assert isinstance(kind, Toy) or found.kv > 0
    engine.close()
    engine.close()
    delta.close()
