"""Every setting of a run: a file (TOML or YAML) and flags in, one frozen :class:`Config` out.

The same names are used in files, as flags (``--sigma-end``) and as fields. Each field carries its documentation
(:func:`describe`), its range and whether it may differ on resume, so that help texts, checks and README cannot
drift apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edgees import attempts as trying
from edgees.errors import UsageError

FINDINGS = (
    "no-signal", "collapse", "hacking", "forgetting", "drift", "gap", "invalid", "length", "decay", "stall",
)  # fmt: skip
"""What the watchdogs (:mod:`edgees.watch`) can find, and ``stop_on`` may name."""
BEFORE = {"antithetic": True}
"""What held in runs that were begun before there was such a setting."""
DEFAULT_GENERATIONS = 10
"""In force when neither ``generations`` nor ``time`` is given."""


def _setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[Any, ...] = (),
    free: bool = False,
    path: bool = False,
    group: str = "run",
) -> Any:
    """A documented field. ``low``/``high`` are inclusive, ``above`` exclusive; ``free``: may change on resume."""
    metadata = {
        "doc": doc, "low": low, "high": high, "above": above, "choices": choices, "free": free, "path": path,
        "group": group,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """All settings of one run; see :func:`describe` for what each means."""

    # The journal holds the model's hash, so its name need not stay.
    model: str = _setting(
        "smollm2-135m",
        "GGUF file, or smollm2-135m, the embedded model; engine torch: Hugging Face folder or id",
        path=True,
        free=True,
    )
    task: str = _setting(
        "home",
        "home, sums, jsonl:FILE, reasoning_gym:NAME, env:FILE.py:CLASS, textarena:ID, gymnasium:ID or textworld:",
        path=True,
    )
    reward: tuple[str, ...] = _setting(
        (), "FILE.py[:FUNCTION] or a built-in scorer, several allowed; empty: the task's own", path=True
    )
    eval_data: str = _setting("", "JSONL file of held-out rows; empty: a split of the task's rows", path=True)
    system: str | None = _setting(None, "system message put before every prompt instead of the task's own")
    run: str = _setting("", "run folder; empty: runs/<task>-<number>", free=True)
    engine: str = _setting("llamacpp", "what runs the model", choices=("llamacpp", "torch", "toy"))
    device: str = _setting(
        "", "where the torch engine computes: cuda, cuda:1 or cpu; empty: on a GPU where there is one", free=True
    )
    threads: int = _setting(0, "CPU threads; 0: all cores. Never changes a result", low=0, high=4096, free=True)
    parallel: int = _setting(0, "sequences computed at once; 0: by need. Never changes a result", low=0, free=True)
    seed: int = _setting(0, "seed of all noise and of the order of rows", low=0, high=2**63 - 1)

    generations: int = _setting(
        0, f"generations to run; 0: until the time is over ({DEFAULT_GENERATIONS} if no time is set)", low=0,
        high=2**31, group="length",
    )  # fmt: skip
    time: float = _setting(
        0.0,
        "time for the run (90s, 15m, 1h30m, or seconds): no generation begins that would not end by then; 0: no limit",
        low=0.0, group="length",
    )  # fmt: skip

    scope: str = _setting(
        "full",
        "full: every weight, beside the base in residual planes; adapter: every matrix through a low-rank adapter; "
        "lattice: every weight on the base's own 4-bit grid; none: no weight, the context alone (evolve)",
        choices=("full", "adapter", "lattice", "none"), group="what is tuned",
    )  # fmt: skip
    bits: int = _setting(4, "scope full: bits a weight of the residual plane", choices=(2, 4, 8), group="what is tuned")
    factors: int = _setting(
        32, "scope adapter: rank of the adapter (pool of right factors)", low=1, high=4096, group="what is tuned"
    )
    params: str = _setting("", "regular expression: tune only tensors whose name it finds", group="what is tuned")
    amplitudes: tuple[str, ...] = _setting(
        (),
        "PATTERN=FACTOR, several allowed: sigma and step of tensors whose name the pattern finds first, times FACTOR",
        group="what is tuned",
    )
    sigma_abs: float | None = _setting(
        None, "absolute sigma instead of one relative to each tensor's RMS (to repeat papers); lr is absolute too",
        above=0.0, group="search",
    )  # fmt: skip

    noise: str = _setting("lowrank", "kind of perturbation", choices=("sign", "lowrank", "normal"), group="search")
    rank: int = _setting(1, "rank of the lowrank noise", low=1, high=64, group="search")
    pairs: int = _setting(
        32, "directions tried per generation: members, or where antithetic pairs of members", low=1, high=65536,
        group="search",
    )  # fmt: skip
    antithetic: bool = _setting(
        False,
        "two members try each direction, plus and minus; off: one does, so that the same rollouts try twice as many",
        group="search",
    )
    rows: int = _setting(8, "rows of the task that every member of a generation answers", low=1, group="search")
    groups: int = _setting(
        1, "sets of rows in a generation: members are dealt out over so many, each with its own rows", low=1,
        group="search",
    )  # fmt: skip
    sigma: float = _setting(
        0.04, "size of a perturbation, relative to each tensor's RMS; 0: chosen by a probe before the run", low=0.0,
        group="search",
    )  # fmt: skip
    sigma_end: float = _setting(
        0.5, "sigma at the end of the run as a fraction of the first (cosine in between)", above=0.0, high=10.0,
        group="search",
    )  # fmt: skip
    lr: float = _setting(
        0.2,
        "length of a step: with z-scored rewards an update moves each tensor by about lr/sqrt(pairs) of its RMS, "
        "whatever sigma is; follows sigma's schedule",
        above=0.0, group="search",
    )  # fmt: skip
    shaping: str = _setting(
        "zscore", "how rewards become coefficients", choices=("zscore", "ranks", "raw"), group="search"
    )
    shrink: bool = _setting(True, "shorten the step by the share of it that is noise", group="search")
    decay: float = _setting(
        0.0, "share of the learned delta forgotten per generation", low=0.0, high=1.0, group="search"
    )
    drift_budget: float = _setting(
        0.0, "bound on the RMS of the learned delta relative to the weights'; 0: none", low=0.0, group="search"
    )

    anchor: float = _setting(
        0.0,
        "reward that a member loses for each nat a token by which it has moved from the base on fixed texts, against "
        "forgetting; 0: none",
        low=0.0, group="search",
    )  # fmt: skip

    agent_cmd: str = _setting(
        "",
        "command of an agent program that plays each rollout, one process a rollout, unmodified: it finds the model at "
        "OPENAI_BASE_URL or ANTHROPIC_BASE_URL and its row on standard input; empty: the task's own way",
        path=True, group="episodes",
    )  # fmt: skip
    agent_timeout: float = _setting(300.0, "seconds an agent program may take", above=0.0, group="episodes")
    agent_memory: float = _setting(
        4096.0, "MiB of address space an agent program may use; 0: no limit", low=0.0, free=True, group="episodes"
    )
    agent_workers: int = _setting(
        0, "agent programs at once; 0: by cores and memory. Never changes a result", low=0, high=1024, free=True,
        group="episodes",
    )  # fmt: skip
    agent_env: tuple[str, ...] = _setting(
        (), "names of environment variables that agent programs get to see besides a few common ones", group="episodes"
    )
    turns: int = _setting(
        0, "replies an episode may have; 0: as many as its environment allows", low=0, group="episodes"
    )
    episode_tokens: int = _setting(
        0, "tokens that all replies of an episode may have together; 0: no limit", low=0, group="episodes"
    )

    context_file: str = _setting(
        "",
        "context to begin with: a context.json as export writes it, or a Markdown file of notes (a skill file)",
        path=True, group="context",
    )  # fmt: skip
    agent_context: str = _setting(
        "prompt",
        "how agent programs get it: prompt: put into every conversation; files: at EDGEES_SKILLS_FILE and "
        "EDGEES_CONTEXT_FILE",
        choices=("prompt", "files"), group="context",
    )  # fmt: skip
    evolve: tuple[str, ...] = _setting(
        (),
        "what of the context evolves with the weights: shots (worked examples), skills (notes distilled from tries), "
        "prompt (the system message, by reflection), or FILE.py[:FUNCTION] of your own; several allowed",
        path=True, group="context",
    )  # fmt: skip
    evolve_every: int = _setting(3, "generations between proposals of new contexts", low=1, group="context")
    evolve_candidates: int = _setting(4, "contexts on trial at once, at most", low=1, high=64, group="context")
    evolve_error: float = _setting(
        0.05, "bound on the probability that a context which changes nothing is adopted", above=0.0, high=0.5,
        group="context",
    )  # fmt: skip
    evolve_budget: float = _setting(
        0.2, "share of the rollouts that proposals may use for tries of their own", low=0.0, high=1.0, group="context"
    )
    evolve_tokens: int = _setting(
        512, "tokens that system message, notes and examples may have together", low=1, group="context"
    )
    reflector: str = _setting(
        "self",
        "the model that reflects on tries: self (the one that is tuned), a GGUF file, openai:MODEL or anthropic:MODEL "
        "(address and key from the environment; only these two send anything anywhere)",
        path=True, group="context",
    )  # fmt: skip
    redact: str = _setting(
        "",
        "FILE.py[:FUNCTION] through which a prompt goes before it is sent to openai: or anthropic:; what looks like a "
        "key or an address is masked in any case",
        path=True, group="context",
    )  # fmt: skip

    max_tokens: int = _setting(0, "tokens a reply may have; 0: the task's own limit", low=0, group="replies")
    temperature: float = _setting(
        0.0,
        "sampling temperature in tuning; 0: greedy. Evaluations are greedy unless attempts says otherwise",
        low=0.0, group="replies",
    )  # fmt: skip
    attempts: str = _setting(
        "single",
        "how a row is answered, in tuning and evaluations alike: single; best:N, the best of N sampled replies by the "
        "scorer; majority:N, the commonest answer of N sampled replies; retry:N, up to N replies, each told the score "
        "of the one before, of which the last counts. All but single are sampled at temperature in evaluations too",
        group="replies",
    )  # fmt: skip
    tools: bool = _setting(
        True, "environments: the model is shown their tools; off: it is not, as where it will be used without",
        group="replies",
    )  # fmt: skip
    grammar: str = _setting(
        "",
        "what a reply can be at all: actions or tools (one of those that an environment lists, one call of its tools), "
        "a JSON schema (FILE.json), or a grammar of llama.cpp's form (FILE.gbnf); empty: any text",
        path=True, group="replies",
    )  # fmt: skip
    context: int = _setting(0, "tokens one sequence may have; 0: by need", low=0, group="replies")
    loglik: float = _setting(
        0.0, "first weight (0 to 1) of the likelihood of the reference answer in the reward", low=0.0, high=1.0,
        group="reward",
    )  # fmt: skip
    loglik_hold: float = _setting(
        0.3, "fraction of the run for which that weight stays", low=0.0, high=1.0, group="reward"
    )
    loglik_end: float = _setting(
        0.8, "fraction of the run at which it has fallen to 0", low=0.0, high=1.0, group="reward"
    )
    scorer_timeout: float = _setting(60.0, "seconds one call of the scorer may take", above=0.0, group="reward")
    max_invalid: float = _setting(
        0.25, "share of a generation's rewards that may be invalid before the run stops", low=0.0, high=1.0,
        group="reward",
    )  # fmt: skip

    heldout: float = _setting(0.2, "fraction of the rows held out where the task has no split", low=0.0, high=0.9)
    limit: int = _setting(0, "use only the first so many training rows; 0: all", low=0)
    eval_every: int = _setting(2, "generations between held-out evaluations; 0: only first and last", low=0)
    stop_on: tuple[str, ...] = _setting(
        (),
        "end the run, the best so far kept, when a watchdog finds this; several allowed",
        choices=FINDINGS,
        free=True,
    )
    eval_rows: int = _setting(64, "held-out rows scored each time; 0: all", low=0)

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"hidden": True})
    """Names that the user set himself; a task's own defaults fill only the others."""

    @property
    def max_generations(self) -> int | None:
        """Generations at most, or None when only the time limits the run."""
        return self.generations or (None if self.time else DEFAULT_GENERATIONS)

    @property
    def members(self) -> int:
        """Members per generation."""
        return self.pairs * (2 if self.antithetic else 1)

    @property
    def tries(self) -> trying.Attempts:
        """``attempts``, read."""
        return trying.parse(self.attempts)

    @property
    def scored_at(self) -> float:
        """Temperature of held-out answers: that of tuning only where several are sampled for each row."""
        return 0.0 if self.tries.single else self.temperature

    @property
    def view(self) -> str:
        """Where the delta lives: ``refined``, ``adapter`` or ``lattice`` (design.md)."""
        return {"full": "refined", "none": "adapter"}.get(self.scope, self.scope)

    @property
    def factors_by_name(self) -> list[tuple[str, float]]:
        """(regular expression, factor) of ``amplitudes``, in order."""
        return [(p, float(f)) for p, _, f in (item.rpartition("=") for item in self.amplitudes)]

    @property
    def pattern(self) -> str:
        """Regular expression over the names of tensors to tune; '' for all.

        An adapter is to be exported exactly, so its scope leaves out what no LoRA file holds for every model: norms,
        biases, and the embedding (which may be the head too), unless ``params`` says otherwise.
        """
        return self.params or (r"^(?!.*(embed|norm|\.bias$))" if self.view == "adapter" else "")

    def with_defaults(self, defaults: Mapping[str, Any], source: str = "task") -> Config:
        """Fill what the user left open with a task's own defaults."""
        chosen = {k: v for k, v in defaults.items() if k not in self.given}
        # A user's time limit is not to be cut short by the task's number of generations, nor the reverse.
        if self.given & {"time", "generations"}:
            chosen.pop("time", None)
            chosen.pop("generations", None)
        values = {k: _coerce(k, v, source) for k, v in chosen.items()}
        if "groups" in values:  # as far as the user's own number of members allows
            least = 4 if self.evolve else 1 if values.get("antithetic", self.antithetic) else 2
            values["groups"] = max(1, min(values["groups"], values.get("pairs", self.pairs) // least))
        return _checked(dataclasses.replace(self, **values), source)

    def public(self, free: bool = True) -> dict[str, Any]:
        """Plain dict of all settings. ``free=False``: only what may not change on resume; of paths the file's name,
        for a run may be moved together with its data."""
        if free:
            return {name: _plain(getattr(self, name)) for name in SETTINGS}
        kept = {name: getattr(self, name) for name, f in SETTINGS.items() if not f.metadata["free"]}
        return {name: _plain(_name_only(name, value)) for name, value in kept.items()}

    def absolute(self) -> Config:
        """The same with the paths of files that exist made absolute, so that it means the same in any folder."""
        here = Path.cwd()
        return dataclasses.replace(self, **{name: _beside(name, getattr(self, name), here) for name in SETTINGS})


SETTINGS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in fields(Config) if not f.metadata.get("hidden")}


def describe(name: str) -> str:
    """One sentence on a setting with its default and choices, for help texts and README."""
    f = SETTINGS[name]
    text = str(f.metadata["doc"])
    if f.metadata["choices"]:
        text += " (" + ", ".join(str(c) for c in f.metadata["choices"]) + ")"
    default = _plain(f.default)
    return text if default in (None, "", []) else f"{text} [default: {default}]"


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML (``.toml``) or YAML (``.yaml``, ``.yml``) file; ``overrides`` (flags) win over it.

    Names may be written with ``-``. Relative paths in the file that exist beside the file are taken from there.
    ``None`` in ``overrides`` means "not given".

    :raises UsageError: unreadable file, unknown name, wrong type, value out of range; file and name are told.
    """
    values: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        for key, value in _read(file).items():
            name = _known(key, str(file))
            values[name] = _beside(name, _coerce(name, value, str(file)), file.parent)
    for key, value in (overrides or {}).items():
        if value is not None:
            name = _known(key, "command line")
            values[name] = _coerce(name, value, "command line")
    return _checked(Config(**values, given=frozenset(values)), str(path) if path is not None else "command line")


def to_toml(config: Config) -> str:
    """The complete configuration as TOML; :func:`load` of it gives an equal :class:`Config`."""
    lines = ["# edgees: all settings of this run"]
    for name, f in SETTINGS.items():
        value = getattr(config, name)
        comment = str(f.metadata["doc"])
        lines.append(f"\n# {comment}")
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def differences(a: Config | Mapping[str, Any], b: Config | Mapping[str, Any], free: bool = True) -> list[str]:
    """``name: value in a -> value in b`` for each setting in which they differ (``free=False``: that matters)."""
    left = a.public(free) if isinstance(a, Config) else dict(a)
    right = b.public(free) if isinstance(b, Config) else dict(b)
    names = [n for n in SETTINGS if n in left or n in right]
    names += sorted((set(left) | set(right)) - set(SETTINGS))
    if not free:
        names = [n for n in names if n not in SETTINGS or not SETTINGS[n].metadata["free"]]
    default = {**Config().public(), **BEFORE}
    result = []
    for n in names:
        old, new = left.get(n, default.get(n)), right.get(n, default.get(n))
        if _plain(old) != _plain(new):
            result.append(f"{n}: {_show(old)} -> {_show(new)}")
    return result


def duration(text: str | float) -> float:
    """Seconds from ``90``, ``"90s"``, ``"15m"``, ``"1h30m"``, ``"2d"``. :raises ValueError: anything else."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    cleaned = str(text).strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", cleaned):
        return float(cleaned)
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", cleaned):
        raise ValueError("a time like 90s, 15m or 1h30m is needed")
    unit = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * unit[u] for number, _, u in re.findall(r"(\d+(\.\d+)?)([dhms])", cleaned))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no configuration file {file}", "give a .toml or .yaml file, or flags only") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder, not a configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    suffix = file.suffix.lower()
    data: Any
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{file} is not valid YAML: {error}") from error
    elif suffix == ".toml":
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{file} is not valid TOML: {error}") from error
    else:
        raise UsageError(f"{file}: a configuration ends in .toml, .yaml or .yml")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{file} holds a {type(data).__name__}, not settings", "write lines like: generations = 20")
    return data


