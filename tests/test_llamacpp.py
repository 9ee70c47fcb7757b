"""The llama.cpp engine against an independent oracle: stock llama.cpp on a file with the noise written into it."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from models import tiny_gguf

from edgees import blocks, native, noise
from edgees.backends import llamacpp
from edgees.backends.base import CENTRE, Member, Request, TensorInfo
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.backends.streams import Job, Scheduler
from edgees.delta import Delta, DeltaSpec, Step
from edgees.errors import EngineError, ModelError, UsageError
from edgees.gguf_file import GgufFile, write_like

LOGITS = 4e-3
"""Largest difference of a logit, relative to the largest logit: the KV cache is half precision on both sides."""

SEED = 77


def member(pair: int, amplitude: float, generation: int = 0, pairs: int = 4) -> Member:
    return Member(noise.make_key(SEED, generation, pair), amplitude, generation * pairs + pair, pair)


def spec_of(
    engine: LlamaCppEngine, view: str = "refined", kind: str = "lowrank", rank: int = 1, bits: int = 4
) -> DeltaSpec:
    return DeltaSpec(tuple(engine.tensors), view, bits, 8, kind, rank, SEED)


def attach(engine: LlamaCppEngine, folder: Path, **options: object) -> Delta:
    delta = Delta.create(folder / "delta.safetensors", spec_of(engine, **options))  # type: ignore[arg-type]
    engine.attach(delta)
    return delta


def perturbation(t: TensorInfo, spec: DeltaSpec, m: Member) -> np.ndarray:
    """float32 [rows, cols] in file order: what the member adds to a tensor."""
    if spec.view == "adapter" and not t.vector:
        pool = noise.pool(spec.seed, t.id, t.cols, spec.factors)
        eps = np.zeros((t.rows, t.cols), np.float32)
        for j in range(spec.rank):
            a = noise.sign_vector(m.key, t.id, 0x100 + j, t.rows)
            eps += np.outer(a, pool[:, (m.slot * spec.rank + j) % spec.factors])
        eps *= np.float32(1 / np.sqrt(spec.rank))
    else:
        eps = noise.eps_numpy(spec.kind, m.key, t.id, t.rows, t.cols, rank=spec.rank, vector=t.vector)
    order = t.source_to_canonical()
    return np.float32(np.float32(m.amplitude) * np.float32(spec.scale(t))) * (eps if order is None else eps[order])


def written(base: Path, out: Path, spec: DeltaSpec, m: Member, learned: dict[str, np.ndarray] | None = None) -> Path:
    """The base in F32 with the member's perturbation (and what was learned, file order) written into it."""
    file = GgufFile(base)
    by_source = {t.source: t for t in spec.tensors}
    replace = {}
    for name, stored in file.tensors.items():
        rows, cols = stored.shape
        w = blocks.decode_numpy(stored.type_name, file.raw(name), rows, cols).astype(np.float64)
        if name in by_source:
            w = w + perturbation(by_source[name], spec, m)
            if learned:
                w = w + learned[name]
        data = np.ascontiguousarray(w.astype(np.float32))
        replace[name] = ("F32", lambda data=data: iter([data.reshape(-1).view(np.uint8)]))
    write_like(file, out, replace)
    file.close()
    return out


def close_to(a: np.ndarray, b: np.ndarray, tolerance: float = LOGITS) -> None:
    assert a.shape == b.shape
    worst = float(np.abs(a - b).max() / np.abs(b).max())
    assert worst < tolerance, f"logits differ by {worst:.2e} of the largest"


TOKENS = [5, 91, 33, 260, 17, 7, 120, 44, 9]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_member_equals_stock_llamacpp_on_the_written_weights(tmp_path: Path, arch: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch, quant="Q4_1")
    with LlamaCppEngine(path, threads=2) as engine:
        assert not engine.frozen, engine.frozen
        delta = attach(engine, tmp_path)
        members = [member(0, 0.1), member(0, -0.1), member(3, 0.1)]
        got = [engine.logits(TOKENS, m) for m in members]
        for i, m in enumerate(members):
            out = written(path, tmp_path / f"w{i}.gguf", delta.spec, m)
            with LlamaCppEngine(out, plain=True) as oracle:
                close_to(got[i], oracle.logits(TOKENS))
        far = min(float(np.abs(got[i] - got[j]).max() / np.abs(got[j]).max()) for i, j in [(0, 1), (0, 2), (1, 2)])
        assert far > 10 * LOGITS  # the three are three models, not one


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_how_a_text_is_cut_changes_no_bit(tmp_path: Path, arch: str) -> None:
    """What exact speculation rests on: many tokens in one call are the same tokens one by one."""
    path = tiny_gguf(tmp_path / "m.gguf", arch, quant="Q4_1")
    with LlamaCppEngine(path, parallel=3) as engine:
        attach(engine, tmp_path)
        m = member(1, 0.1)
        whole = engine.logits(TOKENS, m)
        for cuts in ([1] * len(TOKENS), [2, 1, 4, 2], [8, 1]):
            ctx = engine._need(64, 3)
            ctx.trim(0, 0)
            at, rows = 0, []
            for n in cuts:
                got = ctx.decode([0], [TOKENS[at : at + n]], [m], [[True] * n], [at])
                rows += [engine._row(r).copy() for r in got]
                at += n
            assert np.array_equal(np.array(rows), whole), cuts


