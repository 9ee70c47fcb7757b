"""A configuration -> what a run is made of but its folder: rows, scorer, players, model; cheap before dear."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgees import __version__, merge, model_path, native, rewards, rollout
from edgees.backends.base import Engine
from edgees.config import Config
from edgees.config import load as load_config
from edgees.context import Context
from edgees.context import load as load_context
from edgees.delta import Delta, DeltaSpec
from edgees.episodes import Episodes
from edgees.errors import RunError, UsageError
from edgees.history import History
from edgees.rewards import Scorer
from edgees.tasks import load_task
from edgees.tasks.rows import Row, Task
from edgees.tools import grammar as written

if TYPE_CHECKING:
    from edgees.agents import Agents

LEAST = 4
"""Members of a group where contexts are on trial: two on each side of a row."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Setup:
    """Everything that a run is made of but its folder."""

    config: Config
    task: Task
    scorer: Scorer
    engine: Engine
    release: Callable[[], None]
    """Closes the engine if it was made here."""
    episodes: Episodes | None = None
    agents: Agents | None = None
    context: Context = field(default_factory=Context)
    """The one that a run begins with."""
    grammar: str = ""
    """As of :class:`edgees.rollout.Settings`."""

    def header(self, spec: DeltaSpec) -> dict[str, Any]:
        """First line of the journal."""
        asked = self.replies(0, 0.0)
        return {
            "edgees": __version__, "model": Path(self.config.model).name, "base": self.engine.base_hash,
            "data": _data_hash(self.config, self.task), "config": self.config.public(free=False),
            "seed": self.config.seed, "pairs": self.config.pairs, "delta": spec.to_dict(),
            "context": self.context.to_dict(),
            "recommended": {
                "attempts": str(asked.attempts), "temperature": asked.temperature, "max_tokens": asked.max_tokens,
                "tools": asked.tools, "system": asked.system, **({"grammar": asked.grammar} if asked.grammar else {}),
            },
        }  # fmt: skip

    def with_players(self, stack: ExitStack) -> Setup:
        """The same with whoever plays with the members, closed with ``stack``.

        :raises UsageError: the agent program cannot be started.
        """
        c = self.config
        if c.agent_cmd:
            from edgees.agents import Agents

            agents = Agents(
                c.agent_cmd, engine=self.engine, workers=c.agent_workers, deadline=c.agent_timeout,
                memory=int(c.agent_memory * 2**20), passed=c.agent_env,
            )  # fmt: skip
            stack.callback(agents.close)
            return replace(self, agents=agents)
        if self.task.episodes is not None:
            episodes = self.task.episodes()
            stack.callback(episodes.close)
            return replace(self, episodes=episodes)
        return self

    def replies(
        self, generation: int, temperature: float, context: Context | None = None, contexts: Sequence[Context] = ()
    ) -> rollout.Settings:
        """How rows are answered. temperature: of single answers; where a row gets several attempts, these are made at
        the configuration's wherever they are made, so that evaluations show what is tuned for. context: of all
        rollouts, None: the one that the run begins with; contexts: of each, where they differ."""
        c = self.config
        if not c.tries.single:
            temperature = c.temperature
        return rollout.Settings(
            max_tokens=self.config.max_tokens or self.task.max_tokens,
            conversation=self.conversation,
            temperature=temperature,
            seed=self.config.seed,
            generation=generation,
            episodes=self.episodes,
            agents=self.agents,
            system=self.config.system if self.config.system is not None else self.task.system,
            turns=self.config.turns,
            tokens=self.config.episode_tokens,
            context=self.context if context is None else context,
            contexts=contexts,
            files=self.config.agent_context == "files",
            attempts=c.tries,
            judge=lambda played: rewards.judge(self.scorer, played).rewards,
            vote=self.scorer.answers,
            tools=c.tools,
            grammar=self.grammar,
        )

    def conversation(self, row: Row, context: Context) -> list[dict[str, Any]]:
        """A row's question with a context before it."""
        system = self.config.system if context.system is None else context.system
        return context.apply(self.task.conversation(row, system))

    def heldout(self) -> list[Row]:
        """The rows of an evaluation: all held out, or always the same ``eval_rows`` of them, chosen by a hash."""
        rows, count = list(self.task.heldout), self.config.eval_rows
        if not count or count >= len(rows):
            return rows
        by_hash = sorted(rows, key=lambda row: hashlib.blake2b(row.id.encode(), digest_size=8).digest())
        names = {row.id for row in by_hash[:count]}
        return [row for row in rows if row.id in names]