def _known(key: Any, source: str) -> str:
    name = str(key).replace("-", "_")
    if name in SETTINGS:
        return name
    near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "known settings: " + ", ".join(SETTINGS)
    raise UsageError(f"{source}: unknown setting {str(key)!r}", hint)


def _coerce(name: str, value: Any, source: str) -> Any:
    """``value`` as the type that the setting has."""
    kind = str(_known_type(name))
    try:
        if name == "time":
            return duration(value)
        if kind == "tuple[str, ...]":
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
                raise ValueError("a text or a list of texts is needed")
            return tuple(items)
        if kind == "bool":
            if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
                return value.lower() in ("true", "yes")
            if not isinstance(value, bool):
                raise ValueError("true or false is needed")
            return value
        if kind == "str" or kind == "str | None":
            if not isinstance(value, str):
                raise ValueError("a text is needed")
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("a number is needed")
        # YAML 1.1 reads 1e-3 as text.
        number = float(value) if not isinstance(value, int) else value
        if kind == "int":
            if number != int(number):
                raise ValueError("a whole number is needed")
            return int(number)
        return float(number)
    except (ValueError, OverflowError) as error:
        reason = str(error) if "needed" in str(error) else "a number is needed"
        raise UsageError(f"{source}: {name} = {_show(value)}: {reason}", describe(name)) from None


