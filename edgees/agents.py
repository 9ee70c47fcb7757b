"""Somebody's agent program as a rollout: one process an episode, unmodified, and the number that it ends with.

A program finds its row as JSON on standard input, in ``EDGEES_TASK_FILE`` and, where it is short, in ``EDGEES_TASK``;
the model at ``OPENAI_BASE_URL`` or ``ANTHROPIC_BASE_URL``, whatever key and model name it gives; ``EDGEES_SEED`` for
whatever is random in it. The run's context (:mod:`edgees.context`) is put into every conversation that it has with the
model, or, where the run says so, lies in ``EDGEES_SKILLS_FILE`` (its notes) and ``EDGEES_CONTEXT_FILE`` (all of it). It
runs in an empty folder of its own, which is its HOME too, and sees little else of the environment. Its reward is, in
this order,

1. what it posts to ``EDGEES_REWARD_URL`` (``{"reward": 0.5, ...}``), the last time counts;
2. the file ``reward.json`` in its folder, an object like that or a number;
3. the last line of its output that is such an object, or its last line if that is a number;

or None, for a scorer that looks at what was said. Where a program breaks down there is none, which is never 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgees.backends.base import Completion, Engine, Member, Progress, Request
from edgees.children import describe_status
from edgees.children.command import Sandbox, words_of
from edgees.children.program import Program, Ran
from edgees.endpoint import Call, Endpoint, Policy, Session
from edgees.episodes import Ending
from edgees.errors import EdgeesError, ScorerError, UsageError
from edgees.population import request_seed

__all__ = ["Agents", "Played", "Policy"]

log = logging.getLogger("edgees.agents")

Rollout = tuple[Member, str, Mapping[str, Any]]
"""Who plays, the row's id, and what the program gets to know of the row."""

IN_ENVIRONMENT = 100_000
"""Bytes of a row in ``EDGEES_TASK``: Linux allows 128 KiB for one variable."""
FILE_BYTES = 1 << 30
"""The largest file that a program may write."""
PER_CORE, MOST = 8, 64
"""Programs at once where nothing is said: most of their time they wait for the model."""
PROGRAM_BYTES = 200 << 20
"""What a program is taken to need, an interpreter with a client package, when these are counted."""
QUEUE_EACH = 16
"""Requests that one program may have waiting before the others are refused any."""
LOG_BYTES = 4 << 20
REWARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Played:
    """One episode. seconds: from the program's start to its end. tokens: generated for it, all that it asked for.

    answer: the last line of its output that is not its reward, or what a reward object has under ``answer``.
    """

    ending: Ending
    calls: tuple[Call, ...]
    seconds: float
    tokens: tuple[int, ...]
    answer: str


