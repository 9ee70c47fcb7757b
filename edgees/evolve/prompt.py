"""``prompt``: the system message, evolved by reflection with the package gepa (GEPA, arXiv:2507.19457).

GEPA keeps a pool of texts with a score for each of a few rows, draws parents from its Pareto front, lets the
reflecting model rewrite one after it has seen some of its tries, and keeps what does better on those. The pool lasts
over the proposals of a run. Its scores were measured when a text came in: the weights have moved since, so newer
texts are favoured. That only decides what is proposed; the trial of a candidate measures anew.
"""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgees.context import Context
from edgees.errors import EdgeesError, Interrupted, MissingExtra
from edgees.evolve.bounds import MARKS, control, shown
from edgees.evolve.fence import described, fenced, rule_of, spoken, within
from edgees.evolve.protocol import Attempt, Candidate, NoProposal, Situation, Spent

CALLS = 50
"""Rollouts of one proposal, at most: the first text on all rows, and three new ones that each come so far."""
ROWS = 8
"""Rows that every text of the pool is scored on."""
BATCH = 3
"""Rows that the reflecting model sees tries of."""
BEST = 3
"""Texts proposed, at most."""
FAILURES = 3
"""Reflections that may come to nothing before a proposal ends."""
_PART = "system"
_FOLDER, _STATE, _POOL = "gepa", "gepa_state.bin", "pool.json"


class Prompt:
    """The evolver; see the module. :raises MissingExtra: gepa is not installed."""

    name = "prompt"

    def __init__(self) -> None:
        if importlib.util.find_spec("gepa") is None:
            raise MissingExtra("evolving the system message needs the package gepa", "pip install 'edgees[evolve]'")

    def propose(self, situation: Situation) -> list[Candidate]:
        """The pool's best texts, if they did as well as the one in force.

        :raises NoProposal: no reflecting model, no rows, or no text that did as well.
        """
        if situation.reflect is None:
            raise NoProposal("no reflecting model is configured")
        if not situation.rows:
            raise NoProposal("there are no rows to play")
        with ExitStack() as stack:
            folder = situation.folder and situation.folder / _FOLDER
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgees-prompt-")))
            return _evolved(situation, folder)


class _Passing(BaseException):
    """Carries an exception through gepa, which catches every Exception and goes on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Silent:
    """gepa's logger: nothing is printed."""

    def log(self, message: str) -> None:
        pass


class _Plain(pickle.Unpickler):
    """Reads what needs no class: a run folder may come from anybody, and a pickle that names one may run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _evolved(situation: Situation, folder: Path) -> list[Candidate]:
    import gepa
    from gepa.strategies.eval_policy import FullEvaluationPolicy

    force = _text_in_force(situation)
    rows, state, note = _begin(situation, folder, force)
    adapter = _Adapter(situation, force)

    class Policy(FullEvaluationPolicy):  # type: ignore[misc]
        def get_seed_eval_batch(self, loader: Any) -> list[int]:
            return [] if state else list(loader.all_ids())  # a pool that goes on has its first text's scores

    spent = int(state["total_num_evals"]) if state else 0
    try:
        gepa.optimize(
            seed_candidate={_PART: state["program_candidates"][0][_PART] if state else force},
            trainset=list(situation.rows), valset=list(rows), adapter=adapter, logger=_Silent(), run_dir=str(folder),
            reflection_minibatch_size=min(BATCH, len(situation.rows)), skip_perfect_score=False,
            max_metric_calls=spent + CALLS, stop_callbacks=[adapter.stuck], track_best_outputs=False,
            seed=situation.seed, raise_on_exception=True, val_evaluation_policy=Policy(),
        )  # fmt: skip
    except _Passing as passing:
        if not isinstance(passing.error, Spent):
            raise passing.error from None
    after = _read(folder / _STATE)
    if after is None:
        raise Spent
    return _best(situation, after, force, adapter, note)


def _text_in_force(situation: Situation) -> str:
    """The system message that a candidate takes the place of: the context's, else the task's own (the commonest)."""
    if situation.context.system is not None:
        return situation.context.system
    heads = Counter(
        str(a.messages[0].get("content") or "")
        for a in situation.attempts
        if a.messages and a.messages[0].get("role") in ("system", "developer")
    )
    return heads.most_common(1)[0][0] if heads else ""


def _begin(situation: Situation, folder: Path, force: str) -> tuple[list[str], dict[str, Any] | None, str]:
    """(rows of the pool, its state or None for a new one, a note for people). The folder is ready for gepa: what a
    proposal that was killed left there is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    note = ""
    before = situation.before and situation.before / _FOLDER
    if before is not None and (before / _STATE).is_file():
        state, rows = _read(before / _STATE), _rows(before / _POOL)
        if state is None or not rows:
            note = "the earlier pool could not be read"
        elif not set(rows) <= set(situation.rows):
            note = "the earlier pool's rows may not be played any more"
        elif force not in (text[_PART] for text in state["program_candidates"]):
            note = "the earlier pool does not have the system message in force"
        else:
            for name in (_STATE, _POOL):
                shutil.copyfile(before / name, folder / name)
            return rows, state, ""
    rows = list(situation.rows[:ROWS])
    (folder / _POOL).write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return rows, None, note


def _read(path: Path) -> dict[str, Any] | None:
    """gepa's state, if it is one; read without running anything that stands in it."""
    try:
        with open(path, "rb") as file:
            state = _Plain(file).load()
        texts, scores = state["program_candidates"], state["prog_candidate_val_subscores"]
        sound = (
            isinstance(state["total_num_evals"], int)
            and len(texts) == len(scores) > 0
            and all(isinstance(text[_PART], str) and list(text) == [_PART] for text in texts)
            and all(isinstance(value, (int, float)) for some in scores for value in some.values())
        )
    except Exception:  # of a damaged pickle anything can be raised
        return None
    return state if sound else None


