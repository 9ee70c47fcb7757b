"""``edgees estimate``: exact sizes on tiny models, agreement with the engine's own buffers, and refusals that help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_models import tiny_hf
from models import tiny_gguf, vocabulary

from edgees import cli, config, estimate, opening, tune
from edgees.backends.base import CENTRE, Member, Request
from edgees.backends.streams import Job, Scheduler
from edgees.errors import ModelError, UsageError, WillNotFit

MIB = 1 << 20
# tiny_gguf: 2 layers of width 64, FFN 256, 4 heads and 2 of keys of 16, 448 tokens; matrices Q4_1, embedding Q8_0.
MATRICES = ((64, 64), (32, 64), (32, 64), (64, 64), (256, 64), (256, 64), (64, 256))
VECTORS = 5 * 64
"""Norms: two a layer, and the last one."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf(tmp_path_factory.mktemp("hf"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def setting(model: Path, available: int | None = None, **options: Any) -> estimate.Setting:
    chosen = config.load(None, {"model": str(model), "task": "sums", "antithetic": True, "groups": 1, **options})
    task = opening.open_task(chosen)
    chosen = chosen.with_defaults(task.defaults)
    return estimate.plan(chosen, estimate.read(chosen), task, available)


def run(*arguments: object) -> int:
    return cli.run(["estimate", *map(str, arguments)])


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_full_scope_to_the_byte(tiny: Path, bits: int) -> None:
    found = estimate.host_bytes(setting(tiny, bits=bits, parallel=5))
    weights = 2 * sum(rows * cols for rows, cols in MATRICES) + 448 * 64
    assert found["weights"] == tiny.stat().st_size
    # 5 sequences of 256 tokens, 2 layers, keys and values of 2 heads of 16, 2 bytes each
    assert found["kv"] == 5 * 256 * 2 * 2 * 2 * 16 * 2
    assert found["learned"] == weights * bits // 8 + 4 * VECTORS
    # float32 and its squares in float64 of the largest tensor, 448 x 64; two whole copies of a permuted one are less
    assert found["update"] == 12 * 448 * 64
    assert found["tokenizer"] == (448 + len(vocabulary()[1])) * estimate.LLAMACPP.entry
    assert found["libraries"] == estimate.LLAMACPP.libraries