def open_setup(
    config: Config,
    stack: ExitStack,
    engine: Engine | None = None,
    task: Task | None = None,
    scorer: Scorer | None = None,
    begun: History | None = None,
) -> Setup:
    """What is not given is made, the cheap before the dear: rows, scorer (tried on a dry run), model; closed with
    ``stack``.

    begun: the journal of a run that is to go on with just these rows and this model.
    """
    config = config.absolute()
    task = task or open_task(config)
    if begun is None:
        config = config.with_defaults(_defaults(config, task), f"task {task.name}")
    elif _data_hash(config, task) != begun.header["data"]:
        raise RunError(
            f"the rows of task {task.name} are not those that {begun.path.parent} began with", "restore the data"
        )
    _check_task(config, task)
    first = first_context(config, begun)
    grammar = open_grammar(config, task)
    if not config.tries.single and config.loglik >= 1.0 and config.loglik_hold >= 1.0:
        note = (
            f"attempts = {config.tries} counts in evaluations alone: with loglik = 1 to the end no answers are made in "
            "tuning (--loglik 0 tunes for it)"
        )
        task = replace(task, warnings=(*task.warnings, note))
    scorer = scorer or stack.enter_context(open_scorer(config, task))
    if not (task.episodes or config.agent_cmd):  # whoever plays may say things that no reference answer shows
        scorer.dry_run(task.train)
    native.threads(config.threads)
    models = stack.enter_context(ExitStack())
    if engine is None:
        engine = open_engine(config)
        models.callback(engine.close)
    if begun is not None:
        require_same_base(begun, engine.base_hash, config.model)
        moved = "origin" in begun.header  # by replay: the measures of the first base hold
        if (under_names_of(engine, begun.spec, config.model) if moved else spec_of(config, engine)) != begun.spec:
            raise RunError(
                f"the engine sees other tensors than {begun.path.parent} began with",
                "use the edgees version that began it",
            )
    if grammar:
        engine.check_grammar('root ::= "a"' if grammar in OWN_GRAMMARS else grammar)
    setup = Setup(config, task, scorer, engine, models.close, context=first, grammar=grammar)
    return setup.with_players(stack)


def _defaults(config: Config, task: Task) -> dict[str, Any]:
    """The task's own settings; an agent program has no likelihoods, so what goes with them does not hold for it."""
    return {} if config.agent_cmd else dict(task.defaults)


def open_task(config: Config) -> Task:
    """The task that a configuration names. Its split does not depend on the run's seed: runs stay comparable."""
    return load_task(
        config.task,
        eval_data=config.eval_data or None,
        split=config.heldout,
        limit=config.limit or None,
    )


def open_scorer(config: Config, task: Task) -> Scorer:
    """The user's scorers, else the task's own. :raises UsageError: there is none."""
    specs = config.reward or task.reward
    if not specs and (task.episodes or config.agent_cmd):
        return Scorer([])  # the episodes pay themselves
    if not specs:
        raise UsageError(f"task {task.name} has no scorer of its own", "name one: --reward score.py, or --reward exact")
    return rewards.load(specs, deadline=config.scorer_timeout)


def first_context(config: Config, begun: History | None = None) -> Context:
    """The context that a run begins with: of the journal where there is one, else of the user's file."""
    if begun is not None:
        return begun.context(0)
    return load_context(config.context_file) if config.context_file else Context()


OWN_GRAMMARS = ("actions", "tools")
"""An environment's, made anew for every turn."""


