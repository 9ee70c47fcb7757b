"""``skills``: short rules drawn from what went wrong and what went well, as the notes (the skill file) of the context.

The reflecting model sees tries as fenced data and answers with lines; only lines that look like rules are read, a few
of them, each bounded. They join the rules in force: near duplicates go, and the oldest go when there are too many.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from edgees.context import Context
from edgees.evolve.bounds import control, overlap, shown, tokens, words
from edgees.evolve.fence import described, fenced, rule_of, spoken, within
from edgees.evolve.protocol import Attempt, Candidate, NoProposal, Situation
from edgees.evolve.shots import successes

NEW = 5
"""Rules read from a reply."""
MOST = 16
"""Rules in all notes."""
LONGEST = 200
"""Characters of a rule; longer ones are left out."""
ALIKE = 0.7
"""Two rules that share this part of their words (Jaccard) count as one."""
FAILED, WELL = 5, 3
"""Tries shown, at most."""
_RULE = re.compile(r"\s*(?:[-*•]|\(?\d{1,2}[.)])\s+(\S.*)")


class Skills:
    """The evolver; see the module."""

    name = "skills"

    def propose(self, situation: Situation) -> list[Candidate | NoProposal]:
        """Present and new rules; the new ones alone; the present ones without the oldest.

        :raises NoProposal: no reflecting model, nothing to show to it, or no rule in its reply.
        """
        if situation.reflect is None:
            raise NoProposal("no reflecting model is configured")
        request, mark = prompt(situation)
        reply = situation.reflect(request)
        if not isinstance(reply, str):
            raise NoProposal(f"the reflecting model replied with {shown(repr(reply))}, no text")
        told: list[NoProposal] = []
        found = rules(reply, mark, told)
        known = [rule for rule in map(rule_in, situation.context.skills.splitlines()) if rule]
        fresh = distinct(found, known)
        if not fresh and not known:
            if found or told:
                return list(told)
            raise NoProposal(f"no rule could be read in the reply {shown(reply)}")
        if not fresh:
            told.append(NoProposal(f"no rule of the reply {shown(reply)} is a new one"))
        return [*_candidates(situation, fresh, known), *told]


def prompt(situation: Situation) -> tuple[str, str]:
    """(what the reflecting model is asked, the fence in it). :raises NoProposal: there is nothing to show."""
    shown_tries = chosen(situation.attempts, situation.seed)
    if not shown_tries:
        raise NoProposal("there are no tries to learn from")
    texts = within([described(attempt, i) for i, attempt in enumerate(shown_tries, 1)], situation)
    present = situation.context.skills or "(none)"
    data, mark = fenced([*texts, f"Rules in force:\n{present}"], situation.seed)
    return (
        f"An assistant is to do better at a task. Below stand some of its tries; a higher reward is better.\n"
        f"{rule_of(mark)}\n\n{data}\n\n"
        f"Compare the tries that went well with those that went badly. Write at most {NEW} new rules that would have "
        f"helped, for this kind of task in general, not for one try. Do not repeat rules in force. One rule a line, "
        f'each beginning with "- " and of at most 20 words, and nothing else.\n'
    ), mark


def chosen(attempts: Sequence[Attempt], seed: int) -> list[Attempt]:
    """Tries to show, each of another row: failures and successes in turn, else (no rewards) reference answers."""
    rng = random.Random(f"skills {seed}")
    good = successes(attempts)
    well = {id(attempt) for attempt in good}
    paid = [a for a in attempts if not a.fault and a.reward is not None and math.isfinite(a.reward)]
    bad = [attempt for attempt in paid if id(attempt) not in well]
    if not paid:
        bad, good = [a for a in attempts if a.reference and not a.fault], []
    rng.shuffle(bad)
    rng.shuffle(good)
    bad.sort(key=lambda a: a.reward or 0.0)  # stable: by chance among equals
    seen: set[str] = set()
    taken: list[list[Attempt]] = [[], []]
    for at, (tries, most) in enumerate(((bad, FAILED), (good, WELL))):
        for attempt in tries:
            if len(taken[at]) < most and attempt.row not in seen:
                seen.add(attempt.row)
                taken[at].append(attempt)
    turns = [[some[i] for some in taken if i < len(some)] for i in range(max(FAILED, WELL))]
    return [attempt for turn in turns for attempt in turn]


def rules(reply: str, mark: str, told: list[NoProposal]) -> list[str]:
    """The first rules in a reply, without their bullets; of those left out ``told`` gets the reason."""
    found: list[str] = []
    for line in spoken(reply).splitlines():
        rule = rule_in(line)
        if not rule or len(found) == NEW:
            continue
        if control(rule):
            told.append(NoProposal(f"left out, as it holds what looks like a control token: {shown(rule)}"))
        elif len(rule) > LONGEST:
            told.append(NoProposal(f"left out, as it has {len(rule):,} characters: {shown(rule)}"))
        elif mark.casefold() not in rule.casefold():
            found.append(rule)
        if len(told) > NEW:
            break
    return found


def rule_in(line: str) -> str:
    """The rule on a line that begins with a bullet or a number; "" where there is none."""
    match = _RULE.fullmatch(line)
    return " ".join(match[1].replace("**", "").split()) if match else ""


def distinct(found: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of ``found`` that are like none in ``known`` and none before them."""
    there = [words(rule) for rule in known]
    fresh = []
    for rule in found:
        said = words(rule)
        if said and all(overlap(said, other) < ALIKE for other in there):
            there.append(said)
            fresh.append(rule)
    return fresh


def _candidates(situation: Situation, fresh: Sequence[str], known: Sequence[str]) -> list[Candidate]:
    force = situation.context
    found: list[Candidate] = []
    if fresh:
        lines = [*force.skills.splitlines(), *(f"- {rule}" for rule in fresh)]
        gone = 0
        while len(kept := _without_oldest(lines)) < len(lines) and (
            sum(bool(rule_in(line)) for line in lines) > MOST or not _fits(force, lines, situation)
        ):
            if rule_in(next(line for line in lines if rule_in(line))) in fresh:
                break  # only new ones are left: what does not fit of them is cut from the end
            lines, gone = kept, gone + 1
        less = f"; the {gone} oldest left out" if gone else ""
        what = "rule added" if len(fresh) == 1 else f"{len(fresh)} rules added"
        found.append(Candidate(_noted(force, lines), f"{what}: {' / '.join(fresh)}{less}"))
    if fresh and known:
        prose = [line for line in force.skills.splitlines() if not rule_in(line)]
        lines = [*prose, *(f"- {rule}" for rule in fresh)]
        found.append(Candidate(_noted(force, lines), f"new rules instead of the {len(known)} present: {fresh[0]}"))
    if known:
        lines = _without_oldest(force.skills.splitlines())
        found.append(Candidate(_noted(force, lines), f"without the oldest rule: {known[0]}"))
    return found


def _without_oldest(lines: Sequence[str]) -> list[str]:
    at = next((i for i, line in enumerate(lines) if rule_in(line)), len(lines))
    return [*lines[:at], *lines[at + 1 :]]


def _noted(force: Context, lines: Sequence[str]) -> Context:
    return replace(force, skills="\n".join(lines).strip())


def _fits(force: Context, lines: Sequence[str], situation: Situation) -> bool:
    return tokens(_noted(force, lines), situation.count) <= situation.limit
