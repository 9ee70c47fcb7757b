"""The torch engine (CPU arm) against transformers' own model, whose weights are set to what the engine holds.

Models with a width that is no multiple of 64 keep their linears in floats: there both must agree to float32's last
digits, which shows that graph, caches and masks are right. In 4 bits the CPU multiplies integers, and the bound is
that of their rounding.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hf_models
import hf_tokenizers
import models
import numpy as np
import pytest
from test_llamacpp import member, perturbation
from test_tune import Watcher, journal, learned

from edgees import config, export, nf4, tune
from edgees.backends.base import CENTRE, Member, Request
from edgees.backends.streams import Job
from edgees.delta import Delta, DeltaSpec, Step
from edgees.errors import Interrupted, ModelError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgees.backends.torch_nf4 import TorchEngine  # noqa: E402 - needs torch

FLOATS = 2e-5
"""Largest difference of a logit, relative to the largest logit, with all weights in floats."""
FOUR_BITS = 0.015
"""The same with linears in 4 bits (measured over all architectures: 0.0105)."""
SEED = 77
SMALL = {"hidden": 40}
"""Heads of 10, an FFN of 80: nothing to quantise."""
rng = np.random.default_rng(0)
TOKENS = [int(x) for x in rng.integers(3, 440, 150)]
"""More than twice the sliding windows."""


def reference(engine: TorchEngine, weights: Mapping[str, np.ndarray]) -> Any:
    """transformers' own model of the folder in float32: ``weights`` [rows, cols] by name, the rest is the engine's."""
    config = transformers.AutoConfig.from_pretrained(engine.folder.path)
    config._attn_implementation = "eager"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    state = model.state_dict()
    for name, parameter in state.items():
        held = "model.embed_tokens.weight" if name == "lm_head.weight" and engine.folder.tied else name
        w = weights[held] if held in weights else engine.effective(held)
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(w, np.float32)).reshape(parameter.shape))
    return model


def logits_of(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """float64 [tokens, vocabulary]."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([list(tokens)])).logits[0].double().numpy())


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def attach(engine: TorchEngine, folder: Path, view: str = "refined", kind: str = "lowrank") -> Delta:
    bits, factors = (4, 0) if view == "refined" else (0, 8)
    spec = DeltaSpec(tuple(engine.tensors), view, bits, factors, kind, 1, SEED)
    delta = Delta.create(folder / "delta.safetensors", spec)
    engine.attach(delta)
    return delta


def noisy(engine: TorchEngine, delta: Delta, m: Member) -> dict[str, np.ndarray]:
    """All weights of a member, written out."""
    return {t.name: engine.effective(t.name) + perturbation(t, delta.spec, m) for t in engine.tensors}


def step(delta: Delta) -> None:
    keys = tuple(range(100, 104))
    delta.apply(Step(delta.generation, keys, (0, 1, 2, 3), (0.05, -0.04, 0.06, 0.03), 1.0))


WINDOWS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 64}, "phi3": {"sliding_window": 64}}


# ---- the graph
@pytest.mark.parametrize("arch", hf_models.ARCHS)
@pytest.mark.parametrize("size,dtype,bound", [("small", "float32", FLOATS), ("wide", "bfloat16", FOUR_BITS)])
def test_logits_are_those_of_transformers(tmp_path: Path, arch: str, size: str, dtype: str, bound: float) -> None:
    """Centre, tuned centre and a perturbed member, over more tokens than the sliding windows hold."""
    shape = SMALL if size == "small" else {}
    folder = hf_models.tiny_hf(
        tmp_path / "m", arch, dtype=dtype, tied=arch != "qwen3", **shape, **WINDOWS.get(arch, {})
    )
    with TorchEngine(folder, device="cpu", threads=2) as engine:
        assert not engine.frozen
        types = {t.type_name for t in engine.folder.tensors.values()}
        assert ("NF4" in types) == (size == "wide")
        base = engine.logits(TOKENS)
        assert apart(base, logits_of(reference(engine, {}), TOKENS)) < bound
        with attach(engine, tmp_path) as delta:
            step(delta)
            engine.refresh()
            m = member(3, 0.1)
            tuned, perturbed = engine.logits(TOKENS), engine.logits(TOKENS, m)
            assert apart(tuned, logits_of(reference(engine, {}), TOKENS)) < bound
            assert apart(perturbed, logits_of(reference(engine, noisy(engine, delta, m)), TOKENS)) < bound
        assert min(apart(base, tuned), apart(tuned, perturbed), apart(base, perturbed)) > 5 * FOUR_BITS