def _known_type(name: str) -> Any:
    return SETTINGS[name].type


def _beside(name: str, value: Any, folder: Path) -> Any:
    """Paths in a configuration file mean files beside it, wherever the command runs."""
    if not SETTINGS[name].metadata["path"]:
        return value
    if isinstance(value, tuple):
        return tuple(_beside(name, v, folder) for v in value)
    if name == "agent_cmd":
        return _command(value, lambda word: str(folder / word) if (folder / word).is_file() else word)
    found = _path_in(name, value)
    if found and found[2] and not Path(found[2]).is_absolute() and (folder / found[2]).exists():
        return f"{found[1]}{folder / found[2]}{found[3]}"
    return str(value)


def _name_only(name: str, value: Any) -> Any:
    """A path setting without its folders."""
    if not SETTINGS[name].metadata["path"]:
        return value
    if isinstance(value, tuple):
        return tuple(_name_only(name, v) for v in value)
    if name == "agent_cmd":
        return _command(value, lambda word: Path(word).name if "/" in word else word)
    found = _path_in(name, value)
    return found[1] + Path(found[2]).name + found[3] if found else value


def _command(text: str, change: Callable[[str], str]) -> str:
    """A command line with each word changed; one that cannot be read stays, and is refused where it is used."""
    try:
        return shlex.join(change(word) for word in shlex.split(text))
    except ValueError:
        return text


