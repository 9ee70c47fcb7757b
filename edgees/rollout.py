"""(member, row) -> trajectory: what a member answered to a row, or how likely the right answer was to it.

A trajectory is one answer, or a whole episode: turns between the member and an environment (:class:`Settings.episodes`)
or somebody's agent program (``agents``). Many episodes run at once; their turns share the engine's calls, and none of
them shows in another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from edgees import tools
from edgees.attempts import ENOUGH, SINGLE, Attempts, best, commonest, feedback, plain_texts
from edgees.backends.base import Completion, Engine, Member, Progress, Request, Score
from edgees.context import Context
from edgees.endpoint import Policy
from edgees.episodes import Ask, Ending, Episode, Episodes, Message
from edgees.errors import UsageError
from edgees.population import request_seed
from edgees.tasks.rows import Row

if TYPE_CHECKING:
    from edgees.agents import Agents

Conversation = Callable[[Row, Context], Sequence[Message]]
Rollout = tuple[Member, Row]
"""Who plays what."""
_Try = tuple[Member, Row, int, tuple[Message, ...], Context, int]
"""The same with the number of the attempt, what was said after the row's own conversation, the context and the draw."""


@dataclass(frozen=True)
class Settings:
    """How answers are made. seed, generation: of the sampling; ``conversation`` puts a context before a row's question.

    context: of all rollouts; contexts: of each, where they differ. files: agent programs find theirs in their folder,
        instead of having it put into what they say.
    max_tokens: of one reply. episodes, agents: who plays with the member, where a rollout is more than one answer.
    turns, tokens: replies, and tokens in all replies, that an episode may have; 0: no limit but its own.
    attempts: how often a row is answered and what counts; judge: rewards (NaN: none) of what was played, for ``best``
        and ``retry``; vote: what texts answer, None for nothing, for ``majority``.
    tools: whether environments' tools are shown to the model.
    grammar: GBNF that every reply follows; ``actions`` or ``tools``: that of those which an episode has at its turn.
    draws: of each rollout, which of several samples on the same row it is; other draws have other sampling seeds, of an
        episode's replies alone: what it plays stays the same.
    """

    max_tokens: int
    conversation: Conversation
    temperature: float = 0.0
    seed: int = 0
    generation: int = 0
    episodes: Episodes | None = None
    agents: Agents | None = None
    system: str | None = None
    turns: int = 0
    tokens: int = 0
    context: Context = field(default_factory=Context)
    contexts: Sequence[Context] = ()
    files: bool = False
    attempts: Attempts = SINGLE
    judge: Callable[[Sequence[Trajectory]], Sequence[float]] | None = None
    vote: Callable[[Sequence[str]], Sequence[Hashable | None]] = plain_texts
    tools: bool = True
    grammar: str = ""
    draws: Sequence[int] = ()

    def of(self, place: int) -> Context:
        """The context of a rollout, by its place in the call."""
        return self.contexts[place] if self.contexts else self.context

    def draw(self, place: int) -> int:
        return self.draws[place] if self.draws else 0