@pytest.mark.parametrize("noise_kind", ["sign", "normal", "lowrank"])
@pytest.mark.parametrize("view", ["refined", "adapter"])
def test_every_noise_in_4_bits_and_in_floats(tmp_path: Path, noise_kind: str, view: str) -> None:
    if view == "adapter" and noise_kind != "lowrank":
        pytest.skip("an adapter has lowrank noise")
    for name, options, bound in (("f", {**SMALL, "dtype": "float32"}, FLOATS), ("q", {}, FOUR_BITS)):
        folder = hf_models.tiny_hf(tmp_path / name, "qwen2", tied=False, **options)  # biases, and a head of its own
        with TorchEngine(folder, device="cpu") as engine, attach(engine, tmp_path, view, noise_kind) as delta:
            step(delta)
            engine.refresh()
            for m in (member(1, 0.1), member(2, -0.1)):
                want = logits_of(reference(engine, noisy(engine, delta, m)), TOKENS[:20])
                assert apart(engine.logits(TOKENS[:20], m), want) < bound


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3_text", "mistral"])
def test_many_streams_write_what_transformers_writes(tmp_path: Path, arch: str) -> None:
    """Fourteen prompts of all lengths (some share a long beginning, some are longer than the window) for three members

    on five streams: each answer is what one model alone, without a cache, would have written.
    """
    folder = hf_models.tiny_hf(tmp_path / "m", arch, dtype="float32", **SMALL, **WINDOWS.get(arch, {}))
    with TorchEngine(folder, device="cpu", parallel=5) as engine, attach(engine, tmp_path) as delta:
        lengths = (1, 3, 17, 40, 40, 63, 64, 65, 90, 140)
        prompts = [tuple(TOKENS[i : i + n]) for i, n in enumerate(lengths)]
        prompts += [(*TOKENS[:30], *TOKENS[40 + i : 45 + 2 * i]) for i in range(4)]
        members = [CENTRE, member(0, 0.1), member(0, -0.1)]
        requests = [Request(m, p, 3 + i % 9) for i, p in enumerate(prompts) for m in members]
        found = engine.generate(requests)
        for k, m in enumerate(members):
            model = reference(engine, noisy(engine, delta, m) if m.amplitude else {})
            for request, done in list(zip(requests, found, strict=True))[k::3]:
                logits = logits_of(model, [*request.prompt, *done.tokens])[len(request.prompt) - 1 :]
                best = [int(row.argmax()) for row in logits]
                ended = done.outcome == "stop"
                assert list(done.tokens) == best[: len(done.tokens)]
                assert (best[-1] in engine.end_of_turn()) if ended else len(done.tokens) == request.max_tokens
        assert len({c.tokens for c in found}) > 20  # no constant answer


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_pieces_of_different_lengths_do_not_disturb_each_other(tmp_path: Path, arch: str) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", arch)
    with TorchEngine(folder, device="cpu", parallel=4) as engine:
        scheduler = engine.scheduler(128, 4)
        streams: Any = scheduler.streams
        texts = [TOKENS[:11], TOKENS[20:22], TOKENS[30:67], TOKENS[70:75]]
        alone = []
        for i, text in enumerate(texts):  # each on its own stream, in a call of its own
            streams.decode([i], [text], [CENTRE], [[True] * len(text)], [0])
            alone.append(streams.logits.numpy().copy())
        held = [t.clone() for t in (*streams.k, *streams.v)]
        streams.decode([0, 1, 2, 3], texts, [CENTRE] * 4, [[True] * len(t) for t in texts], [0] * 4)
        assert streams.logits.shape[0] == sum(map(len, texts))
        # torch's kernels choose their order of sums by shape, on some CPUs only: equal but for the last bits
        np.testing.assert_allclose(streams.logits.numpy(), np.concatenate(alone), rtol=0, atol=2e-3)
        assert streams.held == [len(t) for t in texts]
        for before, now in zip(held, (*streams.k, *streams.v), strict=True):
            for i, text in enumerate(texts):
                torch.testing.assert_close(now[i, : len(text)], before[i, : len(text)], rtol=0, atol=2e-3)
                assert not now[i, len(text) :].any()  # nothing behind a shorter piece