def test_drafts_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1")
    with LlamaCppEngine(path, parallel=1) as engine:
        attach(engine, tmp_path)
        members = [member(0, 0.002), member(0, -0.002), member(1, 0.002), member(1, 0.1)]
        asked = [Request(m, tuple(TOKENS), 24) for m in members]
        widths: list[int] = []
        ctx = engine._need(64, 1)
        decode = ctx.decode

        def counted(streams, tokens, *rest):  # type: ignore[no-untyped-def]
            widths.append(len(tokens[0]))
            return decode(streams, tokens, *rest)

        monkeypatch.setattr(ctx, "decode", counted)
        drafted = [c.tokens for c in engine.generate(asked)]
        calls = len(widths)
        monkeypatch.setattr("edgees.backends.streams.FEW_STREAMS", 0)
        ctx.scheduler.forget()
        widths.clear()
        assert [c.tokens for c in engine.generate(asked)] == drafted
        assert calls < len(widths)  # drafts were made, and some were right


def test_guesses_follow_the_longest_common_ending() -> None:
    class Nothing:
        parallel = 1

    scheduler = Scheduler(Nothing(), None)  # type: ignore[arg-type]
    prompt = (1, 2, 3)
    job = Job(0, CENTRE, [*prompt], limit=20, request=Request(CENTRE, prompt, 20), generated=[5, 6], draft=3)
    assert scheduler._guess(job) == []
    scheduler.answers[prompt] = [[4, 5, 6, 8, 8, 8, 8], [5, 6, 7, 7], [0, 6, 9, 9]]
    assert scheduler._guess(job) == [7, 7]  # the prompt's end, 5, 6: longer than 4, 5, 6 shares
    job.generated = [0, 4, 5, 6]
    assert scheduler._guess(job) == [8, 8, 8]
    job.generated, job.limit = [5, 6, 9, 9, 9, 5, 6, 9, 9], 11
    assert scheduler._guess(job) == [9]  # its own words; and the limit leaves room for one more after it


@pytest.mark.parametrize("kind,rank", [("lowrank", 3), ("sign", 1), ("normal", 1)])
@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q4_K_M", "F16"])
def test_every_noise_and_codec(tmp_path: Path, kind: str, rank: int, quant: str) -> None:
    wide = {"n_embd": 256, "n_ff": 256} if "K" in quant else {}
    path = tiny_gguf(tmp_path / "m.gguf", "llama", quant=quant, **wide)
    with LlamaCppEngine(path) as engine:
        delta = attach(engine, tmp_path, kind=kind, rank=rank)
        m = member(1, 0.08)
        out = written(path, tmp_path / "w.gguf", delta.spec, m)
        with LlamaCppEngine(out, plain=True) as oracle:
            close_to(engine.logits(TOKENS, m), oracle.logits(TOKENS))