def _path_in(name: str, value: str) -> re.Match[str] | None:
    """Groups (prefix, path, tail) of ``jsonl:rows.jsonl``, ``score.py:f*0.5``, ``model.gguf``."""
    task = r"(env:)(.+?\.py)((?:[:?].*)?)" if value.startswith("env:") else r"(jsonl:)(.*)()"
    patterns = {"task": task, "reward": r"()(.+?\.py)((?:[:*].*)?)"}
    return re.fullmatch(patterns.get(name, "()(.*)()"), value, re.DOTALL)


def _checked(config: Config, source: str) -> Config:
    for name, f in SETTINGS.items():
        value, meta = getattr(config, name), f.metadata
        if value is None:
            continue
        problem = ""
        if meta["choices"] and not set(value if isinstance(value, tuple) else (value,)) <= set(meta["choices"]):
            problem = "one of " + ", ".join(str(c) for c in meta["choices"]) + " is needed"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                problem = "a finite number is needed"
            elif meta["low"] is not None and value < meta["low"]:
                problem = f"at least {meta['low']:g} is needed"
            elif meta["above"] is not None and value <= meta["above"]:
                problem = f"more than {meta['above']:g} is needed"
            elif meta["high"] is not None and value > meta["high"]:
                problem = f"at most {meta['high']:g} is allowed"
        elif name == "device" and not re.fullmatch(r"(cpu|cuda(:\d{1,2})?)?", value):
            problem = "cpu, cuda or cuda:NUMBER is needed"
        if problem:
            raise UsageError(f"{source}: {name} = {_show(value)}: {problem}", describe(name))
    try:
        tries = config.tries
    except ValueError as error:
        raise UsageError(f"{source}: attempts = {_show(config.attempts)}: {error}", describe("attempts")) from None
    if tries.kind in trying.SAMPLED and config.temperature == 0.0:
        raise UsageError(
            f"{source}: attempts = {_show(config.attempts)} with temperature = 0: all {tries.count} replies would be "
            "the same",
            "set a temperature, e.g. --temperature 0.7",
        )
    if config.params:
        try:
            re.compile(config.params)
        except re.error as error:
            raise UsageError(f"{source}: params = {config.params!r} is no regular expression: {error}") from None
    for item in config.amplitudes:
        pattern, _, factor = item.rpartition("=")
        try:
            re.compile(pattern)
            fine = bool(pattern) and 0 < float(factor) < math.inf
        except (re.error, ValueError):
            fine = False
        if not fine:
            raise UsageError(
                f"{source}: amplitudes = {item!r} is not PATTERN=FACTOR", "e.g. --amplitudes 'self_attn=2'"
            )
    if config.scope == "lattice" and config.engine == "torch":
        raise UsageError(f"{source}: scope = 'lattice' is of GGUF files alone", "use scope full or adapter")
    if config.scope == "adapter":
        if config.noise != "lowrank":
            raise UsageError(
                f"{source}: noise = {config.noise!r} with scope = 'adapter': an adapter needs noise = 'lowrank'",
                "use scope full for the dense kinds",
            )
        if config.rank > config.factors:
            raise UsageError(f"{source}: rank = {config.rank} is more than factors = {config.factors}")
    least = config.groups * (1 if config.antithetic else 2)
    if config.pairs < least:
        raise UsageError(
            f"{source}: pairs = {config.pairs} is too few for groups = {config.groups}: a member is compared with the "
            "others of its group",
            f"pairs = {least} or more, or antithetic = true" if config.groups == 1 else "fewer groups, or more pairs",
        )
    if config.loglik_hold > config.loglik_end:
        raise UsageError(
            f"{source}: loglik_hold = {config.loglik_hold:g} lies after loglik_end = {config.loglik_end:g}"
        )
    return config


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _show(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, default=str)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
