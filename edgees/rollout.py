"""(member, row) -> trajectory: what a member answered to a row, or how likely the right answer was to it.

A trajectory is one answer, or a whole episode: turns between the member and an environment (:class:`Settings.episodes`)
or somebody's agent program (``agents``). Many episodes run at once; their turns share the engine's calls, and none of
them shows in another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgees.backends.base import Completion, Engine, Member, Progress, Request, Score
from edgees.endpoint import Policy
from edgees.episodes import Ask, Ending, Episode, Episodes, Message
from edgees.errors import UsageError
from edgees.population import request_seed
from edgees.tasks.rows import Row

if TYPE_CHECKING:
    from edgees.agents import Agents

Conversation = Callable[[Row], Sequence[Message]]
Rollout = tuple[Member, Row]
"""Who plays what."""


@dataclass(frozen=True)
class Settings:
    """How answers are made. seed, generation: of the sampling; ``conversation`` puts the system message in front.

    max_tokens: of one reply. episodes, agents: who plays with the member, where a rollout is more than one answer.
    turns, tokens: replies, and tokens in all replies, that an episode may have; 0: no limit but its own.
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
    draws: tuple[int, ...] = ()

    def sampling_seed(self, rollout: int, said: str) -> int:
        """Of one reply. rollout: its place in the call; said: what is answered, by name."""
        draw = self.draws[rollout] if self.draws else 0
        return request_seed(self.seed, self.generation, f"{said} draw {draw}" if draw else said)


@dataclass(frozen=True)
class Trajectory:
    """What one member did with one row.

    completion: its answer; of an episode all its replies, a line between them. tokens: all that it generated.
    outcome: ``stop``, ``length`` or ``overflow`` (the context was full) of a single answer; of an episode as in
        :class:`edgees.episodes.Ending`, ``reason`` and ``parts`` too.
    episode: whether it is one. Then messages: all that was said; reward: what the episode itself paid, None for
        nothing; fault: why there can be no reward; turns: replies.
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
    """
    if settings.agents is not None:
        return _with_agents(settings.agents, rollouts, settings, progress)
    if settings.episodes is not None:
        table = _Table(engine, settings.episodes, rollouts, settings)
        engine.serve(table, progress)
        return table.trajectories()
    prompts: dict[str, tuple[int, ...]] = {}
    requests: list[Request] = []
    places: list[int] = []
    result: list[Trajectory | None] = []
    for place, (member, row) in enumerate(rollouts):
        if row.id not in prompts:
            prompts[row.id] = tuple(engine.encode_chat(settings.conversation(row)))
        prompt = prompts[row.id]
        if len(prompt) >= engine.context_length:
            result.append(Trajectory(member, row, "", (), "overflow"))
            continue
        places.append(place)
        result.append(None)
        seed = settings.sampling_seed(place, row.id)
        requests.append(Request(member, prompt, settings.max_tokens, settings.temperature, seed))
    done = engine.generate(requests, progress) if requests else []
    for place, completion in zip(places, done, strict=True):
        member, row = rollouts[place]
        result[place] = Trajectory(member, row, completion.text, completion.tokens, completion.outcome)
    return [t for t in result if t is not None]


class _Game:
    """An episode on its way."""

    def __init__(self, member: Member, row: Row, episode: Episode) -> None:
        self.member, self.row, self.episode = member, row, episode
        self.replies: list[str] = []
        self.tokens: list[int] = []
        self.ending: Ending | None = None

    def trajectory(self) -> Trajectory:
        end = self.ending
        assert end
        return Trajectory(
            self.member, self.row, "\n".join(self.replies), tuple(self.tokens), end.outcome, True, end.messages,
            end.reward, end.fault, end.reason, dict(end.parts), len(self.replies),
        )  # fmt: skip


class _Table:
    """All episodes of a call, as a source of requests: no more begin than there are streams free for them."""

    def __init__(self, engine: Engine, episodes: Episodes, rollouts: Sequence[Rollout], settings: Settings) -> None:
        self.engine, self.episodes, self.settings = engine, episodes, settings
        self.rollouts = rollouts
        self.games: list[_Game] = []
        self.ready: deque[tuple[int, Request]] = deque()
        self.running = 0

    def take(self, room: int, idle: bool) -> list[tuple[int, Request]] | None:
        taken = list[tuple[int, Request]]()
        while len(taken) < room and (self.ready or len(self.games) < len(self.rollouts)):
            if self.ready:
                taken.append(self.ready.popleft())
                continue
            member, row = self.rollouts[len(self.games)]
            seed = request_seed(self.settings.seed, self.settings.generation, f"episode {row.id}")
            episode = self.episodes.begin(row.id, row.columns, self.settings.system, seed)
            self.games.append(_Game(member, row, episode))
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
        seed = self.settings.sampling_seed(ticket, f"{game.row.id}{turn}")
        prompt = tuple(self.engine.encode_chat(after.messages, after.tools))
        room = self.settings.max_tokens
        if self.settings.tokens:
            room = min(room, self.settings.tokens - len(game.tokens))
        self.ready.append((ticket, Request(game.member, prompt, room, self.settings.temperature, seed)))

    @staticmethod
    def _end(game: _Game, outcome: str, reason: str) -> None:
        end = game.episode.abandon(reason)
        game.ending = Ending(end.reward, outcome, reason, end.fault, end.messages, end.parts)


def _with_agents(
    agents: Agents, rollouts: Sequence[Rollout], settings: Settings, progress: Progress | None
) -> list[Trajectory]:
    """Whole agent programs, one process a rollout."""

    def policy(row_id: str) -> Policy:
        return Policy(
            settings.max_tokens, settings.temperature, settings.seed, settings.generation, row_id,
            max_requests=settings.turns, max_session_tokens=settings.tokens,
        )  # fmt: skip

    asked = [(member, row.id, _given(row)) for member, row in rollouts]
    played = agents.play(asked, policy, progress)
    found = []
    for (member, row), p in zip(rollouts, played, strict=True):
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
    texts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    fits: list[bool] = []
    for _, row in rollouts:
        if row.id not in texts:
            if row.answer is None:
                raise UsageError(
                    f"row {row.id} has no answer, and loglik needs one in every row", "add answers, or loglik = 0"
                )
            texts[row.id] = reference(engine, settings.conversation(row), row.answer)
        fits.append(sum(map(len, texts[row.id])) <= engine.context_length)
    requests = [(member, *texts[row.id]) for (member, row), fit in zip(rollouts, fits, strict=True) if fit]
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