@dataclass(frozen=True)
class Trajectory:
    """What one member did with one row.

    completion: its answer; of an episode all its replies, a line between them. tokens: all that it generated, in all
        attempts.
    outcome: ``stop``, ``length`` or ``overflow`` (the context was full) of a single answer; of an episode as in
        :class:`edgees.episodes.Ending`, ``reason`` and ``parts`` too.
    episode: whether it is one. Then messages: all that was said, but for what the context adds; reward: what it
        itself paid, None for nothing; fault: why there can be no reward; turns: replies.
    attempts: where there was more than one, each by itself; chosen: which of them this is. given: messages that every
        episode begins with.
    """

    member: Member
    row: Row
    completion: str
    tokens: tuple[int, ...] = ()
    outcome: str = "stop"
    episode: bool = False
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    fault: str = ""
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: int = 1
    attempts: tuple[Trajectory, ...] = ()
    chosen: int = 0
    given: int = 0

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Tokens of the first attempt: a reply to the very row, whatever came after it."""
        return self.attempts[0].tokens if self.attempts else self.tokens

    @property
    def answer(self) -> str | list[Message]:
        """What a scorer gets: the text, or all that was said."""
        return [*self.messages] if self.episode else self.completion


def every(members: Sequence[Member], rows: Sequence[Row]) -> list[Rollout]:
    """Every member on every row; member-major, rows in order."""
    return [(member, row) for member in members for row in rows]


def play(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None = None
) -> list[Trajectory]:
    """Each rollout's trajectory, in order.

    A row whose prompt leaves no room in the context ends at once with outcome ``overflow`` and an empty answer.

    :raises UsageError: ``settings.attempts`` has no meaning for episodes.
    """
    how = settings.attempts
    if not how.single:
        require_attempts(how, settings.episodes is not None or settings.agents is not None)
        return (_retried if how.kind == "retry" else _chosen)(engine, rollouts, settings, progress)
    return _played(
        engine,
        [(member, row, 0, (), settings.of(i), settings.draw(i)) for i, (member, row) in enumerate(rollouts)],
        settings,
        progress,
    )


def require_attempts(how: Attempts, episodes: bool) -> None:
    """:raises UsageError: episodes are to be voted on, or told to try again."""
    if episodes and how.kind not in ("single", "best"):
        raise UsageError(
            f"attempts = {how}: an episode is no answer that could be "
            + ("voted on" if how.kind == "majority" else "tried again after feedback"),
            f"attempts = best:{how.count} plays every episode {how.count} times and counts the best; or single",
        )


def _chosen(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None
) -> list[Trajectory]:
    """One of several attempts that differ in their sampling: the best, or the commonest answer.

    Attempts of all members at a row share their seeds; the first has the seed of a single one.
    """
    count = settings.attempts.count
    told: Progress | None = None
    if progress is not None:
        heard = progress
        told = lambda done, tokens: heard(done // count, tokens)  # noqa: E731
    tries: list[_Try] = [
        (member, row, attempt, (), settings.of(i), settings.draw(i))
        for i, (member, row) in enumerate(rollouts)
        for attempt in range(count)
    ]
    played = _played(engine, tries, settings, told)
    by_reward = settings.attempts.kind == "best"
    rewards = _judged(settings, played) if by_reward else []
    answers = [] if by_reward else settings.vote([t.completion for t in played])
    found = []
    for at in range(0, len(played), count):
        group = tuple(played[at : at + count])
        which = best(rewards[at : at + count]) if by_reward else commonest(answers[at : at + count])
        tokens = tuple(chain.from_iterable(t.tokens for t in group))
        found.append(replace(group[which], tokens=tokens, attempts=group, chosen=which))
    return found


class _Rounds:
    """Progress over rounds, of which only the last ends every rollout in it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.ended = self.before = self.now = 0
        self.last = False

    def next(self, ended: int, last: bool) -> None:
        self.ended, self.last, self.before, self.now = ended, last, self.before + self.now, 0

    def __call__(self, done: int, tokens: int) -> None:
        self.now = tokens
        self.progress(self.ended + (done if self.last else 0), self.before + tokens)


def _retried(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None
) -> list[Trajectory]:
    """Reply, score, feedback, until a reply is paid enough, ``count`` are made or the context is full. The last counts.

    All rollouts' replies of a round are made together.
    """
    count = settings.attempts.count
    made: list[list[Trajectory]] = [[] for _ in rollouts]
    said: list[tuple[Message, ...]] = [()] * len(rollouts)
    full = set[int]()
    going = list(range(len(rollouts)))
    told = None if progress is None else _Rounds(progress)
    for attempt in range(count):
        if told:
            told.next(len(rollouts) - len(going), attempt == count - 1)
        played = _played(
            engine, [(*rollouts[i], attempt, said[i], settings.of(i), settings.draw(i)) for i in going], settings, told
        )
        fine: list[tuple[int, Trajectory]] = []
        for i, t in zip(going, played, strict=True):
            if t.tokens or t.outcome != "overflow" or not made[i]:  # else there was no room for another reply
                made[i].append(t)
            if t.outcome == "overflow":
                full.add(i)
            else:
                fine.append((i, t))
        going = []
        rewards = _judged(settings, [t for _, t in fine]) if attempt < count - 1 and fine else []
        for (i, t), reward in zip(fine, rewards, strict=False):
            if not reward >= ENOUGH:
                reply = {"role": "assistant", "content": t.completion}
                said[i] = (*said[i], reply, {"role": "user", "content": feedback(reward)})
                going.append(i)
        if not going:
            break
    return [
        replace(
            each[-1], outcome="overflow" if i in full else each[-1].outcome, turns=len(each), chosen=len(each) - 1,
            tokens=tuple(chain.from_iterable(t.tokens for t in each)), attempts=tuple(each),
        )
        for i, each in enumerate(made)
    ]  # fmt: skip


def _judged(settings: Settings, played: Sequence[Trajectory]) -> Sequence[float]:
    if settings.judge is None:
        raise ValueError(f"attempts = {settings.attempts} needs a judge")
    return settings.judge(played)


def _name(row: Row, attempt: int, draw: int) -> str:
    """What sampling seeds are made from."""
    return row.id + (f" draw {draw}" if draw else "") + (f" attempt {attempt}" if attempt else "")