def _rows(path: Path) -> list[str]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return rows if isinstance(rows, list) and all(isinstance(row, str) for row in rows) else []


def _best(situation: Situation, state: Mapping[str, Any], force: str, adapter: _Adapter, note: str) -> list[Candidate]:
    means = {
        text[_PART]: sum(scores.values()) / len(scores)
        for text, scores in zip(state["program_candidates"], state["prog_candidate_val_subscores"], strict=True)
        if scores
    }
    least = means.get(force, -math.inf)
    others = sorted((text for text in means if text != force and means[text] >= least), key=lambda t: -means[t])
    more = f" ({note})" if note else ""
    if not others:
        why = f": {'; '.join(dict.fromkeys(adapter.failures))}" if adapter.failures else ""
        known = len(means) - (force in means)
        raise NoProposal(
            f"of {adapter.written} texts written now and {known} in the pool none did as well as the one in force"
            f"{more}{why}"
        )
    rows = len(state["prog_candidate_val_subscores"][0])
    return [
        Candidate(
            replace(situation.context, system=text),
            f"system message with {means[text]:.4g} on {rows} rows, the one in force {least:.4g}{more}: {shown(text)}",
        )
        for text in others[: min(BEST, situation.wanted)]
    ]


class _Adapter:
    """gepa's view of our rollouts: its GEPAAdapter protocol.

    failures: reflections that came to nothing, and why. written: number of those that gave a text."""

    def __init__(self, situation: Situation, force: str) -> None:
        self._situation, self._force = situation, force
        self._played = self.written = 0
        self.failures: list[str] = []

    def stuck(self, state: Any) -> bool:
        """gepa's stopper: too many failures, or fewer rollouts left than a new text needs."""
        needed = 2 * BATCH + len(state.prog_candidate_val_subscores[0])
        return len(self.failures) >= FAILURES or self._played + needed > CALLS

    def context(self, text: str) -> Context:
        return self._situation.context if text == self._force else replace(self._situation.context, system=text)

    def evaluate(self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Plays the rows. A try without a reward counts as the mean of the others: for nothing, and not as 0."""
        from gepa.core.adapter import EvaluationBatch

        try:
            if self._played + len(batch) > CALLS:
                raise Spent
            self._played += len(batch)
            tries = self._situation.play(self.context(candidate[_PART]), list(batch)) if batch else []
            if len(tries) != len(batch):
                raise NoProposal(f"{len(batch)} rows were to be played, and {len(tries)} were")
            paid = [a.reward for a in tries if a.reward is not None and math.isfinite(a.reward) and not a.fault]
            if batch and not paid:
                why = next((a.fault for a in tries if a.fault), "")
                raise NoProposal(f"none of {len(batch)} tries has a reward{f': {why}' if why else ''}")
        except Exception as error:
            raise _Passing(error) from error
        mean = sum(paid) / len(paid) if paid else 0.0
        sound = [a.reward is not None and math.isfinite(a.reward) and not a.fault for a in tries]
        scores = [float(a.reward or 0.0) if ok else mean for a, ok in zip(tries, sound, strict=True)]
        return EvaluationBatch(outputs=[None] * len(tries), scores=scores, trajectories=tries)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Attempt]]]:
        return {_PART: [{"try": attempt} for attempt in eval_batch.trajectories]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """The reflecting model's new text. Whatever is wrong with it is an entry in ``failures`` and an exception."""
        tries = [record["try"] for record in reflective_dataset[_PART]]
        try:
            text = self._rewritten(candidate[_PART], tries)
        except Interrupted as error:
            raise _Passing(error) from error
        except Exception as error:
            words = str(error) if isinstance(error, EdgeesError) else f"{type(error).__name__}: {error}"
            self.failures.append(words[:300])
            raise
        self.written += 1
        return {_PART: text}

    def _rewritten(self, present: str, tries: Sequence[Attempt]) -> str:
        situation = self._situation
        reflect = situation.reflect
        assert reflect is not None
        texts = within([described(attempt, i) for i, attempt in enumerate(tries, 1)], situation)
        data, mark = fenced([f"System message:\n{present or '(none)'}", *texts], situation.seed)
        reply = reflect(
            f"The system message of an assistant is to be improved. Below stand the present one and tries made with "
            f"it; a higher reward is better.\n{rule_of(mark)}\n\n{data}\n\n"
            f"Find out what the task wants and why some tries got less. Write a better system message for this kind of "
            f"task in general, not for one try, of at most {max(20, situation.limit // 2)} words. Reply with the new "
            f"system message between two lines of ``` and nothing else.\n"
        )
        if not isinstance(reply, str):
            raise NoProposal(f"the reflecting model replied with {shown(repr(reply))}, no text")
        text = _message_in(reply)
        if not text or mark.casefold() in text.casefold():
            raise NoProposal(f"there is no system message in the reply {shown(reply)}")
        if mark_found := control(text):
            raise NoProposal(f"the new system message holds what looks like a control token: {shown(mark_found)}")
        if len(text) > 64 * situation.limit or situation.count(text) + MARKS > situation.limit:
            raise NoProposal(f"the new system message of {len(text):,} characters is over {situation.limit} tokens")
        return text


def _message_in(reply: str) -> str:
    """What stands between the first two lines of ```, else the whole reply."""
    text = spoken(reply)
    parts = text.split("```")
    if len(parts) < 3:
        return text.strip("`").strip()
    first, _, rest = parts[1].partition("\n")
    return (rest if first.strip().isalpha() or not first.strip() else parts[1]).strip()