def test_a_short_piece_at_the_end_beside_a_long_one_at_the_beginning(tmp_path: Path) -> None:
    """Places stay within the streams, though the longest piece would not fit behind the longest text."""
    folder = hf_models.tiny_hf(tmp_path / "m", "llama")
    with TorchEngine(folder, device="cpu", parallel=2) as engine:
        streams: Any = engine.scheduler(256, 2).streams
        full = [TOKENS[i % len(TOKENS)] for i in range(streams.length)]
        streams.decode([0], [full[:-4]], [CENTRE], [[False] * (len(full) - 5) + [True]], [0])
        streams.decode([0, 1], [full[-4:], TOKENS[:60]], [CENTRE] * 2, [[True] * 4, [True] * 60], [len(full) - 4, 0])
        both = streams.logits.numpy().copy()
        assert streams.held == [len(full), 60]
        streams.decode([0], [full[-4:]], [CENTRE], [[True] * 4], [len(full) - 4])
        np.testing.assert_allclose(both[:4], streams.logits.numpy(), rtol=0, atol=2e-3)


def test_heads_tied_and_untied(tmp_path: Path) -> None:
    """Case 6: one tensor in both places, or two."""
    for tied in (True, False):
        folder = hf_models.tiny_hf(tmp_path / str(tied), "llama", tied=tied, dtype="float32", **SMALL)
        with TorchEngine(folder, device="cpu", params="embed_tokens|lm_head") as engine:
            assert [t.name for t in engine.tensors] == ["lm_head.weight"] * (not tied) + ["model.embed_tokens.weight"]
            with attach(engine, tmp_path) as delta:
                m = member(1, 0.2)
                want = logits_of(reference(engine, noisy(engine, delta, m)), TOKENS[:20])
                assert apart(engine.logits(TOKENS[:20], m), want) < FLOATS


def test_a_pattern_chooses_what_is_tuned(tmp_path: Path) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", "qwen2")
    with TorchEngine(folder, device="cpu", params=r"q_proj|norm") as engine:
        assert {t.name.split(".")[-2] for t in engine.tensors} == {
            "q_proj", "input_layernorm", "post_attention_layernorm", "norm"}  # fmt: skip
        assert dict(engine.frozen)["model.layers.0.mlp.up_proj.weight"] == "not chosen by --params"
        with attach(engine, tmp_path) as delta:
            m = member(1, 0.3)
            want = logits_of(reference(engine, noisy(engine, delta, m)), TOKENS[:20])
            assert apart(engine.logits(TOKENS[:20], m), want) < FOUR_BITS
    with pytest.raises(UsageError, match="no tensor can be tuned"):
        TorchEngine(folder, device="cpu", params="no such name")


# ---- what it holds
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sources_of_16_and_32_bits(tmp_path: Path, dtype: str) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", dtype=dtype)
    held = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
    with TorchEngine(folder, device="cpu") as engine:
        for t in engine.tensors:
            w = held[t.name].float().numpy().reshape(t.rows, t.cols)
            if engine.folder.tensors[t.name].type_name == "NF4":
                w = nf4.quantise(w).dequantise()
            assert np.array_equal(engine.effective(t.name), w), t.name