def _played(engine: Engine, tries: Sequence[_Try], settings: Settings, progress: Progress | None) -> list[Trajectory]:
    """Each try's trajectory, in order."""
    if settings.agents is not None:
        return _with_agents(settings.agents, tries, settings, progress)
    if settings.episodes is not None:
        table = _Table(engine, settings.episodes, tries, settings)
        engine.serve(table, progress)
        return table.trajectories()
    prompts: dict[tuple[str, Context], tuple[int, ...]] = {}
    requests: list[Request] = []
    places: list[int] = []
    result: list[Trajectory | None] = []
    for member, row, attempt, said, context, draw in tries:
        key = row.id, context
        if said:
            prompt = tuple(engine.encode_chat([*settings.conversation(row, context), *said]))
        elif key in prompts:
            prompt = prompts[key]
        else:
            prompt = prompts[key] = tuple(engine.encode_chat(settings.conversation(row, context)))
        if len(prompt) >= engine.context_length:
            result.append(Trajectory(member, row, "", (), "overflow"))
            continue
        places.append(len(result))
        result.append(None)
        seed = request_seed(settings.seed, settings.generation, _name(row, attempt, draw))
        how = settings.max_tokens, settings.temperature, seed
        requests.append(Request(member, prompt, *how, grammar=settings.grammar))
    done = engine.generate(requests, progress) if requests else []
    for place, completion in zip(places, done, strict=True):
        member, row, *_ = tries[place]
        result[place] = Trajectory(member, row, completion.text, completion.tokens, completion.outcome)
    return [t for t in result if t is not None]


class _Game:
    """An episode on its way."""

    def __init__(self, member: Member, row: Row, name: str, episode: Episode, context: Context) -> None:
        self.member, self.row, self.episode, self.context = member, row, episode, context
        self.name = name
        self.replies: list[str] = []
        self.tokens: list[int] = []
        self.ending: Ending | None = None

    def trajectory(self) -> Trajectory:
        end = self.ending
        assert end
        return Trajectory(
            self.member, self.row, "\n".join(self.replies), tuple(self.tokens), end.outcome, True, end.messages,
            end.reward, end.fault, end.reason, dict(end.parts), len(self.replies), given=end.given,
        )  # fmt: skip


class _Table:
    """All episodes of a call, as a source of requests: no more begin than there are streams free for them."""

    def __init__(self, engine: Engine, episodes: Episodes, tries: Sequence[_Try], settings: Settings) -> None:
        self.engine, self.episodes, self.settings = engine, episodes, settings
        self.tries = tries
        self.games: list[_Game] = []
        self.ready: deque[tuple[int, Request]] = deque()
        self.running = 0
        self.calls: tuple[Sequence[Mapping[str, Any]], str] = (), ""

    def take(self, room: int, idle: bool) -> list[tuple[int, Request]] | None:
        taken = list[tuple[int, Request]]()
        while len(taken) < room and (self.ready or len(self.games) < len(self.tries)):
            if self.ready:
                taken.append(self.ready.popleft())
                continue
            member, row, attempt, _, context, draw = self.tries[len(self.games)]
            seed = request_seed(self.settings.seed, self.settings.generation, f"episode {row.id}")
            system = self.settings.system if context.system is None else context.system
            episode = self.episodes.begin(row.id, row.columns, system, seed)
            self.games.append(_Game(member, row, _name(row, attempt, draw), episode, context))
            self._go_on(len(self.games) - 1, episode.start())
        self.running += len(taken)
        return taken if taken or self.running else None

    def piece(self, ticket: int, data: bytes) -> bool:
        return True

    def done(self, ticket: int, completion: Completion) -> None:
        game = self.games[ticket]
        self.running -= 1
        if completion.outcome == "overflow" and not completion.tokens:
            self._end(game, "overflow", "the context is full")
            return
        game.replies.append(completion.text)
        game.tokens += completion.tokens
        after = game.episode.reply(completion.text, completion.outcome)
        limits = (
            ("overflow", "the context is full", completion.outcome == "overflow"),
            ("truncated", "turns", 0 < self.settings.turns <= len(game.replies)),
            ("truncated", "tokens", 0 < self.settings.tokens <= len(game.tokens)),
        )
        for outcome, reason, reached in limits:
            if reached and isinstance(after, Ask):
                self._end(game, outcome, reason)
                return
        self._go_on(ticket, after)

    def trajectories(self) -> list[Trajectory]:
        return [game.trajectory() for game in self.games]

    def _go_on(self, ticket: int, after: Ask | Ending) -> None:
        game = self.games[ticket]
        if isinstance(after, Ending):
            game.ending = after
            return
        turn = f" turn {len(game.replies)}" if game.replies else ""
        seed = request_seed(self.settings.seed, self.settings.generation, f"{game.name}{turn}")
        shown = after.tools if self.settings.tools else ()
        prompt = tuple(self.engine.encode_chat(game.context.apply(after.messages, same=True), shown))
        room = self.settings.max_tokens
        if self.settings.tokens:
            room = min(room, self.settings.tokens - len(game.tokens))
        how = room, self.settings.temperature, seed
        self.ready.append((ticket, Request(game.member, prompt, *how, grammar=self._grammar(after, len(game.replies)))))

    def _grammar(self, asked: Ask, turn: int) -> str:
        """:raises UsageError: an episode has nothing from which a grammar can be made."""
        wanted = self.settings.grammar
        if wanted not in ("actions", "tools"):
            return wanted
        found = asked.actions if wanted == "actions" else asked.tools
        if not found and (wanted == "tools" or turn == 0):
            hint = "it lists them in the attribute actions, or in info['actions']" if wanted == "actions" else ""
            raise UsageError(f"grammar = {wanted!r}, and the environment has no {wanted}", hint)
        if wanted == "actions":
            return tools.grammar(actions=asked.actions) if found else ""
        if self.calls[0] is not asked.tools:  # the same for all turns, and dear to write
            self.calls = asked.tools, tools.grammar(tools=asked.tools)
        return self.calls[1]

    @staticmethod
    def _end(game: _Game, outcome: str, reason: str) -> None:
        end = game.episode.abandon(reason)
        game.ending = replace(end, outcome=outcome, reason=reason)


