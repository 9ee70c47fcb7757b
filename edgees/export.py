"""What was tuned, as files that other programs load: GGUF, Hugging Face safetensors, or a LoRA adapter.

Files are made in a hidden folder beside the target and put in place only when all of them are complete; whatever goes
wrong before that leaves no trace. Tensors are streamed: memory stays near that of a few million weights.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from edgees import blocks, evaluate, gguf_from_hf, hf_layout, merge, moments, nf4, noise, recommend
from edgees.backends.base import CENTRE, Request, TensorInfo
from edgees.backends.llamacpp import LlamaCppEngine
from edgees.context import diff
from edgees.episodes import Message
from edgees.errors import EdgeesError, ExportError, UsageError
from edgees.gguf_file import (
    GgufFile,
    GgufTensor,
    NewTensor,
    Producer,
    atomic_file,
    file_sha256,
    pack_kv,
    require_space,
    write_all,
    write_like,
)
from edgees.gguf_from_hf import Twin
from edgees.hf_files import HfFolder
from edgees.merge import FLOATS, Effective, Run, SafeTensors, finite, pieces, to_float
from edgees.report import size
from edgees.template import CHATML, ChatTemplate, TemplateRefused

KINDS = ("gguf", "safetensors", "adapter")
SHARD_BYTES = 5_000_000_000
"""Largest safetensors file, as Hugging Face cuts them."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FOUR_BIT = "NF4"
"""Linears as bitsandbytes keeps them, absmax quantised too; everything else in BF16."""

KL_BOUNDS = {"F32": 1e-3, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 3e-2, "same": 3e-2, "adapter": 3e-2}
"""Nats: mean Kullback-Leibler divergence of the next token's distribution in plain llama.cpp from that of the scored
model, up to which an export counts as what was scored. Measured on SmolLM2-135M: 0, 5e-6, 3e-4, 7e-3, 4e-3, 4e-3; for
the last three most of it is stock llama.cpp's rounding of activations to 8 bits in quantised products. Other types are
re-rounded; their loss is told instead."""
CALIBRATION_ROWS = 48
"""Training rows whose activations say which rounding errors matter."""
CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to five.",
    "Turn on the light in the kitchen at half past seven.",
)
CONTINUATION = 24
"""Tokens of greedy answer compared in each chat."""

Say = Callable[[str], None]
Make = Callable[[], np.ndarray]


def default_type(run: Run, to: str) -> str | None:
    """Type where the user names none. gguf: Q8_0, which holds what was scored at a quarter of F32's size; the base's
    own types where it is a float file, or where its codes were tuned themselves (``--scope lattice``). safetensors:
    BF16. adapter: none to choose. A Hugging Face folder counts as what its engine holds of it, which is 4-bit."""
    if to == "adapter":
        return None
    if to == "safetensors":
        return "BF16"
    if run.delta.spec.view == "lattice":
        return merge.SAME
    if isinstance(run.base, HfFolder):
        most = _main_type(run.base)
    else:
        sizes: Counter[str] = Counter()
        for t in run.base.tensors.values():
            sizes[t.type_name] += t.nbytes
        most = sizes.most_common(1)[0][0]
    return most if most in FLOATS else "Q8_0"


def check_request(to: str, type_name: str | None, out: Path) -> str | None:
    """``type_name`` as it is spelt here. :raises UsageError: kind, type and path that do not go together."""
    if to not in KINDS:
        raise UsageError(f"cannot export to {to!r}", f"there are: {', '.join(KINDS)}")
    if out.suffix.lower() == ".gguf" and to != "gguf":
        raise UsageError(f"--to {to} writes several files: {out} must be a folder", "leave the .gguf away")
    if type_name is None:
        return None
    known = {"gguf": merge.TYPES, "safetensors": (*DTYPES, FOUR_BIT), "adapter": ()}[to]
    if not known:
        raise UsageError("an adapter is written as it was tuned: it has no --type to choose", "leave --type out")
    found = {name.lower(): name for name in known}.get(type_name.lower())
    if found is None:
        raise UsageError(f"--to {to} has no type {type_name!r}", f"there are: {', '.join(known)}")
    return found