@pytest.mark.parametrize("kind,nested", [("nf4", True), ("nf4", False), ("fp4", True)])
def test_a_4_bit_checkpoint_is_taken_as_it_is(tmp_path: Path, kind: str, nested: bool) -> None:
    """Weights are bitsandbytes' own, bit for bit, and the logits those of the model that they make."""
    functional = pytest.importorskip("bitsandbytes").functional
    from safetensors.torch import load_file

    folder = hf_models.tiny_bnb(tmp_path / "m", "llama", kind=kind, nested=nested)
    stored = load_file(folder / "model.safetensors")
    with TorchEngine(folder, device="cpu") as engine:
        assert {t.type_name for t in engine.folder.tensors.values()} == {kind.upper(), "BF16"}
        weights = {}
        for t in engine.tensors:
            if engine.folder.tensors[t.name].type_name == "BF16":
                continue
            parts = {k.removeprefix(f"{t.name}."): v for k, v in stored.items() if k.startswith(f"{t.name}.")}
            state = functional.QuantState.from_dict(parts, device="cpu")
            state.dtype = torch.float32
            weights[t.name] = functional.dequantize_4bit(stored[t.name], state).numpy()
            assert np.array_equal(engine.effective(t.name), weights[t.name]), t.name
        assert apart(engine.logits(TOKENS), logits_of(reference(engine, weights), TOKENS)) < FOUR_BITS
        with attach(engine, tmp_path) as delta:
            m = member(1, 0.1)
            want = logits_of(reference(engine, noisy(engine, delta, m)), TOKENS[:30])
            assert apart(engine.logits(TOKENS[:30], m), want) < FOUR_BITS


def test_weights_beyond_the_tokenizer(tmp_path: Path) -> None:
    """Rows of the embedding that no token has: they can be sampled, and stand for no text."""
    size = len(models.vocabulary()[0])
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", vocab_size=size + 64)
    with TorchEngine(folder, device="cpu") as engine:
        assert engine.vocabulary == size + 64 and engine.logits([5]).shape == (1, size + 64)
        assert engine.piece(size + 3) == b"" and engine.piece(5) != b""
        job = Job(0, CENTRE, [1], limit=9, request=Request(CENTRE, (1,), 9))
        assert not any(job.append(token, engine) for token in (*engine.encode("ab"), size + 3, *engine.encode("c")))
        assert job.completion().text == "abc"