def test_amplitudes_absolute_sigma_and_untuned_tensors(tmp_path: Path) -> None:
    """Each tensor moves by its own factor; what is not tuned is computed in the same arithmetic, and stays."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama", tied=True)
    with LlamaCppEngine(path, params=r"q_proj|norm|down_proj") as engine:
        assert {t.source.split(".")[-2] for t in engine.tensors} == {
            "attn_q", "attn_norm", "ffn_norm", "output_norm", "ffn_down"}  # fmt: skip
        tensors = tuple(dataclasses.replace(t, amplitude=3.0 if "q_proj" in t.name else 0.25) for t in engine.tensors)
        for absolute in (False, True):
            spec = DeltaSpec(tensors, "refined", 4, 0, "lowrank", 1, SEED, absolute=absolute)
            delta = Delta.create(tmp_path / "delta.safetensors", spec)
            engine.attach(delta)
            m = member(3, 0.02)
            out = written(path, tmp_path / "w.gguf", spec, m)
            with LlamaCppEngine(out, plain=True) as oracle:
                close_to(engine.logits(TOKENS, m), oracle.logits(TOKENS))
            delta.close()


@pytest.mark.parametrize("view,bits", [("refined", 2), ("refined", 4), ("refined", 8), ("lattice", 0), ("adapter", 0)])
def test_what_was_learned_is_in_the_product(tmp_path: Path, view: str, bits: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1")
    with LlamaCppEngine(path) as engine:
        delta = attach(engine, tmp_path, view=view, bits=bits)
        before = engine.logits(TOKENS)
        keys = tuple(noise.make_key(SEED, 0, p) for p in range(4))
        delta.apply(Step(0, keys, (0, 1, 2, 3), (0.05, -0.04, 0.06, 0.03), 1.0))
        engine.refresh()
        effective = {t.source: engine.effective(t.source) for t in engine.tensors}
        base = {
            t.source: blocks.decode(engine.file.tensors[t.source].type_name, engine.file.raw(t.source), t.rows, t.cols)
            for t in engine.tensors
        }
        learned = {name: effective[name].astype(np.float64) - base[name] for name in base}
        m = member(5, 0.05)
        got = engine.logits(TOKENS, m)
        for t in engine.tensors:  # the view follows delta: exactly, or within one step of its dither
            order = t.source_to_canonical()
            exact = delta.vector(t.name)[None] if t.vector else delta.rows(t.name, 0, t.rows)
            exact = exact if order is None else exact[order]
            off = np.abs(learned[t.source] - exact)
            assert np.sqrt(np.mean(off**2)) < {2: 0.15, 4: 0.04, 8: 0.01, 0: 0.2}[bits] * t.rho or view == "adapter"
            if view == "adapter":
                assert off.max() < 1e-5 * t.rho
        out = written(path, tmp_path / "w.gguf", delta.spec, m, learned)
        with LlamaCppEngine(out, plain=True) as oracle:
            close_to(got, oracle.logits(TOKENS))
        assert np.abs(engine.logits(TOKENS) - before).max() > 0.02 * np.abs(before).max()


def test_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of every layer, not only the logits, is that of the written weights."""
    api = llamacpp._library()
    seen: dict[str, np.ndarray] = {}

    class Head(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
                    ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("params", ctypes.c_int32 * 16),
                    ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
                    ("offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64)]  # fmt: skip

    def watch(tensor: int, ask: bool, _: object) -> bool:
        head = Head.from_address(tensor)
        wanted = head.name.startswith(b"l_out")
        if wanted and not ask:
            n = head.ne[0] * head.ne[1]
            seen[head.name.decode()] = np.array((ctypes.c_float * n).from_address(head.data))
        return wanted if ask else True

    callback = api.ggml_backend_sched_eval_callback(watch)
    default = api.llama_context_default_params

    def params() -> object:
        p = default()
        p.cb_eval = callback
        return p

    path = tiny_gguf(tmp_path / "m.gguf", "llama", n_layer=4)
    with LlamaCppEngine(path) as engine:
        delta = attach(engine, tmp_path)
        m = member(2, 0.1)
        out = written(path, tmp_path / "w.gguf", delta.spec, m)
        monkeypatch.setattr(api, "llama_context_default_params", params)
        engine.logits(TOKENS, m)
        ours, seen = seen, {}
        with LlamaCppEngine(out, plain=True) as oracle:
            oracle.logits(TOKENS)
    assert sorted(ours) == [f"l_out-{i}" for i in range(4)] and sorted(seen) == sorted(ours)
    for name, value in seen.items():
        close_to(ours[name], value)


def requests_of(engine: LlamaCppEngine, temperature: float = 0.0) -> list[Request]:
    texts = ["a", "one two three four five six seven eight nine ten", "the cat sat", "x" * 40, "hello, hello", "zz 9"]
    found = []
    for i, text in enumerate(texts):
        prompt = tuple(engine.encode_chat([{"role": "user", "content": text}]))
        for m in (member(0, 0.1), member(1, -0.1), CENTRE):
            found.append(Request(m, prompt, 5 + 3 * i, temperature=temperature, seed=i))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_company_order_and_threads_change_nothing(tmp_path: Path, temperature: float) -> None:
    """Case 17, and 'whose column is it?': sequences of unequal length, three members, mixed in one batch."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path, parallel=8, threads=2) as engine:
        delta = attach(engine, tmp_path)
        requests = requests_of(engine, temperature)
        together = engine.generate(requests)
        backwards = engine.generate(requests[::-1])[::-1]
        again = engine.generate(requests)
        targets = [(r.member, r.prompt, tuple(TOKENS[: 1 + i % 7])) for i, r in enumerate(requests)]
        likely = engine.loglik(targets)
        native.threads(1)
        engine2 = LlamaCppEngine(path, parallel=1, threads=1)
        engine2.attach(delta)
        alone = [engine2.generate([r])[0] for r in requests]
        likely_alone = [engine2.loglik([t])[0] for t in targets]
        engine2.close()
        native.threads(0)
    assert together == backwards == again == alone
    assert likely == likely_alone
    for i in range(0, len(requests), 3):  # the three members of a row answer as three models
        assert len({s.sum for s in likely[i : i + 3]}) == 3
    assert len({c.tokens for c in together}) > len(together) // 2


def test_likelihood_equals_that_of_the_written_weights(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path, parallel=4) as engine:
        delta = attach(engine, tmp_path)
        prompt = tuple(engine.encode_chat([{"role": "user", "content": "count to ten, please"}]))
        members = [member(p, s * 0.1) for p in range(3) for s in (1, -1)]
        targets = [tuple(TOKENS[:n]) for n in (1, 4, 9)]
        got = engine.loglik([(m, prompt, t) for m in members for t in targets])
        for i, m in enumerate(members):
            with LlamaCppEngine(written(path, tmp_path / "w.gguf", delta.spec, m), plain=True) as oracle:
                for j, target in enumerate(targets):
                    logits = oracle.logits([*prompt, *target[:-1]])[len(prompt) - 1 :].astype(np.float64)
                    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
                    want = sum(logp[k, t] for k, t in enumerate(target))
                    score = got[i * 3 + j]
                    assert score.tokens == len(target)
                    assert score.sum == pytest.approx(want, abs=0.02 * len(target))


def test_weights_hash_the_same_after_200_evaluations(tmp_path: Path) -> None:
    """Case 20."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path) as engine:
        attach(engine, tmp_path)
        before = engine.base_hash
        centre = engine.logits(TOKENS)
        for i in range(200):
            engine.loglik([(member(i, 0.1), (1, 2, 3), (4, 5))])
        assert np.array_equal(engine.logits(TOKENS), centre)
        assert all(np.array_equal(engine.effective(t.source), e) for t, e in zip(
            engine.tensors,
            [blocks.decode(engine.file.tensors[t.source].type_name, engine.file.raw(t.source), t.rows, t.cols)
             for t in engine.tensors], strict=True))  # fmt: skip
    from edgees.gguf_file import file_sha256

    assert file_sha256(path) == before


def test_context_overflow_ends_that_episode(tmp_path: Path) -> None:
    """Case 18."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama", context=512)
    with LlamaCppEngine(path, context=64, parallel=4) as engine:
        attach(engine, tmp_path)
        long = Request(member(0, 0.1), tuple([5] * 64), 10)
        near = Request(member(0, 0.1), tuple([5] * 60), 10)
        short = Request(member(1, 0.1), (5, 6, 7), 3)
        a, b, c = engine.generate([long, near, short])
        assert (a.outcome, a.tokens) == ("overflow", ())
        assert b.outcome in ("overflow", "stop") and len(b.tokens) <= 4
        assert len(c.tokens) <= 3 and c.outcome in ("length", "stop")
        score = engine.loglik([(CENTRE, tuple([5] * 60), tuple([6] * 20)), (CENTRE, (5,), (6,))])
        assert np.isnan(score[0].sum) and np.isfinite(score[1].sum)


def test_multibyte_character_cut_by_the_limit(tmp_path: Path) -> None:
    """Case 19: what is generated is bytes; a cut character is dropped, a broken one inside is marked."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path) as engine:
        euro = engine.encode("€")
        assert len(euro) == 3  # the tiny vocabulary has single bytes
        job = Job(0, CENTRE, [1], limit=10, request=Request(CENTRE, (1,), 10))
        for token in [*engine.encode("a"), *euro, *euro[:2]]:
            assert not job.append(token, engine)
        assert job.completion().text == "a€"
        assert not job.append(engine.encode("b")[0], engine)
        assert job.completion().text == "a€\ufffdb"


def test_exactly_one_bos(tmp_path: Path) -> None:
    """Case 12."""
    for writes, adds in [(True, True), (False, True), (True, False), (False, False)]:
        template = ("{{ bos_token }}" if writes else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
        path = tiny_gguf(
            tmp_path / "m.gguf", "llama", template=template, metadata={"tokenizer.ggml.add_bos_token": adds}
        )
        with LlamaCppEngine(path) as engine:
            tokens = engine.encode_chat([{"role": "user", "content": "ab"}])
            assert tokens.count(engine._bos) == (1 if writes or adds else 0)
            assert engine._bos not in engine.encode("ab")


def test_non_finite_base_is_refused_by_name(tmp_path: Path) -> None:
    """Case 8."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    file = GgufFile(path)
    t = file.tensors["blk.1.ffn_up.weight"]
    file.close()
    data = bytearray(path.read_bytes())
    data[t.offset + 20 : t.offset + 22] = np.float16(np.nan).tobytes()  # the scale of the second block
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        LlamaCppEngine(path)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "qwen2moe")
    with pytest.raises(ModelError, match="_exps"):
        LlamaCppEngine(path)


def test_types_without_codec_stay_frozen_and_are_named(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama", rope_freqs=True)
    with LlamaCppEngine(path, params=r"self_attn|norm") as engine:
        frozen = dict(engine.frozen)
        assert "ROPE" in frozen["rope_freqs.weight"] or "params" in frozen["rope_freqs.weight"]
        assert frozen["blk.0.ffn_up.weight"] == "not chosen by --params"
        assert {t.source.split(".")[-2] for t in engine.tensors} == {
            "attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "output_norm"}  # fmt: skip


def test_columns_of_nobody_are_an_error(tmp_path: Path) -> None:
    """A batch that llama.cpp reorders, or that was announced wrongly, fails by name and never runs unperturbed."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path, parallel=4) as engine:
        attach(engine, tmp_path)
        engine.logits(TOKENS[:2])
        ctx = engine._need(8, 4)
        ctx.trim(0, 0)
        with pytest.raises(EngineError, match="order"):  # unequal lengths: cut and reordered by llama.cpp
            ctx.decode(
                [0, 1], [[1, 2, 3], [4]], [member(0, 0.1), member(1, 0.1)], [[False, False, True], [True]], [0, 0]
            )
        announce = engine.announce
        engine.announce = lambda tokens, members, outputs: announce(  # type: ignore[method-assign]
            [[t + 1 for t in ids] for ids in tokens], members, outputs
        )
        with pytest.raises(EngineError, match="order"):
            engine.generate([Request(member(0, 0.1), (1, 2), 2)])


def test_tied_head_is_one_tensor_and_perturbed_in_both_places(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama", tied=True, quant="F32")
    with LlamaCppEngine(path, params=r"embed_tokens") as engine:
        assert [t.source for t in engine.tensors] == ["token_embd.weight"]
        delta = attach(engine, tmp_path)
        m = member(1, 0.2)
        out = written(path, tmp_path / "w.gguf", delta.spec, m)
        with LlamaCppEngine(out, plain=True) as oracle:
            close_to(engine.logits(TOKENS, m), oracle.logits(TOKENS))


def test_foreign_delta_and_missing_noise_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path) as engine:
        with pytest.raises(UsageError, match="no noise"):
            engine.generate([Request(member(0, 0.1), (1,), 1)])
        spec = spec_of(engine)
        wrong = dataclasses.replace(spec.tensors[0], cols=spec.tensors[0].cols + 32)
        bad = Delta.create(tmp_path / "bad.safetensors", dataclasses.replace(spec, tensors=(wrong,)))
        with pytest.raises(UsageError, match="another shape"):
            engine.attach(bad)


def test_damaged_files(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 10, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match="cut"):
            LlamaCppEngine(cut)
    with pytest.raises(ModelError, match="nowhere"):
        LlamaCppEngine(tmp_path / "nowhere.gguf")


def test_unknown_parameters_are_refused() -> None:
    params = llamacpp._library().llama_model_default_params()
    with pytest.raises(EngineError, match="use_mmapp"):
        llamacpp.set_fields(params, use_mmapp=True)


def test_stop_strings_and_end_of_turn(tmp_path: Path) -> None:
    """Case 13: the token that the template puts behind an answer ends a turn, whatever the EOS is."""
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    with LlamaCppEngine(path) as engine:
        end = engine._tokenize("<|im_end|>", special=True)
        assert len(end) == 1 and end[0] in engine.end_of_turn()
        job = Job(0, CENTRE, [1], limit=9, request=Request(CENTRE, (1,), 9, stop=("bc",)))
        assert not any(job.append(t, engine) for t in [*engine.encode("ab"), *engine.encode("d")])
        assert [job.append(t, engine) for t in [*engine.encode("b"), *engine.encode("c")]][-1]
        assert (job.completion().text, job.outcome) == ("abd", "stop")
        job = Job(0, CENTRE, [1], limit=9, request=Request(CENTRE, (1,), 9))
        assert [job.append(t, engine) for t in (*engine.encode("a"), end[0])][-1]
        assert (job.completion().text, job.outcome) == ("a", "stop")