def export(
    run_dir: str | Path,
    to: str,
    out: str | Path,
    *,
    type_name: str | None = None,
    weights: str = "best",
    force: bool = False,
    verify: bool = False,
    bake: bool = False,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Write a run's model into folder ``out`` (``to`` gguf: also a file name that ends in .gguf).

    to: ``gguf``, ``safetensors`` or ``adapter``. weights: ``best`` by held-out reward, or ``last``. verify: load the
    result in plain llama.cpp and compare it with the scored model. bake: put the context into the GGUF's chat template,
    before conversations without a system message of their own. Returns what ``export --json`` prints: "files"
    ([{"path", "sha256", "bytes"}]), "notes", "verify" (None, or {"ok", ...}), "rescored" for re-rounded types, ...
    ``verify`` failing is no exception here: the files are in place and "ok" is False.

    :raises UsageError: a request that makes no sense, or files that are there already (without ``force``).
    :raises ExportError: what cannot be held by the format. :raises WillNotFit: the disk is too full.
    """
    out = Path(out).expanduser()
    type_name = check_request(to, type_name, out)
    single = to == "gguf" and out.suffix.lower() == ".gguf"
    folder = out.parent if single else out
    with ExitStack() as stack:
        run = stack.enter_context(merge.open_run(run_dir, weights))
        type_name = type_name or default_type(run, to)
        _require_possible(run, type_name)
        if bake and to != "gguf":
            raise UsageError("a context is baked into GGUF files only", "--to gguf; the others have context.json")
        plan = _Export(run, to, type_name, out.name if single else None, say, bake)
        if not force:
            _refuse_existing(folder, plan.names())
        stage = stack.enter_context(_stage(folder))
        plan.write(stage)
        checked = plan.verify(stage) if verify else None
        rescored = plan.rescore(stage) if plan.rounds else None
        files = [
            {"path": str(folder / name), "sha256": file_sha256(stage / name).removeprefix("sha256:"),
             "bytes": (stage / name).stat().st_size}
            for name in plan.written
        ]  # fmt: skip
        if not force:
            _refuse_existing(folder, plan.written)
        _publish(stage, folder, plan.written, to)
    return {
        "run": str(run.folder), "to": to, "type": type_name, "weights": run.weights, "generation": run.delta.generation,
        "base": {"path": str(run.base.path), "sha256": run.base.sha256().removeprefix("sha256:")},
        "files": files, "notes": plan.notes, "verify": checked, "rescored": rescored,
        "context": {"digest": run.context.digest, "diff": diff(run.first, run.context)},
    }  # fmt: skip


def require_verified(result: dict[str, Any]) -> None:
    """:raises ExportError: the files did not verify."""
    checked = result["verify"]
    if checked is not None and not checked["ok"]:
        raise ExportError(
            f"{result['files'][0]['path']} is not what was scored: {', '.join(checked['failed'])} differ",
            "the files are in place, for inspection only: please report this",
        )


def lines(result: dict[str, Any]) -> list[str]:
    """The same for people."""
    out = [f"{f['path']}  {size(f['bytes'])}" for f in result["files"]] + [f"note: {n}" for n in result["notes"]]
    if result["context"]["diff"]:
        out += ["the context changed in the run, to what lies beside the model as context.json:"]
        out += [f"  {_printable(line)}" for line in result["context"]["diff"].splitlines()]
    checked = result["verify"]
    if checked is not None:
        kl = checked["kl"]
        bound = "not bounded: re-rounded" if kl["bound"] is None else f"allowed: {kl['bound']:g}"
        out.append(
            f"verified in plain llama.cpp: {'ok' if checked['ok'] else 'FAILED: ' + ', '.join(checked['failed'])}; "
            f"{checked['same_answers']} of {checked['chats']} greedy answers the same, "
            f"KL {kl['mean']:.2g} nats ({bound})"
        )
    return out


def _printable(text: str) -> str:
    """A model may write control characters, which are not for terminals."""
    return "".join(c if c.isprintable() else "·" for c in text)


def _require_possible(run: Run, type_name: str | None) -> None:
    """:raises UsageError: a type that the run's kind of base rules out."""
    folder = isinstance(run.base, HfFolder)
    if type_name == merge.SAME and folder:
        raise UsageError("--type same: a Hugging Face folder has no GGUF types of its own", "choose one, such as Q8_0")
    if type_name == FOUR_BIT and not folder:
        raise UsageError(
            f"--type {FOUR_BIT} needs a run on a Hugging Face folder; {run.base.path} is a GGUF file",
            "choose BF16: bitsandbytes brings it to 4 bits on loading",
        )


# ---- putting files in place
def _refuse_existing(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise UsageError(f"{folder / name} exists already", "--force replaces it; or choose another --out")


@contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A hidden folder beside the files to be, gone afterwards; folders made for it go too unless something came in."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    stage: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".edgees-export-", dir=folder))
        yield stage
    except OSError as error:
        raise ExportError(f"cannot write into {folder}: {error.strerror or error}", "choose another --out") from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _publish(stage: Path, folder: Path, names: Sequence[str], to: str) -> None:
    for name in names:
        (stage / name).replace(folder / name)
    if to == "safetensors":  # shards of an older export would be taken for part of this one
        for stale in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
            if stale.name not in names:
                stale.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    data = text.encode()
    with atomic_file(path, len(data)) as file:
        file.write(data)


# ---- one export
@dataclass
class _Export:
    run: Run
    to: str
    type_name: str | None
    file_name: str | None
    say: Say
    bake: bool = False
    notes: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.effective = Effective(self.run.base, self.run.delta)
        self.rounds = self.type_name == FOUR_BIT or (self.to == "gguf" and self.type_name not in merge.EXACT)
        """Whether this re-rounds what was tuned, so that it is to be scored again."""
        if self.run.delta.generation == 0:
            self.notes.append("nothing was learned in these weights: this is the base")
        asked = self.run.recommended
        if asked and asked["attempts"] != "single":
            self.notes.append(f"scored with {recommend.told(asked)}: see recommended.json")

    @cached_property
    def form(self) -> GgufFile | Twin:
        """The base as llama.cpp sees it."""
        return Twin(self.run.base) if isinstance(self.run.base, HfFolder) else self.run.base

    def names(self) -> list[str]:
        """Files that can be foretold."""
        if self.to == "gguf":
            encoding = self.type_name if self.type_name != merge.SAME else _main_type(self.run.base)
            gguf = self.file_name or merge.gguf_name(self.form, str(encoding))
            return [gguf, *self.beside(gguf)]
        if self.to == "adapter":
            gguf = merge.gguf_name(self.form, "F32", "LoRA")
            return [gguf, "adapter_config.json", "adapter_model.safetensors", *self.beside(gguf)]
        return ["config.json", "model.safetensors", "model.safetensors.index.json", *self.beside(None)]

    def beside(self, gguf: str | None) -> dict[str, str]:
        """What tells how to ask the model: file name -> text."""
        return recommend.documents(self.run.recommended, self.to, gguf, self.run.context)

    def write(self, stage: Path) -> None:
        run, to = self.run, self.to
        self.say(f"writing {run.weights} weights (generation {run.delta.generation}) as {to} {self.type_name or ''}")
        if to == "gguf":
            self.written = self.names()[:1]
            found = self.moments(stage) if self.rounds else None
            template = self.template() if self.bake else None
            target = stage / self.written[0]
            self.notes += merge.write_gguf(self.effective, target, str(self.type_name), found, template)
        elif to == "safetensors":
            self.written = write_safetensors(self.effective, stage, str(self.type_name))
        else:
            self.written = write_adapter(self.run, stage, self.names()[0], self.form)
        documents = self.beside(self.written[0] if to != "safetensors" else None)
        for name, text in documents.items():
            _write_text(stage / name, text)
        if to == "safetensors" and run.recommended:
            path = stage / "generation_config.json"
            changed = recommend.generation_config(run.recommended, json.loads(path.read_text(encoding="utf-8")))
            _write_text(path, json.dumps(changed, ensure_ascii=False, indent=2) + "\n")
        self.written += documents

    def template(self) -> str:
        """The model's chat template with the context in it. :raises UsageError: there is nothing to put there."""
        messages = recommend.before(self.run.recommended, self.run.context)
        if not messages:
            raise UsageError("there is no system message or context to bake in", "leave --bake-context out")
        if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            raise UsageError(
                "examples with tool calls cannot be baked into a chat template",
                "leave --bake-context out: context.json lies beside the model",
            )
        own = str(self.form.metadata.get("tokenizer.chat_template") or CHATML)
        try:
            with ChatTemplate(own) as template:
                template.render([*messages, {"role": "user", "content": CHATS[0]}])
        except TemplateRefused as error:  # our engines put a system message before the question instead
            raise UsageError(
                f"the context cannot be baked into this model's chat template, which refuses it: {error.message}",
                "leave --bake-context out: context.json lies beside the model",
            ) from error
        return recommend.baked(own, messages)

    @contextmanager
    def scored(self, stage: Path) -> Iterator[LlamaCppEngine]:
        """The model as it was scored: our engine on base and delta. Of a Hugging Face folder, whose engine may not be
        here, plain llama.cpp on what it multiplied with, in float32."""
        settings = self.run.settings
        if isinstance(self.run.base, HfFolder):
            path = stage / "scored.gguf"
            if not path.exists():
                merge.write_gguf(self.effective, path, "F32")
            with evaluate.open_engine(settings, path, plain=True) as engine:
                yield engine
        else:
            with evaluate.open_engine(settings, self.run.base.path, plain=False) as engine:
                engine.attach(self.run.delta)
                yield engine

    def moments(self, stage: Path) -> dict[str, np.ndarray] | None:
        """What the tuned model's matrices are multiplied with on training rows, for careful rounding."""
        settings = self.run.settings
        try:
            task, scorer = evaluate.open_task(settings)
        except EdgeesError as error:
            self.notes.append(f"rounded without regard to the task: {error.message}")
            return None
        rows = task.train[:CALIBRATION_ROWS]
        names = [t.name for t in self.form.tensors.values() if len(t.dims) == 2 and t.name.startswith("blk.")]
        self.say(f"reading {len(rows)} training rows, to round with care")
        with scorer, self.scored(stage) as engine:
            texts = evaluate.texts(engine, rows, task, scorer, settings, self.run.context)
            found = moments.gather(engine, [t for t in texts if len(t) <= engine.context_length], names)
        if len(found) < len(names):
            self.notes.append(
                f"{len(names) - len(found)} of {len(names)} matrices are rounded without regard to the task"
            )
        return found

    # ---- checks
    def verify(self, stage: Path) -> dict[str, Any]:
        """Compare what lies in ``stage`` with the scored model; "failed" names the checks that did not pass."""
        self.say("verifying in plain llama.cpp")
        bound = KL_BOUNDS.get(self.type_name or "adapter")
        lora: Path | None = None
        if self.to == "safetensors":
            checks = check_safetensors(self.effective, stage, str(self.type_name), self.written)
        elif self.to == "adapter":
            lora = stage / self.written[0]
            checks = {"name": merge.follows_convention(lora.name)}
        else:
            checks = self.check_gguf(stage / self.written[0])
        with self.runnable(stage) as path:
            probe = self.compare(stage, path, lora)
        checks["tokens"] = probe.pop("tokens")
        if bound is not None:
            checks["kl"] = probe["kl"]["mean"] <= bound
        probe["kl"]["bound"] = bound
        failed = [name for name, fine in checks.items() if not fine]
        return {"ok": not failed, "failed": failed, **checks, **probe}

    @contextmanager
    def runnable(self, stage: Path) -> Iterator[Path]:
        """A GGUF of what was written, or of what an adapter goes onto."""
        base, path = self.run.base, stage / "runnable.gguf"
        if self.to == "gguf":
            yield stage / self.written[0]
            return
        if self.to == "adapter" and isinstance(base, GgufFile):
            yield base.path
            return
        try:
            if isinstance(base, GgufFile):
                to_gguf(base, stage, path)
            elif self.to == "adapter":
                merge.write_gguf(merge.GgufForm(self.effective.base_rows, Twin(base), {}, {}), path, "F32")
            else:
                merge.convert(stage, path, "F32")
            yield path
        finally:
            path.unlink(missing_ok=True)

    def check_gguf(self, path: Path) -> dict[str, Any]:
        base = self.form
        changed = {"general.file_type", "general.quantization_version"}
        changed |= {"tokenizer.chat_template"} if self.bake else set()
        with GgufFile(path) as made:
            keys = all(
                k in made.metadata and made.kv_bytes(k) == _key(base, k) for k in base.metadata if k not in changed
            )
            same = {n: t.dims for n, t in made.tensors.items()} == {n: t.dims for n, t in base.tensors.items()}
            types = all(self.typed(t) for t in made.tensors.values())
            tied = made.tied == base.tied
        own_name = self.file_name is not None
        return {
            "keys": keys, "tensors": same, "types": types, "tied_head": tied,
            "name": own_name or merge.follows_convention(path.name),
        }  # fmt: skip

    def typed(self, made: GgufTensor) -> bool:
        """Whether a written tensor has the type that was asked for, or a reason to have another (cases 9 and 10)."""
        before = self.form.tensors[made.name].type_name
        own = isinstance(self.form, GgufFile) and made.name not in self.effective.infos
        untouched = made.type_name == before and (len(made.dims) != 2 or own)
        if untouched or made.shape[1] % 32:
            return True
        if self.type_name == merge.SAME:
            return made.type_name == before
        if self.type_name in merge.K_MIXES or not made.name.startswith("blk."):
            return self.type_name in FLOATS or made.type_name not in FLOATS
        return made.type_name == self.type_name

    def meant(self, chat: Sequence[Message]) -> Sequence[Message]:
        """What the written template makes of a chat, in words for the model's own."""
        if not self.bake or chat[0]["role"] in ("system", "developer"):
            return chat
        return [*recommend.before(self.run.recommended, self.run.context), *chat]

    def compare(self, stage: Path, path: Path, lora: Path | None) -> dict[str, Any]:
        """Plain llama.cpp on ``path`` against the scored model: token ids, greedy answers, KL."""
        chats = [[{"role": "user", "content": text}] for text in CHATS] + self.conversations()
        threads = self.run.settings.threads
        with LlamaCppEngine(path, plain=True, threads=threads, lora=lora) as plain:
            prompts = [tuple(plain.encode_chat(chat)) for chat in chats]
            room = plain.context_length - CONTINUATION
            usable = [i for i, p in enumerate(prompts) if 0 < len(p) < room]
            requests = [Request(CENTRE, prompts[i], CONTINUATION) for i in usable]
            answers = [c.tokens for c in plain.generate(requests)]
            texts = [[*prompts[i], *a] for i, a in zip(usable, answers, strict=True)]
            theirs = [plain.logits(t)[len(prompts[i]) - 1 :] for i, t in zip(usable, texts, strict=True)]
        with self.scored(stage) as engine:
            same = [tuple(engine.encode_chat(self.meant(chat))) for chat in chats] == prompts
            greedy = [c.tokens for c in engine.generate(requests)]
            apart = [
                divergence(engine.logits(t)[len(prompts[i]) - 1 :], other)
                for i, t, other in zip(usable, texts, theirs, strict=True)
            ]
        kl = np.concatenate(apart)
        return {
            "tokens": same,
            "chats": len(usable),
            "same_answers": sum(a == b for a, b in zip(greedy, answers, strict=True)),
            "kl": {"mean": float(kl.mean()), "largest": float(kl.max()), "positions": len(kl)},
        }

    def conversations(self) -> list[list[dict[str, str]]]:
        """Two held-out questions of the run's own task, if it can be had."""
        try:
            task, scorer = evaluate.open_task(self.run.settings)
        except EdgeesError:
            return []
        scorer.close()
        if task.episodes or self.run.settings.agent_cmd:  # what is said there is not known before it is played
            return []
        context, given = self.run.context, self.run.settings.system
        system = given if context.system is None else context.system
        return [context.apply(task.conversation(row, system)) for row in task.heldout[:2]]

    def rescore(self, stage: Path) -> dict[str, Any] | None:
        """What a re-rounded type costs: rewards and likelihoods on held-out rows before and after, paired by row."""
        settings = self.run.settings
        try:
            _ = self.form  # without which llama.cpp cannot judge
            task, scorer = evaluate.open_task(settings)
        except EdgeesError as error:
            self.notes.append(f"{self.type_name} is re-rounded, and was not scored again: {error.message}")
            return None
        rows, _ = evaluate.choose(task, settings.eval_rows if settings.eval_rows < len(task.heldout) else 0, 0)
        self.say(f"{self.type_name} is re-rounded: scoring {len(rows)} held-out rows before and after")
        with scorer:
            with self.runnable(stage) as path, evaluate.open_engine(settings, path, plain=True) as plain:
                after = evaluate.answer(plain, rows, task, scorer, settings, self.run.context)
                wanted = evaluate.targets(plain, rows, task, settings, after, self.run.context)
                after_likely = evaluate.likelihoods(plain, wanted)
            with self.scored(stage) as engine:
                before = evaluate.answer(engine, rows, task, scorer, settings, self.run.context)
                before_likely = evaluate.likelihoods(engine, wanted)
        reward, likely = evaluate.compare(before.rewards, after.rewards), evaluate.compare(before_likely, after_likely)
        for part in (reward, likely):
            part["before"], part["after"] = part.pop("base"), part.pop("tuned")
        d = reward["difference"]["mean"]
        if d is not None:
            self.notes.append(
                f"{self.type_name} is re-rounded: held-out reward {reward['before']:.3f} before, {reward['after']:.3f} "
                f"after ({d:+.3f}, {reward['rows']} rows)"
            )
        return {**reward, "loglik": likely}


def _main_type(base: GgufFile | HfFolder) -> str:
    """The type of most of the layers' weights."""
    sizes: Counter[str] = Counter()
    for t in base.tensors.values():
        if not t.name.startswith(("token_embd", "output", "model.embed", "lm_head")):
            sizes[t.type_name] += t.shape[0] * t.shape[1]
    return sizes.most_common(1)[0][0]


def _key(base: GgufFile | Twin, key: str) -> bytes:
    """A key of the base as a GGUF file holds it."""
    return base.kv_bytes(key) if isinstance(base, GgufFile) else gguf_from_hf.pack(key, base.metadata[key])


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """float64 [n]: KL(softmax(p) || softmax(q)) in nats, row by row; logits float32 [n, vocabulary]."""
    out = np.empty(len(p))
    for i in range(len(p)):
        a, b = (x[i].astype(np.float64) - float(x[i].max()) for x in (p, q))
        a, b = a - math.log(np.exp(a).sum()), b - math.log(np.exp(b).sum())
        out[i] = float((np.exp(a) * (a - b)).sum())
    return out


# ---- safetensors
@dataclass(frozen=True)
class _Saved:
    """One tensor of a safetensors file. produce: its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Producer

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"F32": 4, "U8": 1}.get(self.dtype, 2)


def _save(path: Path, tensors: Sequence[_Saved], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, streamed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path, 8 + len(text) + at) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            written = 0
            for piece in t.produce():
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                file.write(data)
                written += data.nbytes
            if written != t.nbytes:
                raise ExportError(f"{path}: tensor {t.name!r} gave {written} bytes instead of {t.nbytes}")


_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose content stands in config.json."""


def _hf_names(base: GgufFile) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every parameter. ExportError naming a tensor that has none."""
    found = {}
    for name in base.tensors:
        if name in _IN_CONFIG:
            continue
        other = hf_layout.canonical(base.arch, name)
        if other is None:
            raise ExportError(
                f"{base.path}: tensor {name!r} has no Hugging Face name for {base.arch}", "export --to gguf keeps it"
            )
        found[name] = other
    return found


def _canonical(effective: Effective, name: str) -> Iterator[np.ndarray]:
    """float32 pieces of a tensor in Hugging Face's row order, norms without llama.cpp's shift."""
    base = effective.base
    assert isinstance(base, GgufFile)
    t = base.tensors[name]
    heads = hf_layout.rope_permuted(base.arch, name, base.metadata)
    shift = np.float32(hf_layout.norm_shift(base.arch, name))
    if t.vector:
        w = effective.rows(name)[0] - shift
        order = _rotary_order(t.shape[1], heads)
        yield w if order is None else _unpermuted(w, order)
        return
    for row0, n in pieces(t, t.shape[0] // heads if heads else 1):
        w = effective.rows(name, row0, n)
        order = _rotary_order(t.shape[0], heads)
        yield w if order is None else _unpermuted(w, order[row0 : row0 + n] - row0)


def _rotary_order(rows: int, heads: int) -> np.ndarray | None:
    """int32 [rows]: canonical place of each row of the file, None where they agree."""
    return TensorInfo("", "", rows, 1, False, 1.0, heads).source_to_canonical()


def _unpermuted(w: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(w)
    out[order] = w
    return out


@dataclass(frozen=True)
class _Parameter:
    """name: Hugging Face's; label: what errors call it; pieces: float32, in its order; packed: held in 4 bits."""

    name: str
    label: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]
    packed: bool = False


def _parameters(effective: Effective) -> list[_Parameter]:
    """What a Hugging Face folder holds, merged."""
    base = effective.base
    if isinstance(base, GgufFile):
        return [
            _Parameter(other, name, t.dims if t.vector else t.shape, partial(_canonical, effective, name))
            for name, other in _hf_names(base).items()
            for t in (base.tensors[name],)
        ]

    def whole(name: str) -> Iterator[np.ndarray]:
        return (effective.rows(name, row0, n) for row0, n in pieces(effective.tensors[name]))

    return [
        _Parameter(name, name, t.dims, partial(whole, name), t.four_bit or t.quantised)
        for name, t in base.tensors.items()
    ]


_PARTS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4")
"""What bitsandbytes saves of a weight: packed codes, then their state."""
_STATE_BYTES = 256
"""The last of them is JSON of a few lengths; padded with blanks, its size is known before the weights are."""


def _saved(p: _Parameter, dtype: str) -> list[_Saved]:
    """The tensors of a file that hold a parameter in ``dtype``."""
    if dtype != FOUR_BIT or not p.packed:
        kind = "BF16" if dtype == FOUR_BIT else dtype
        return [_Saved(p.name, kind, p.shape, lambda: (to_float(w, kind, p.label) for w in p.pieces()))]
    made: dict[str, np.ndarray] = {}

    def part(tail: str) -> Iterator[np.ndarray]:
        if not made:  # all at once for the first; gone after the last
            x = finite(np.concatenate(list(p.pieces())), p.label)
            made.update(nf4.to_state(nf4.quantise(x, dtype="bfloat16", name=p.label), p.name))
            state = p.name + _PARTS[-1]
            made[state] = np.frombuffer(made[state].tobytes().ljust(_STATE_BYTES), np.uint8)
        yield made[p.name + tail]
        if tail == _PARTS[-1]:
            made.clear()

    count = math.prod(p.shape)
    groups = -(-count // nf4.BLOCK)
    shapes = ((-(-count // 2), 1), (groups,), (16,), (-(-groups // nf4.NESTED_BLOCK),), (256,), (_STATE_BYTES,))
    kinds = ("U8", "U8", "F32", "F32", "F32", "U8")
    return [
        _Saved(p.name + tail, kind, shape, partial(part, tail))
        for tail, kind, shape in zip(_PARTS, kinds, shapes, strict=True)
    ]


_COPIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def _documents(effective: Effective, dtype: str, origin: Mapping[str, Any]) -> dict[str, bytes]:
    """Files beside the weights: configuration, tokenizer, chat template, stops."""
    base = effective.base
    copied: dict[str, bytes] = {}
    if isinstance(base, GgufFile):
        documents: dict[str, Any] = {
            "config.json": {**hf_layout.config(base, DTYPES[dtype]), "edgees": origin},
            "generation_config.json": hf_layout.generation_config(base),
            "tokenizer.json": hf_layout.tokenizer(base),
            "tokenizer_config.json": hf_layout.tokenizer_config(base),
            "special_tokens_map.json": hf_layout.special_tokens_map(base),
        }
    else:
        documents = {"config.json": _config(base, dtype, origin), "generation_config.json": _generation(base)}
        copied = {name: (base.path / name).read_bytes() for name in _COPIED if (base.path / name).is_file()}
    made = {name: json.dumps(data, ensure_ascii=False, indent=2).encode() + b"\n" for name, data in documents.items()}
    return made | copied


def _config(base: HfFolder, dtype: str, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The base's config.json with what has changed: dtype, quantisation; whether the head is tied is always said."""
    out = {key: value for key, value in base.config.items() if key not in ("quantization_config", "dtype")}
    out |= {"torch_dtype": DTYPES.get(dtype, "bfloat16"), "tie_word_embeddings": base.tied, "edgees": dict(origin)}
    if dtype == FOUR_BIT:
        linears = (t for t in base.tensors.values() if t.name.startswith("model.layers.") and not t.vector)
        wide = [t.name.removesuffix(".weight") for t in linears if not (t.four_bit or t.quantised)]
        out["quantization_config"] = {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *wide],
        }  # fmt: skip
    return out


def _generation(base: HfFolder) -> dict[str, Any]:
    """The base's generation_config.json, with every token that ended an answer in tuning (case 13)."""
    path = base.path / "generation_config.json"
    out: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    if stops := base.stop_ids:
        out["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    return out


def write_safetensors(effective: Effective, folder: Path, dtype: str, shard: int = SHARD_BYTES) -> list[str]:
    """Merged weights in Hugging Face layout with configuration, tokenizer and chat template; returns the file names.

    dtype: BF16, F16, F32, or NF4. shard: bytes of the largest weights file. ``config.json`` and the weights' metadata
    name the base by its hash (case 5). A tied head is not written, and ``tie_word_embeddings`` says so (case 6).
    """
    origin = {"base": effective.base.sha256(), "generation": int(effective.delta.generation)}
    documents = _documents(effective, dtype, origin)
    shards: list[list[_Saved]] = [[]]
    for parameter in _parameters(effective):
        parts = _saved(parameter, dtype)
        if shards[-1] and sum(s.nbytes for s in (*shards[-1], *parts)) > shard:
            shards.append([])
        shards[-1] += parts
    total = sum(t.nbytes for part in shards for t in part)
    require_space(folder / "model.safetensors", total)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for file_name, part in zip(names, shards, strict=True):
        _save(folder / file_name, part, {"edgees": json.dumps(origin)})
    if len(shards) > 1:
        where = {t.name: file_name for file_name, part in zip(names, shards, strict=True) for t in part}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        documents["model.safetensors.index.json"] = json.dumps(index, indent=2).encode() + b"\n"
    for file_name, data in documents.items():
        with atomic_file(folder / file_name, len(data)) as file:
            file.write(data)
    return [*names, *documents]


def check_safetensors(effective: Effective, folder: Path, dtype: str, names: Sequence[str]) -> dict[str, Any]:
    """Names, shapes, dtype and every byte of the weights against the scored model rounded once."""
    loaded = SafeTensors(folder)
    wanted = [s for p in _parameters(effective) for s in _saved(p, dtype)]
    there = {name: (entry[1], entry[2]) for name, entry in loaded.entries.items()}
    shapes = {s.name: list(s.shape) for s in wanted} == {name: shape for name, (_, shape) in there.items()}
    weights = True
    for s in wanted if shapes else ():
        raw, at = loaded.raw(s.name), 0
        for piece in s.produce():
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            weights &= bool(np.array_equal(raw[at : at + data.size], data))
            at += data.size
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "tensors": shapes,
        "types": all(there[s.name][0] == s.dtype for s in wanted if s.name in there),
        "weights": weights,
        "tied_head": config["tie_word_embeddings"] == ("lm_head.weight" not in there) == effective.base.tied,
        "files": all((folder / name).is_file() for name in names),
    }


def to_gguf(base: GgufFile, folder: Path, target: Path) -> None:
    """The safetensors in ``folder`` as GGUF again, as llama.cpp's converter would make it (rotary order included)."""
    loaded = SafeTensors(folder)

    def produce(name: str, other: str) -> Producer:
        def stream() -> Iterator[np.ndarray]:
            t, dtype = base.tensors[name], loaded.entries[other][1]
            n = t.shape[1] if t.vector else t.shape[0]
            heads = hf_layout.rope_permuted(base.arch, name, base.metadata)
            raw = loaded.raw(other).reshape(n, -1)
            if t.vector:
                w = blocks.decode_numpy(dtype, np.asarray(raw), 1, n)[0] + np.float32(
                    hf_layout.norm_shift(base.arch, name)
                )
                yield _permuted(w, heads).view(np.uint8)
                return
            step = n // heads if heads else max(1, (1 << 22) // t.shape[1])
            for row in range(0, n, step):
                yield _permuted(np.asarray(raw[row : row + step]), 1 if heads else 0)

        return stream

    replace = {}
    for name, other in _hf_names(base).items():
        kind = "F32" if base.tensors[name].vector else loaded.entries[other][1]
        replace[name] = (kind, produce(name, other))
    write_like(base, target, replace)


def _permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's conversion/llama.py."""
    if not heads:
        return np.ascontiguousarray(w)
    split = w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(w.shape)


# ---- adapter
def write_adapter(run: Run, folder: Path, gguf: str, form: GgufFile | Twin) -> list[str]:
    """The delta of an ``adapter`` run as LoRA: ``gguf`` for llama.cpp, two files for PEFT; exact, in float32.

    form: the base as llama.cpp sees it.

    delta = A B^T with B of +-1, and the scale is 1 (alpha = rank).
    :raises UsageError: another view, or a run that tuned what no LoRA holds (norms, an embedding that is the head too).
    """
    base, delta = run.base, run.delta
    spec = delta.spec
    if spec.view != "adapter":
        scope = "full" if spec.view == "refined" else spec.view
        raise UsageError(
            f"{run.folder} was tuned with --scope {scope}, whose delta is no low-rank adapter",
            "export --to gguf or safetensors; or tune with --scope adapter",
        )
    infos = spec.tensors if isinstance(form, GgufFile) else _under_gguf_names(form, spec.tensors)
    held = [info for info in infos if _fits_lora(run, info)]
    if not held:
        raise UsageError(f"{run.folder} tuned no matrix that an adapter could hold")
    rank = spec.factors
    tensors: list[NewTensor] = []
    saved: list[_Saved] = []
    for info in held:
        module = f"base_model.model.{info.name.removesuffix('.weight')}"
        a: Make = partial(delta.factors, info.name)
        b: Make = partial(noise.pool, spec.seed, info.id, info.cols, rank)

        def left(a: Make = a, info: TensorInfo = info) -> np.ndarray:
            """A in the file's row order."""
            order = info.source_to_canonical()
            return np.asarray(a() if order is None else a()[order])

        def flat(a: Make = a) -> np.ndarray:
            return np.asarray(a().T)

        def turned(b: Make = b) -> np.ndarray:
            return np.asarray(b().T)

        if info.source == "token_embd.weight":  # an embedding is looked up, not multiplied with
            parts: list[tuple[str, tuple[int, int], Make]] = [
                ("a", (rank, info.rows), left),
                ("b", (rank, info.cols), b),
            ]
            saved += [
                _Saved(f"{module}.lora_embedding_A", "F32", (rank, info.rows), _float32(flat)),
                _Saved(f"{module}.lora_embedding_B", "F32", (info.cols, rank), _float32(b)),
            ]
        else:
            parts = [("a", (info.cols, rank), turned), ("b", (rank, info.rows), left)]
            saved += [
                _Saved(f"{module}.lora_A.weight", "F32", (rank, info.cols), _float32(turned)),
                _Saved(f"{module}.lora_B.weight", "F32", (info.rows, rank), _float32(a)),
            ]
        tensors += [NewTensor(f"{info.source}.lora_{x}", "F32", dims, _float32(make)) for x, dims, make in parts]
    name = str(form.metadata.get("general.name", form.arch))
    keys: dict[str, Any] = {
        "general.type": "adapter", "general.architecture": form.arch, "general.name": f"{name} edgees",
        "adapter.type": "lora", "adapter.lora.alpha": float(rank),
        "edgees.base": base.sha256(), "edgees.generation": int(delta.generation),
    }  # fmt: skip
    write_all(folder / gguf, [pack_kv(key, value) for key, value in keys.items()], tensors)
    if any(info.name.startswith("gguf:") for info in held):
        return [gguf]  # an architecture without Hugging Face names
    origin = {"base": base.sha256(), "generation": str(delta.generation)}
    _save(folder / "adapter_model.safetensors", saved, {f"edgees.{key}": value for key, value in origin.items()})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": _origin(base), "r": rank,
        "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "modules_to_save": None, "target_modules": _modules(base, held),
    }  # fmt: skip
    data = json.dumps(settings, ensure_ascii=False, indent=2).encode() + b"\n"
    with atomic_file(folder / "adapter_config.json", len(data)) as file:
        file.write(data)
    return [gguf, "adapter_config.json", "adapter_model.safetensors"]


def _under_gguf_names(form: Twin, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Tuned tensors of a Hugging Face folder with the names and row orders that they have in its GGUF form."""
    places = {part.source: (name, part.heads) for name, part in reversed(form.parts.items())}
    return [replace(t, source=places[t.name][0], heads=places[t.name][1]) for t in tensors]


def _float32(make: Make) -> Producer:
    return lambda: iter([np.ascontiguousarray(make(), np.float32)])


def _fits_lora(run: Run, info: TensorInfo) -> bool:
    """False for a tensor that did not move and that no LoRA holds. :raises UsageError: it did move."""
    reason = ""
    if info.vector:
        reason = "a vector" if run.delta.vector(info.name).any() else ""
    elif info.source == "token_embd.weight" and run.base.tied:
        reason = "the embedding and the head at once" if run.delta.factors(info.name).any() else ""
    else:
        return True
    if reason:
        raise UsageError(
            f"{run.folder} also tuned {info.name}, which is {reason}: no LoRA holds that",
            "export --to gguf or safetensors, which hold everything; or tune with the adapter scope's own --params",
        )
    return False


def _modules(base: GgufFile | HfFolder, held: Sequence[TensorInfo]) -> list[str]:
    """PEFT's target_modules: last parts of names where all modules of that name are meant, else full names."""
    names = {info.name.removesuffix(".weight") for info in held}
    known = _hf_names(base) if isinstance(base, GgufFile) else {name: name for name in base.tensors}
    everything = {other.removesuffix(".weight") for name, other in known.items() if not base.tensors[name].vector}
    short = {name.rsplit(".", 1)[-1] for name in names}
    covered = {name for name in everything if name.rsplit(".", 1)[-1] in short}
    return sorted(short if covered == names else names)


def _origin(base: GgufFile | HfFolder) -> str:
    """What PEFT is to take for the base: a hub id where one is known, else the folder; of a GGUF its name."""
    if isinstance(base, HfFolder):
        return gguf_from_hf.hub_id(base.path) or str(base.path.resolve())
    for key in ("general.repo_url", "general.source.url", "general.base_model.0.repo_url"):
        url = str(base.metadata.get(key, ""))
        if "huggingface.co/" in url:
            return url.split("huggingface.co/", 1)[1]
    return str(base.metadata.get("general.name", base.path.name))