def _with_agents(
    agents: Agents, tries: Sequence[_Try], settings: Settings, progress: Progress | None
) -> list[Trajectory]:
    """Whole agent programs, one process an attempt."""

    def policy(place: int, row_id: str) -> Policy:
        return Policy(
            settings.max_tokens, settings.temperature, settings.seed, settings.generation, row_id,
            max_requests=settings.turns, max_session_tokens=settings.tokens, context=tries[place][4],
            files=settings.files,
        )  # fmt: skip

    asked = [(member, _name(row, attempt, draw), _given(row)) for member, row, attempt, _, _, draw in tries]
    played = agents.play(asked, policy, progress)
    found = []
    for (member, row, *_), p in zip(tries, played, strict=True):
        end = p.ending
        said = end.messages
        texts = [str(m.get("content") or "") for m in said if m.get("role") == "assistant"]
        if p.answer and texts[-1:] != [p.answer]:  # the program's own last word
            said = (*said, {"role": "assistant", "content": p.answer})
        found.append(
            Trajectory(
                member, row, p.answer or "\n".join(texts), tuple(p.tokens), end.outcome, True, said, end.reward,
                end.fault, end.reason, dict(end.parts), len(p.calls),
            )
        )  # fmt: skip
    return found


def _given(row: Row) -> dict[str, Any]:
    """What an agent program gets to know of a row: never the reference answer."""
    hidden = {"answer"} | ({"metadata"} if row.entry is not None else set())  # reasoning_gym's holds the solution
    columns = {name: value for name, value in row.columns.items() if name not in hidden}
    said: dict[str, Any] = {"id": row.id, **columns}
    if row.prompt is not None:
        said["prompt"] = row.prompt
    if row.messages:
        said["messages"] = [dict(m) for m in row.messages]
    return said


def likelihood(
    engine: Engine, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None = None
) -> list[Score | None]:
    """Log-likelihood of each rollout's reference answer, in order. None: it does not fit the context.

    :raises UsageError: a row without an answer.
    """
    texts: dict[tuple[str, Context], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    asked = [(row.id, settings.of(place)) for place, (_, row) in enumerate(rollouts)]
    fits: list[bool] = []
    for key, (_, row) in zip(asked, rollouts, strict=True):
        if key not in texts:
            if row.answer is None:
                raise UsageError(
                    f"row {row.id} has no answer, and loglik needs one in every row", "add answers, or loglik = 0"
                )
            texts[key] = reference(engine, settings.conversation(row, key[1]), row.answer)
        fits.append(sum(map(len, texts[key])) <= engine.context_length)
    requests = [(member, *texts[key]) for (member, _), key, fit in zip(rollouts, asked, fits, strict=True) if fit]
    scores = iter(engine.loglik(requests, progress) if requests else [])
    return [next(scores) if fit else None for fit in fits]


def reference(engine: Engine, conversation: Sequence[Message], answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, target) tokens of a reference answer, the end of the turn included where the template shows it.

    Without the end of the turn a model tuned on likelihood would learn what to say but not when to stop.
    """
    prompt = tuple(engine.encode_chat(conversation))
    target = tuple(engine.encode(answer))
    whole = tuple(engine.encode_chat([*conversation, {"role": "assistant", "content": answer}]))
    end = len(prompt) + len(target)
    if whole[:end] == prompt + target and len(whole) > end:
        target = whole[len(prompt) : end + 1]
    return prompt, target