class Agents:
    """Plays rollouts with a program. Its members answer the same whether one program runs or ``workers`` do.

    command: as for a shell, without a shell's meaning; words that name files are looked up from the current folder.
    workers: programs at once; 0: by cores and memory. deadline: seconds for one, all its waiting included. memory:
    bytes of address space of a process; 0: no limit. passed: environment variables that are passed on. log: file for
    what failed programs said. sandbox: ``auto`` (in bubblewrap where that works: the disk read-only but for the
    program's folder, no other processes in sight) or ``off``. ``notes`` has what the user should be told.

    :raises UsageError: there is no such command, or no such system; MissingExtra: no package for the endpoint.
    """

    def __init__(
        self,
        command: str,
        *,
        engine: Engine,
        workers: int = 0,
        deadline: float = 300.0,
        memory: int = 4 << 30,
        passed: Sequence[str] = (),
        log: Path | None = None,
        sandbox: str = "auto",
    ) -> None:
        if os.name != "posix":
            raise UsageError("agent programs run on Linux and macOS only", "leave agent_cmd out")
        if sandbox not in ("auto", "off"):
            raise UsageError(f"sandbox is {sandbox!r}", "auto or off")
        self.command = words_of(command)
        self.engine, self.deadline, self.passed, self.log = engine, deadline, tuple(passed), log
        self.workers = workers or default_workers()
        cores = os.cpu_count() or 1
        self.limits = {"CORE": 0, "FSIZE": FILE_BYTES, "CPU": math.ceil(deadline) * cores + 5}
        if memory:
            self.limits["AS"] = memory
        self.sandbox = Sandbox(self.command) if sandbox == "auto" else None
        self.notes: list[str] = [self.sandbox.note] if self.sandbox and self.sandbox.note else []
        self._tried = self._stopping = False
        self._lock = threading.Lock()
        self._running: set[Program] = set()
        self._endpoint: Endpoint | None = None
        self._serving()

    def play(
        self, rollouts: Sequence[Rollout], policy_of: Callable[[int, str], Policy], progress: Progress | None = None
    ) -> list[Played]:
        """Each rollout's episode, in order; the engine works in the calling thread. The very first one goes ahead.

        policy_of: (place among the rollouts, row's id) -> what its session may do.
        progress: as the engine calls it, also while the programs think. Whatever ends this early ends all programs.

        :raises UsageError: the program cannot be started. :raises ScorerError: the first one fails without having asked
            the model anything.
        """
        if not rollouts:
            return []
        endpoint = self._serving()
        table = _Table(endpoint, len(rollouts), progress, None if self._tried else self._require_sound)
        pool = ThreadPoolExecutor(min(self.workers, len(rollouts)), "edgees-agent")
        try:
            episodes = list[Future[Played]]()
            for place, rollout in enumerate(rollouts):
                episodes.append(pool.submit(self._episode, table, place, rollout, policy_of(place, rollout[1])))
                episodes[-1].add_done_callback(table.ended)
            self.engine.serve(table, table.told)
            table.check()
            self._tried = True
            return [episode.result() for episode in episodes]
        except BaseException:
            table.sound.set()
            with self._lock:
                self._stopping = True
                for program in self._running:
                    program.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            self.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._stopping = False

    def close(self) -> None:
        """End the endpoint. The next ``play`` would start another."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _serving(self) -> Endpoint:
        if self._endpoint is None:
            endpoint = Endpoint(self.engine, queue=max(256, QUEUE_EACH * self.workers))
            endpoint.start()
            self._endpoint = endpoint
        return self._endpoint

    # ---- on a thread of the pool
    def _episode(self, table: _Table, place: int, rollout: Rollout, policy: Policy) -> Played:
        if place:
            table.sound.wait()
        member, row, columns = rollout
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(table.open(member, policy))
            folder = Path(tempfile.mkdtemp(prefix="edgees-agent-")).resolve()
            stack.callback(_remove, folder)
            program = self._program(folder, session, row, json.dumps(dict(columns), default=str))
            stack.callback(program.close)
            with self._lock:
                if self._stopping:
                    raise _Stopped
                self._running.add(program)
            try:
                ran = program.run(self.deadline)
            finally:
                with self._lock:
                    self._running.discard(program)
            session.close()
            if ran.error:
                raise UsageError(f"the agent program {self.command[0]} cannot be started: {ran.error}")
            end, answer = ending(ran, session, folder, self.deadline)
        if end.fault:
            self._note(row, end.fault, ran.stderr)
        if ran.left:
            log.warning("%d processes of an agent program could not be ended", ran.left)
        return Played(end, tuple(session.calls), ran.seconds, table.tokens_of(session), answer)

    def _program(self, folder: Path, session: Session, row: str, task: str) -> Program:
        file = folder / "task.json"
        file.write_text(task + "\n", encoding="ascii")
        policy, base = session.policy, session.base_url
        environment = {
            "PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8"),
            **{name: os.environ[name] for name in ("VIRTUAL_ENV", *self.passed) if name in os.environ},
            "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0",
            "OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_BASE": f"{base}/v1", "OPENAI_API_KEY": "sk-edgees",
            "ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": "sk-edgees",
            "EDGEES_REWARD_URL": f"{base}/reward", "EDGEES_TASK_FILE": str(file),
            "EDGEES_SEED": str(request_seed(policy.seed, policy.generation, f"episode {row}")),
        }  # fmt: skip
        if policy.files:
            for name, variable, text in (
                ("SKILL.md", "EDGEES_SKILLS_FILE", policy.context.skills),
                ("context.json", "EDGEES_CONTEXT_FILE", json.dumps(policy.context.to_dict())),
            ):
                (folder / name).write_text(text + "\n", encoding="utf-8")
                environment[variable] = str(folder / name)
        if len(task) <= IN_ENVIRONMENT:
            environment["EDGEES_TASK"] = task
        command = [*(self.sandbox.prefix(folder) if self.sandbox else ()), *self.command]
        return Program(command, environment, folder, file, self.limits)

    def _note(self, row: str, fault: str, said: bytes) -> None:
        log.info("row %s: %s", row, fault)
        if self.log is not None:
            with self._lock, open(self.log, "ab") as file:
                if file.tell() < LOG_BYTES:
                    file.write(f"row {row}: {fault}\n".encode() + said + b"\n")

    @staticmethod
    def _require_sound(played: Played) -> None:
        fault = played.ending.fault
        if played.calls or not (fault or (played.ending.reward is None and not played.answer)):
            return
        raise ScorerError(
            "the agent program ended without having asked the model anything: "
            + (fault or "it said nothing, and gave no reward"),
            "it runs in a folder of its own with few environment variables (agent_env passes more on); the model is at "
            "OPENAI_BASE_URL or ANTHROPIC_BASE_URL",
        )


class _Stopped(Exception):
    """Nothing is to be started any more."""


class _Table:
    """The endpoint as the engine sees it while ``total`` episodes are played; ends the engine's work after the last.

    progress: called also where nothing happens, so that a stop is noticed. require: of the first episode; None:
    nothing. sound: set when the others may begin.
    """

    def __init__(
        self, endpoint: Endpoint, total: int, progress: Progress | None, require: Callable[[Played], None] | None
    ) -> None:
        self.endpoint, self.left, self.progress, self.require = endpoint, total, progress, require
        self.sound = threading.Event()
        if require is None:
            self.sound.set()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._at = (0, 0)
        self._tokens: dict[int, list[int]] = {}
        self._running: dict[int, list[int]] = {}

    def open(self, member: Member, policy: Policy) -> Session:
        """A session with a member object of its own, by which its requests can be told from others of that member."""
        session = self.endpoint.open(replace(member), policy)
        self._tokens[id(session.member)] = []
        return session

    def tokens_of(self, session: Session) -> tuple[int, ...]:
        return tuple(self._tokens.pop(id(session.member)))

    def ended(self, episode: Future[Played]) -> None:
        """Called from the thread that played it."""
        failure: BaseException | None = _Stopped() if episode.cancelled() else episode.exception()
        if failure is None and self.require is not None and not self.sound.is_set():
            try:
                self.require(episode.result())
                self.sound.set()
            except EdgeesError as error:
                failure = error
        with self._lock:
            self._failure = self._failure or failure
            self.left -= 1
            last = not self.left
        if last:
            self.endpoint.finish()

    def check(self) -> None:
        """:raises EdgeesError: what went wrong on the other threads; whatever else did."""
        if self._failure is not None:
            raise self._failure

    def told(self, done: int, tokens: int) -> None:
        self._at = (done, tokens)
        if self.progress is not None:
            self.progress(done, tokens)

    # ---- the engine's side
    def take(self, room: int, idle: bool) -> Sequence[tuple[int, Request]] | None:
        self.check()
        if idle:
            self.told(*self._at)
        found = self.endpoint.take(room, idle)
        for ticket, request in found or ():
            self._running[ticket] = self._tokens.get(id(request.member), [])
        return found

    def piece(self, ticket: int, data: bytes) -> bool:
        wanted = self.endpoint.piece(ticket, data)
        if not wanted:  # how much of it there is depends on when the client hung up
            self._running[ticket] = []
        return wanted

    def done(self, ticket: int, completion: Completion) -> None:
        self._running.pop(ticket).extend(completion.tokens)
        self.endpoint.done(ticket, completion)


# ---- how an episode ended


def ending(ran: Ran, session: Session, folder: Path, deadline: float) -> tuple[Ending, str]:
    """(ending, answer) of a program that has ended.

    A posted reward holds whatever came later. Without one, a program that breaks down because its conversation was cut
    short by a limit did not fail: what was said may still be scored.
    """
    reward, parts, fault = session.reward, dict(session.parts), session.reward_error
    posted = reward is not None or bool(fault)
    outcome, reason = _cut_short(session)
    printed, answer = _printed(ran.stdout)
    if ran.late:
        outcome, reason = "truncated", "time"
        if not posted:
            fault = f"the agent program still ran after {deadline:g} s{_last_words(ran)}"
    elif not posted and ran.status != 0:
        fault = "" if reason else f"the agent program {_how(ran.status)}{_last_words(ran)}"
    elif not posted:
        try:
            filed = _filed(folder / "reward.json")
            if filed is not None:
                reward, parts = _reward(filed, "reward.json")
            elif printed is not None:
                reward, parts = _reward(printed, "its output")
        except ValueError as error:
            fault = f"the agent program gave no proper reward: {error}"
    if fault:
        return Ending(None, "failed", reason, fault, session.messages()), answer
    return Ending(reward, outcome, reason, "", session.messages(), parts), answer


def _cut_short(session: Session) -> tuple[str, str]:
    """(outcome, reason) as far as the conversation tells."""
    if session.limited:
        return "truncated", "turns" if session.limited == "requests" else session.limited
    if session.calls and session.calls[-1].outcome == "overflow":
        return "overflow", "the context is full"
    return "finished", ""


def _how(status: int | None) -> str:
    if status is None:
        return "was lost: its supervisor was killed"
    return f"exited with status {status}" if status > 0 else describe_status(status).replace("its process ", "")


def _last_words(ran: Ran) -> str:
    lines = [line for line in ran.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {''.join(c if c.isprintable() else ' ' for c in lines[-1].strip())[:300]}" if lines else ""


def _printed(output: bytes) -> tuple[Any, str]:
    """(object with a reward, or number, or None; answer)"""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    for place, line in enumerate(reversed(lines)):
        value = _json(line)
        if isinstance(value, dict) and "reward" in value:
            answer = value.get("answer")
            return value, answer if isinstance(answer, str) else last if place else ""
        if not place and type(value) in (int, float):
            return value, ""
    return None, last


def _json(text: str) -> Any:
    """None for what is none; in lines that are neither objects nor numbers nobody is interested."""
    if text.lstrip()[:1] not in "{-0123456789NI":
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _filed(path: Path) -> Any:
    """What a file says, None where there is none. :raises ValueError: it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name}: it is no file")
        data = file.read(REWARD_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: it is no JSON ({error})") from error
    return value if isinstance(value, dict) else {"reward": value}


def _reward(found: Any, where: str) -> tuple[float, dict[str, float]]:
    """(reward, its parts) of an object or a number. :raises ValueError: it has none that is a finite number."""
    said = found if isinstance(found, dict) else {"reward": found}
    if (reward := _number(said.get("reward"))) is None:
        raise ValueError(f"{where}: {ascii(said.get('reward'))[:100]} is no finite number")
    parts = {name: part for name, value in said.items() if (part := _number(value)) is not None and name != "reward"}
    return reward, parts


def _number(value: Any) -> float | None:
    """A finite one, else None; true and "0.5" are none."""
    if type(value) not in (int, float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


# ---- the machine


def default_workers() -> int:
    """By cores, and by half of the memory that is free."""
    count = min(PER_CORE * (os.cpu_count() or 1), MOST)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        count = min(count, max(1, free // 2 // PROGRAM_BYTES))
    return count


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # the program has taken rights away
        for path, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