def open_grammar(config: Config, task: Task) -> str:
    """One of ``OWN_GRAMMARS``, or GBNF from the user's file; empty: none.

    :raises UsageError: a file that is not there or is no schema, or a setting that means nothing here.
    """
    chosen = config.grammar
    if not chosen:
        return ""
    if config.agent_cmd:
        raise UsageError(
            "grammar is not for agent programs, which ask for what they need",
            'a program sends response_format or tool_choice "required", and the reply follows',
        )
    if chosen in OWN_GRAMMARS:
        if task.episodes is None:
            raise UsageError(f"grammar = {chosen!r} is of environments, and task {task.name} is none", "give a file")
        if chosen == "tools" and not config.tools:
            raise UsageError("grammar = 'tools' while the model is shown none", "set tools = true")
        return chosen
    file = Path(chosen)
    if file.suffix not in (".json", ".gbnf"):
        raise UsageError(f"grammar = {chosen!r} is neither actions, tools, FILE.json nor FILE.gbnf")
    try:
        text = file.read_text("utf-8-sig")
        return written(schema=json.loads(text)) if file.suffix == ".json" else text
    except FileNotFoundError:
        raise UsageError(f"grammar: there is no file {chosen}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"grammar: {chosen} cannot be read: {error}") from None


def open_engine(config: Config) -> Engine:
    """The engine that a configuration names, its model loaded."""
    if config.engine == "toy":
        from edgees.backends.toy import ToyEngine

        return ToyEngine(config.model, params=config.pattern)
    if config.engine == "llamacpp":
        from edgees.backends.llamacpp import LlamaCppEngine

        return LlamaCppEngine(
            model_path.resolve(config.model), context=config.context, parallel=config.parallel,
            threads=config.threads, params=config.pattern or None,
        )  # fmt: skip
    from edgees.backends.torch_nf4 import TorchEngine

    return TorchEngine(
        model_path.resolve_folder(config.model), context=config.context, parallel=config.parallel,
        threads=config.threads, params=config.pattern or None, device=config.device,
    )  # fmt: skip


def base_hash(config: Config) -> str:
    """``sha256:...`` of the base that a configuration names, without loading it into an engine."""
    if config.engine == "toy":
        return open_engine(config).base_hash
    with merge.open_base(config) as base:
        return base.sha256()


def spec_of(config: Config, engine: Engine) -> DeltaSpec:
    """What is tuned, and how."""
    view = config.view
    return DeltaSpec(
        tuple(replace(t, amplitude=_amplitude(config, t.name)) for t in engine.tensors),
        view,
        config.bits if view == "refined" else 0,
        config.factors if view == "adapter" else 0,
        config.noise,
        config.rank,
        config.seed,
        absolute=config.sigma_abs is not None,
    )


def open_weights(run: str | Path, weights: str, stack: ExitStack) -> tuple[History, Config, Delta, str]:
    """(journal, settings, learned weights opened for reading, which) of a run; closed with ``stack``.

    weights: ``best``, which is ``last`` while nothing better than the base was found, or ``last``.

    :raises RunError: no run there, or damaged. That the base is the run's is for the caller to see.
    """
    folder = Path(run)
    history = History.open(folder / "history.jsonl", repair=False)
    resolved = folder / "config.resolved.toml"
    if not resolved.is_file():
        raise RunError(f"{folder} is no run folder: {resolved.name} is missing")
    if weights not in ("best", "last"):
        raise RunError(f"weights are best or last, not {weights!r}")
    best = folder / "best" / "delta.safetensors"
    chosen = "best" if weights == "best" and best.is_file() else "last"
    delta = stack.enter_context(Delta.open(best if chosen == "best" else folder / "delta.safetensors", write=False))
    return history, load_config(resolved), delta, chosen


def _amplitude(config: Config, name: str) -> float:
    for pattern, factor in config.factors_by_name:
        if re.search(pattern, name):
            return factor
    return 1.0


def under_names_of(engine: Engine, spec: DeltaSpec, model: str) -> DeltaSpec:
    """What a delta means to another engine: the same tensors, where they are there and in which order of rows.

    :raises RunError: the first tensor that is missing, has another shape, or cannot be tuned there.
    """
    there = {t.name: t for t in engine.tensors}
    frozen = dict(engine.frozen)
    tensors = []
    for t in spec.tensors:
        found = there.get(t.name)
        if found is None:
            raise RunError(
                f"{model} has no tensor {t.name} to tune, which the history holds steps for"
                + (f": {frozen[t.name]}" if t.name in frozen else ""),
                "give another form of the very model that the history began with",
            )
        if (found.rows, found.cols) != (t.rows, t.cols):
            raise RunError(
                f"{t.name} is {found.rows} x {found.cols} in {model}, {t.rows} x {t.cols} in the history",
                "give another form of the very model that the history began with",
            )
        tensors.append(replace(t, source=found.source, heads=found.heads))
    names = {t.name for t in spec.tensors}
    if HEAD in there and HEAD not in names and EMBEDDING in names:
        raise RunError(
            f"{model} has a tensor {HEAD} of its own; in the run it was {EMBEDDING}, or was not tuned",
            "give a form of the model that shares the two, as the first base did",
        )
    return replace(spec, tensors=tuple(tensors))


def check_answering(config: Config, task: Task) -> None:
    """:raises UsageError: ``attempts`` or ``tools`` that have no meaning for what plays the rows."""
    rollout.require_attempts(config.tries, task.episodes is not None or bool(config.agent_cmd))
    if not config.tools and (task.episodes is None or config.agent_cmd):
        what = "an agent program brings its own tools" if config.agent_cmd else f"task {task.name} has no tools"
        raise UsageError(f"tools = false: {what}", "leave tools out; it is for environments (env:FILE.py:CLASS)")


def _check_task(config: Config, task: Task) -> None:
    if not task.train:
        raise UsageError(f"task {task.name} has no rows to train on")
    if config.evolve and config.scope != "none" and config.pairs < LEAST * config.groups:
        raise UsageError(
            f"evolve needs {LEAST} pairs in each of the {config.groups} groups, and there are {config.pairs}",
            "two play a row with a context on trial and two without: more --pairs, or fewer --groups",
        )
    if config.scope == "none" and not config.evolve:
        raise UsageError("scope = none tunes no weight, and nothing else evolves", "say what does: --evolve shots")
    if config.anchor and not task.heldout:
        raise UsageError("anchor needs held-out rows: the first evaluation keeps what the base says", "--heldout 0.2")
    if config.scope == "none" and config.antithetic:
        raise UsageError("scope = none has no plus and minus", "set antithetic = false")
    check_answering(config, task)
    if "prompt" in config.evolve and not (task.episodes or config.agent_cmd):
        own = sum(bool(row.messages) and row.messages[0]["role"] in ("system", "developer") for row in task.train)
        if own == len(task.train):
            raise UsageError(
                "evolve = prompt, and every row brings a system message of its own, which stays as it is",
                "leave them out of the rows (--system sets one), or evolve skills or shots",
            )
    if config.loglik > 0.0 and (task.episodes or config.agent_cmd):
        raise UsageError(
            f"loglik = {config.loglik:g}: an episode has no reference answer whose likelihood could count",
            "set loglik = 0",
        )
    if config.loglik > 0.0:
        without = [row.id for row in task.train if row.answer is None]
        if without:
            raise UsageError(
                f"loglik = {config.loglik:g} needs an answer in every row; {len(without)} have none, the first is row "
                f"{without[0]}",
                "add the column, or set loglik = 0",
            )


def require_same_base(history: History, found: str, model: str) -> None:
    if found != history.header["base"]:
        raise RunError(
            f"the model {model} is not the one that {history.path.parent} began with: it is {found}, "
            f"the history says {history.header['base']}",
            "give, or put back, the original file; edgees replay --engine takes another form of the same model",
        )


def _data_hash(config: Config, task: Task) -> str:
    """SHA-256 of all rows, as the scorer and the model see them."""
    digest = hashlib.sha256()
    for part in (task.train, task.heldout):
        for row in part:
            whole = [row.id, task.conversation(row, config.system), dict(row.columns), row.answer, row.entry]
            digest.update(json.dumps(whole, sort_keys=True, default=str).encode())
            digest.update(b"\n")
        digest.update(b"\n")
    return f"sha256:{digest.hexdigest()}"