def test_damaged_folders_are_refused_by_name(tmp_path: Path) -> None:
    """Case 8, and what a graph cannot be built from."""
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"

    def nan(name: str) -> Any:
        def change(tensors: dict[str, Any]) -> None:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, data[:10] + b"\xc0\x7f" + data[12:])  # bfloat16 NaN

        return change

    def missing(tensors: dict[str, Any]) -> None:
        del tensors[up]

    def reshaped(tensors: dict[str, Any]) -> None:
        dtype, (rows, cols), data = tensors[up]
        tensors[up] = (dtype, [rows // 2, cols * 2], data)

    for i, (change, told) in enumerate([(nan(up), up), (nan(norm), norm), (missing, up), (reshaped, up)]):
        folder = hf_models.tiny_hf(tmp_path / str(i), "llama")
        hf_models.rewrite(folder, change)
        with pytest.raises(ModelError, match=told.replace(".", r"\.")):
            TorchEngine(folder, device="cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:63"])
def test_a_gpu_that_is_not_there(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = hf_models.tiny_hf(tmp_path / "m", "llama")
    with pytest.raises(UsageError, match=f"device = {device}: no such GPU"):
        TorchEngine(folder, device=device)


# ---- text
def test_a_character_cut_by_the_limit(tmp_path: Path) -> None:
    """Case 19."""
    with TorchEngine(hf_models.tiny_hf(tmp_path / "m", "llama"), device="cpu") as engine:
        euro = engine.encode("€")
        assert len(euro) == 3  # the tiny vocabulary has single bytes
        job = Job(0, CENTRE, [1], limit=10, request=Request(CENTRE, (1,), 10))
        for token in [*engine.encode("a"), *euro, *euro[:2]]:
            assert not job.append(token, engine)
        assert job.completion().text == "a€"
        assert not job.append(engine.encode("b")[0], engine)
        assert job.completion().text == "a€\ufffdb"


def test_the_end_of_a_turn_is_the_template_s(tmp_path: Path) -> None:
    """Case 13: though the configuration says that another token is the EOS."""
    folder = hf_models.tiny_hf(tmp_path / "m", "llama", eos_token_id=0)
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe(), eos_token=models.SPECIALS[0])
    with TorchEngine(folder, device="cpu") as engine:
        end = models.SPECIALS.index("<|im_end|>")
        assert {0, end} <= engine.end_of_turn()
        job = Job(0, CENTRE, [1], limit=9, request=Request(CENTRE, (1,), 9))
        assert [job.append(t, engine) for t in (*engine.encode("a"), end)][-1]
        assert (job.completion().text, job.outcome) == ("a", "stop")


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    with TorchEngine(hf_models.tiny_hf(tmp_path / "m", "llama"), device="cpu") as engine:
        specials = set(range(len(models.SPECIALS)))
        text = "<|im_end|> and <|im_start|>"
        assert not specials & set(engine.encode(text))
        assert b"".join(engine.piece(t) for t in engine.encode(text)).decode() == text
        assert engine.encode_chat([{"role": "user", "content": "a"}]).count(1) == 2  # the template's own are special
        assert engine.piece(1) == b""


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_exactly_one_bos(tmp_path: Path, writes: bool, adds: bool) -> None:
    """Case 12. BOS is what the tokenizer calls so, whatever number the model's configuration has."""
    folder = hf_models.tiny_hf(tmp_path / "m", "llama")
    template = ("{{ bos_token }}" if writes else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
    document = hf_tokenizers.byte_bpe()
    if adds:
        name = models.SPECIALS[1]
        bos, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        document["post_processor"] = {
            "type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text, text],
            "special_tokens": {name: {"id": name, "ids": [1], "tokens": [name]}},
        }  # fmt: skip
    hf_tokenizers.write(folder, document, template)
    with TorchEngine(folder, device="cpu") as engine:
        assert engine.encode_chat([{"role": "user", "content": "ab"}]).count(1) == (1 if writes or adds else 0)
        assert 1 not in engine.encode("ab")


# ---- without torch
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"no module named {{name}}")
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *blocked: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", (BLOCKED.format(blocked=blocked) if blocked else "") + code],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_torch_the_engine_says_what_is_missing(tmp_path: Path) -> None:
    folder = hf_models.tiny_hf(tmp_path / "m", "llama")
    code = (
        "from edgees import cli\n"
        f"code = cli.run(['tune', '--engine', 'torch', '--model', {str(folder)!r}, '--task', 'sums', '--dry-run'])\n"
        "assert code == 2, code\n"
        "from edgees.backends.torch_nf4 import TorchEngine\nfrom edgees.errors import MissingExtra\n"
        f"try: TorchEngine({str(folder)!r})\nexcept MissingExtra as e: print(e.message, '|', e.hint)\n"
    )
    assert "torch engine needs torch and transformers" in (told := python(code, "torch")) and "edgees[torch]" in told
    assert "torch engine needs torch and transformers" in python(code, "transformers")


def test_nothing_else_imports_torch(tmp_path: Path) -> None:
    """``import edgees``, and a whole run on llama.cpp; doctor does, to say what it finds, but does without."""
    model = models.tiny_gguf(tmp_path / "m.gguf", "llama")
    run = str(tmp_path / "run")
    arguments = [
        "tune", "--model", str(model), "--task", "sums", "--run", run, "--generations", "1", "--pairs", "2",
        "--rows", "1", "--eval-rows", "2", "--max-tokens", "2",
    ]  # fmt: skip
    python(
        "import sys, edgees\nfrom edgees import cli\n"
        "heavy = {'torch', 'transformers', 'bitsandbytes'}\n"
        "assert cli.run(['--version']) == 0\n"
        f"assert cli.run({arguments!r}) == 0\n"
        f"assert cli.run(['export', {run!r}, '--to', 'gguf', '--out', {run + '/out'!r}, '--verify', '--last']) == 0\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert "llama-cpp-python" in python("from edgees import cli\nassert cli.run(['doctor']) == 0\n", "torch")


# ---- the whole way
def settings(model: Path, run: Path, scope: str, **more: Any) -> config.Config:
    given = {
        "engine": "torch", "device": "cpu", "model": str(model), "run": str(run), "task": "sums", "pairs": 2, "rows": 2,
        "generations": 10, "eval_every": 5, "eval_rows": 4, "max_tokens": 4, "seed": 5, "scope": scope, "loglik": 1.0,
        "loglik_hold": 0.2, "loglik_end": 0.5, "temperature": 0.7, "shrink": False,
    }  # fmt: skip
    return config.load(None, {**given, **more})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hf_models.tiny_hf(tmp_path_factory.mktemp("model") / "tiny é", "llama")
    hf_tokenizers.write(folder, hf_tokenizers.byte_bpe())
    return folder


@pytest.fixture(scope="module", params=["full", "adapter"])
def whole(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Ten generations, never interrupted."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    before = {path: path.read_bytes() for path in model.iterdir()}
    assert tune.tune(settings(model, run, request.param)).generations == 10
    assert before == {path: path.read_bytes() for path in model.iterdir()}
    assert sum(any(line["coefs"]) for line in journal(run)[1:] if "coefs" in line) >= 5
    return request.param, run


def test_five_and_five_are_ten(whole: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    """Case 33, bit for bit: stopped politely after five generations, killed after two more, replayed."""
    scope, run = whole
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted):
        tune.tune(settings(model, parts, scope), observer=Watcher(stop_after=5))
    command = [sys.executable, "-m", "edgees", "resume", str(parts)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (parts / "history.jsonl").read_bytes().count(b'"generation":') < 7:
            time.sleep(0.005)
        process.kill()
    assert tune.resume(parts).generations == 10
    assert journal(parts) == journal(run)
    assert learned(parts) == learned(run)
    tune.replay(run, model=str(model), out=tmp_path / "again")
    assert learned(tmp_path / "again") == learned(run)


def test_threads_change_nothing_here(whole: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    """Our products sum in one order; so do, at these sizes, those of torch's attention. (Torch does not promise it.)"""
    scope, run = whole
    tune.tune(settings(model, tmp_path / "one", scope, threads=1, generations=10))
    assert journal(tmp_path / "one")[1:] == journal(run)[1:]
    assert learned(tmp_path / "one")[:2] == learned(run)[:2]


def test_what_was_tuned_is_exported(whole: tuple[str, Path], tmp_path: Path) -> None:
    scope, run = whole
    kinds = [("gguf", "F16"), ("gguf", "Q8_0"), ("safetensors", "BF16"), ("safetensors", "NF4")]
    for to, kind in [*kinds, *([("adapter", None)] if scope == "adapter" else [])]:
        out = tmp_path / f"{to} {kind}"
        made = export.export(run, to, out, type_name=kind, weights="last", verify=True)
        assert made["verify"]["ok"] and made["generation"] == 10, made
        if to == "safetensors" and kind == "BF16":  # read again: the base of the next run, its linears back in 4 bits
            with TorchEngine(out, device="cpu") as engine:
                assert len(engine.tensors) == 20