def test_adapter_scope_to_the_byte(tiny: Path) -> None:
    made = setting(tiny, scope="adapter", factors=8)
    # factors in float32, and a bit per column of the pool, in blocks of 128; norms and embedding are left alone
    learned = 2 * sum(8 * (4 * rows + -(-cols // 128) * 16) for rows, cols in MATRICES)
    assert estimate.host_bytes(made)["learned"] == learned
    delta = 2 * sum(4 * rows * 8 for rows, _ in MATRICES)
    assert estimate.disk_bytes(made) == {"delta": delta, "best": delta, "in_the_making": delta}


def test_lattice_copies_the_quantised_tensors(tiny: Path) -> None:
    stored = 2 * sum(rows * cols // 32 * 20 for rows, cols in MATRICES) + 448 * 64 // 32 * 34
    assert estimate.host_bytes(setting(tiny, scope="lattice"))["learned"] == stored + 4 * VECTORS


def test_only_what_params_finds_is_learned(tiny: Path) -> None:
    found = setting(tiny, params="q_proj", bits=4)
    assert [t.name for t in found.tuned] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
    assert estimate.host_bytes(found)["learned"] == 2 * 64 * 64 // 2


def test_plain_inference_leaves_out_what_tuning_adds(tiny: Path) -> None:
    parts = estimate.host_bytes(setting(tiny))
    assert estimate.peak(parts) - estimate.peak(parts, False) == parts["learned"] + parts["update"]


@pytest.mark.parametrize("scope", ["full", "adapter", "lattice"])
def test_the_engine_allocates_what_was_said(tiny: Path, scope: str, tmp_path: Path) -> None:
    from edgees.backends import llamacpp

    options: dict[str, Any] = {"scope": scope, "parallel": 3, "pairs": 2, "generations": 1, "rows": 2, "eval_rows": 2}
    options |= {"antithetic": True, "groups": 1}
    chosen = config.load(None, {"model": str(tiny), "task": "sums", "run": str(tmp_path / "run"), **options})
    made = setting(tiny, **options)
    with opening.open_engine(chosen) as engine:
        assert isinstance(engine, llamacpp.LlamaCppEngine)
        tune.tune(chosen, engine=engine)
        assert engine._ctx is not None
        assert (engine._ctx.length, engine._ctx.parallel) == (made.context, made.streams)
        assert (engine._ctx.micro, engine._ctx.outputs) == (made.micro, made.outputs)
        memory, expected = engine.memory(), estimate.host_bytes(made)
        assert {t.name for t in engine.tensors} >= {t.name for t in made.tuned}
        assert (memory.weights, memory.kv) == (expected["weights"], expected["kv"])
        assert memory.learned == expected["learned"]
    delta = (tmp_path / "run" / "delta.safetensors").stat().st_size
    assert 0 <= delta - estimate.disk_bytes(made)["delta"] < 64 << 10  # its header


def test_disk_is_what_tune_reserves(tiny: Path) -> None:
    chosen = config.load(None, {"model": str(tiny), "task": "sums", "scope": "adapter"})
    assert estimate.peak(estimate.disk_bytes(setting(tiny, scope="adapter"))) == tune.rehearse(chosen)["disk_bytes"]


# ---------------------------------------------------------------- sequences, contexts, calls
def test_contexts_are_by_need_in_steps_or_as_set(tiny: Path) -> None:
    assert setting(tiny).context == 256
    assert setting(tiny, max_tokens=250).context == 512
    assert setting(tiny, max_tokens=9999).context == 512  # the model was trained for no more
    assert setting(tiny, context=300).context == 512


def test_sequences_are_by_need_by_memory_or_as_set(tiny: Path) -> None:
    assert setting(tiny, pairs=2, rows=2, eval_rows=3).streams == 8
    assert setting(tiny, pairs=64).streams == 32
    assert setting(tiny, pairs=64, parallel=200).streams == 200
    one = 256 * 2 * 2 * 2 * 16 * 2
    assert setting(tiny, available=2 * 7 * one).streams == 7  # half of what there is
    assert setting(tiny, available=0).streams == 1


def test_a_text_has_a_token_per_three_bytes() -> None:
    for text in ("", "a", "abc", "abcd", "größer \U0001f600"):
        assert len(estimate.pieces(text)) == estimate.count(text) == -(-len(text.encode()) // 3)
    assert estimate.pieces("What is 2")[:2] == estimate.pieces("What is 7")[:2]
    assert estimate.pieces("What is 2") != estimate.pieces("What is 7")


def test_every_token_of_a_reply_is_computed_once(tiny: Path) -> None:
    made = setting(tiny, pairs=1, rows=1, loglik=0, parallel=2, heldout=0, eval_rows=1, max_tokens=10)
    prompt = len(made.work.prompt(made.work.task.train[0]))
    calls = made.calls["replies"]
    # two members; the first sampled token comes from the prompt, the tenth is not fed back
    assert calls.tokens == 2 * (prompt + 9)
    assert calls.shapes[2, 2] == 9
    assert calls.outputs == 2
    assert "likelihoods" not in made.calls


@pytest.mark.parametrize("limit", [estimate.STEPS - 1, estimate.STEPS, estimate.STEPS + 100])
def test_long_replies_go_on_as_they_began(tiny: Path, limit: int) -> None:
    made = setting(tiny, pairs=1, rows=1, loglik=0, parallel=2, max_tokens=limit)
    assert made.calls["replies"].shapes[2, 2] == limit - 1


def test_many_members_are_scaled_from_some(tiny: Path) -> None:
    few, many = (setting(tiny, pairs=pairs, rows=8).calls["likelihoods"] for pairs in (8, 800))
    assert many.scale == 100.0 and few.scale == 1.0
    assert many.tokens == 100 * few.tokens


def test_a_mixed_reward_needs_both_kinds_of_calls(tiny: Path) -> None:
    assert set(setting(tiny, loglik=0.5).calls) == {
        "probe", "evaluation", "replies", "likelihoods", "probe_likelihoods",
    }  # fmt: skip
    assert set(setting(tiny, loglik=0).calls) == {"probe", "evaluation", "replies"}


# ---------------------------------------------------------------- Hugging Face folders
def test_a_folder_in_four_bits_to_the_byte(folder: Path) -> None:
    made = setting(folder, engine="torch", scope="full", bits=4, parallel=3)
    linears = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    found = estimate.host_bytes(made)
    # 36 bytes for 64 weights; embedding and norms in bfloat16, the embedding in its file and in memory
    assert found["weights"] == linears // 64 * 36 + 448 * 64 * 2 * estimate.TORCH.mapped + VECTORS * 2
    assert found["kv"] == 3 * 256 * 2 * 2 * 2 * 16 * 4
    assert found["learned"] == (linears + 448 * 64) // 2 + 4 * VECTORS


def test_on_a_card_the_host_keeps_little(folder: Path) -> None:
    chosen = config.load(None, {"model": str(folder), "task": "sums", "engine": "torch", "parallel": 3})
    found = estimate.estimate(chosen, card="NVIDIA GeForce RTX 4090")
    assert found["card"] == "rtx4090" and found["available"]["device"] == 24 << 30
    assert found["device"]["kv"] == 3 * 256 * 2 * 2 * 2 * 16 * 2
    assert not {"kv", "weights", "learned"} & set(found["host"])
    assert found["ratio"] == found["device"]["peak"] / found["plain"]["device"]
    assert found["time"]["source"] == "rtx4090" and found["time"]["run"] > 0


def test_a_faster_card_takes_less_time(folder: Path) -> None:
    made = setting(folder, engine="torch")
    slow, fast = (
        estimate.run_time(made, estimate.on_paper(made, name, estimate.CARDS[name]))["run"]
        for name in ("rtx3060", "h200")
    )
    assert 0 < fast < slow


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"), ("RTX 4070 Laptop", "rtx4070laptop"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "t4"), ("rtx 4060 Ti", None), ("L40S", None), ("RTX", None),
    ],
)  # fmt: skip
def test_names_of_cards(name: str, known: str | None) -> None:
    assert estimate._known_card(name) == known


# ---------------------------------------------------------------- time
def test_calls_are_priced_by_columns_rows_and_context() -> None:
    pace = estimate.Pace("test", 0.0, (1, 3), (1.0, 2.0), (10.0, 30.0), 0.5, 0.0, 0.0)
    calls = estimate.Calls(scale=2.0, attended=4.0)
    calls.shapes.update({(1, 0): 3, (2, 2): 1})
    assert pace.of(calls) == 2 * (3 * 1.0 + (1.5 + 20.0) + 4 * 0.5)


def test_a_run_is_its_generations_evaluations_and_the_probe(tiny: Path) -> None:
    made = setting(tiny, generations=10, eval_every=4, loglik=0, pairs=3)
    pace = estimate.Pace("test", 0.0, (1, 256), (1.0, 1.0), (0.0, 0.0), 0.0, 5.0, 0.25)  # a second a call
    found = estimate.run_time(made, pace)
    replies, evaluation, probe = (
        sum(made.calls[name].shapes.values()) * made.calls[name].scale for name in ("replies", "evaluation", "probe")
    )
    assert found["generation"] == replies + 5.75
    assert found["run"] == pytest.approx(10 * (replies + 5.75) + 4 * evaluation + probe)
    limited = setting(tiny, time="30s", loglik=0)
    assert estimate.run_time(limited, pace)["run"] == 30.0


@pytest.mark.parametrize("scope", ["full", "adapter", "lattice"])
def test_calibration_measures_every_shape(tiny: Path, scope: str) -> None:
    pace = estimate.calibrate(setting(tiny, scope=scope))
    assert pace.columns == (1, 8, 32, 256)
    assert all(x > 0 for x in (*pace.body, *pace.head, pace.attention))
    assert (pace.step > 0) == (scope != "adapter")


# ---------------------------------------------------------------- will it fit
def test_what_does_not_fit_ends_with_3_and_a_setting_that_fits(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", tiny, "--task", "sums", "--pairs", 64, "--max-tokens", 200)
    need = estimate.peak(estimate.host_bytes(setting(tiny, pairs=64, max_tokens=200)))
    budget = need - MIB
    assert run(*arguments, "--budget", budget) == 3
    error = capsys.readouterr().err
    assert f"{need / 1e6:.0f} MB of memory" in error
    flags = error.split("this would fit: ")[1].split()
    assert flags[0] == "--parallel" and 1 <= int(flags[1]) < 32
    assert run(*arguments, "--budget", budget, *flags) == 0
    # nearest: one sequence more does not fit
    assert run(*arguments, "--budget", budget, "--parallel", int(flags[1]) + 1) == 3


def test_scope_and_bits_come_after_fewer_sequences(tiny: Path) -> None:
    chosen = config.load(None, {"model": str(tiny), "task": "sums", "parallel": 1, "bits": 8})
    task = opening.open_task(chosen)
    need = {
        key: estimate.peak(estimate.host_bytes(setting(tiny, parallel=1, **options)))
        for key, options in {
            "8": {"bits": 8},
            "4": {"bits": 4},
            "2": {"bits": 2},
            "adapter": {"scope": "adapter"},
        }.items()
    }
    assert need["adapter"] < need["2"] < need["4"] < need["8"]
    for key, changes in {"4": {"bits": 4}, "2": {"bits": 2}, "adapter": {"scope": "adapter"}}.items():
        assert estimate.estimate(chosen, task=task, budget=str(need[key]))["nearest"] == changes
    assert estimate.estimate(chosen, task=task, budget=str(need["8"]))["fits"]


def test_an_adapter_is_no_way_out_for_dense_noise(tiny: Path) -> None:
    chosen = config.load(None, {"model": str(tiny), "task": "sums", "parallel": 1, "bits": 2, "noise": "sign"})
    budget = estimate.peak(estimate.host_bytes(setting(tiny, parallel=1, bits=2, noise="sign"))) - 1
    found = estimate.estimate(chosen, budget=str(budget))
    assert not found["fits"] and found["nearest"] is None
    with pytest.raises(WillNotFit) as refusal:
        estimate.require_fit(found)
    assert "smaller model" in str(refusal.value.hint)


def test_a_longer_context_than_needed_is_cut(tiny: Path) -> None:
    chosen = config.load(None, {"model": str(tiny), "task": "sums", "context": 512, "parallel": 1, "scope": "adapter"})
    budget = estimate.peak(estimate.host_bytes(setting(tiny, context=512, parallel=1, scope="adapter"))) - 1000
    found = estimate.estimate(chosen, budget=str(budget))["nearest"]
    assert set(found) == {"context"} and setting(tiny, parallel=1, scope="adapter", **found).context == 256


def test_more_sequences_than_llamacpp_can_serve(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", tiny, "--task", "sums", "--parallel", 300) == 3
    assert "--parallel 256" in capsys.readouterr().err


def test_a_full_disk_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "free_disk", lambda chosen: 200_000)
    found = estimate.estimate(config.load(None, {"model": str(tiny), "task": "sums"}))
    assert found["problems"] == ["2 MB of disk, 0 MB there"]
    assert found["nearest"] == {"scope": "adapter", "factors": 8}


# ---------------------------------------------------------------- the command
KEYS = {
    "model", "engine", "card", "settings", "assumptions", "host", "device", "plain", "ratio", "disk", "time",
    "available", "fits", "problems", "nearest",
}  # fmt: skip


def test_json_and_text_hold_the_same_numbers(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", tiny, "--task", "sums", "--parallel", 4)
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == KEYS
    assert found["host"]["peak"] == sum(n for name, n in found["host"].items() if name != "peak")
    assert found["disk"]["peak"] == 3 * found["disk"]["delta"]
    assert found["ratio"] == pytest.approx(found["host"]["peak"] / found["plain"]["host"])
    assert set(found["time"]) == {"generation", "evaluation", "update", "run", "tokens", "source", "error"}
    assert found["device"] is None and found["settings"]["parallel"] == 4
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    for name, size in found["host"].items():
        assert any(line.split() == [name, f"{size / 1e6:.0f}", "MB"] for line in text.splitlines())
    assert "by calibration, give or take 50%" in text and "3 bytes of text a token" in text


def test_json_is_printed_even_when_it_will_not_fit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", tiny, "--task", "sums", "--budget", "1M", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["problems"]


def test_a_configuration_file_counts(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{tiny.as_posix()}"\ntask = "sums"\nscope = "adapter"\nparallel = 6\n')
    assert run(file, "--parallel", 2, "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["scope"], settings["parallel"], settings["bits"]) == ("adapter", 2, 0)


def test_no_engine_is_loaded_and_nothing_written(tiny: Path, folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from edgees import cli\n"
        f"assert cli.run(['estimate', '--task', 'sums', '--model', {str(tiny)!r}]) == 0\n"
        f"assert cli.run(['estimate', '--task', 'sums', '--model', {str(folder)!r}, '--engine', 'torch']) == 0\n"
        "assert not {'torch', 'llama_cpp', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"), [("8G", 8 << 30), ("500m", 500 << 20), ("1.5GiB", 3 << 29), ("2 kB", 2048), ("77", 77)]
)
def test_budgets(text: str, size: int) -> None:
    assert estimate.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "G", "8X", "nan", "1e9"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        estimate.parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--card", "rtx4090"), "computes on the CPU"),
        (("--budget", "much"), "is no size"),
        (("--model", "missing.gguf"), "no model file missing.gguf"),
        (("--engine", "toy"), "engine toy has nothing to estimate"),
        (("--engine", "torch"), "smollm2-135m is a GGUF model"),
        (("--bits", "3"), "bits = 3"),
        (("--task", "nothing"), "unknown task"),
    ],
)
def test_bad_input_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    if "--engine" not in arguments and "--model" not in arguments:
        arguments = (*arguments, "--model", str(tiny))
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_card_that_nobody_knows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--engine", "torch", "--model", folder, "--card", "voodoo2") == 2
    error = capsys.readouterr().err
    assert "'voodoo2' is not in the table" in error and "rtx4090" in error


def test_a_device_that_is_not_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    asked = ("--engine", "torch", "--model", folder, "--device")
    assert run(*asked, "cuda:1") == 2
    error = capsys.readouterr().err
    assert "device = cuda:1: no such GPU" in error and "--card" in error
    assert run(*asked, "tpu") == 2
    assert "cuda:NUMBER is needed" in capsys.readouterr().err
    assert run(*asked, "cpu") == 0
    assert run(*asked, "cuda", "--card", "rtx4090") == 0


def test_freed_streams_wait_for_company_and_share_a_call() -> None:
    """Jobs that end one by one: their successors, of all lengths, come in calls of a quarter of the streams."""
    streams = estimate._Counting(8, 256, 256, seamless=False, ragged=True)
    calls: list[list[int]] = []
    decode = streams.decode

    def counted(ids: Any, tokens: Any, *rest: Any) -> Any:
        calls.append([len(t) for t in tokens])
        return decode(ids, tokens, *rest)

    streams.decode = counted  # type: ignore[method-assign]
    jobs = [
        Job(i, Member(i, 0.1, 0), [1] * (5 + i), limit=2 + i, request=Request(CENTRE, (1,) * (5 + i), 2 + i))
        for i in range(16)
    ]
    Scheduler(streams, streams).complete(jobs)
    prompts = [c for c in calls if max(c) > 1]
    assert prompts[0] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert prompts[1:] == [[13, 14], [15, 16], [17, 18], [19, 20]]
    assert all(job.outcome == "length" and len(job.generated) == job.limit for job in jobs)


def test_the_torch_engine_has_no_lattice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--engine", "torch", "--model", folder, "--scope", "lattice") == 2
    assert "lattice" in capsys.readouterr().err


def test_a_header_without_its_sizes_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "whole.gguf")
    data = path.read_bytes().replace(b"llama.block_count", b"llama.block_cause", 1)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"key llama\.block_count is missing"):
        setting(path)
