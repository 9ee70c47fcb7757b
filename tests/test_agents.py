"""Agent programs of all sorts, played against a fake engine through the real endpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

import edgees.children.program
from edgees.agents import Agents, Played, Policy, default_workers, ending
from edgees.backends.base import Completion, Member, Progress, Request, Source
from edgees.children.command import Sandbox, words_of
from edgees.children.program import Program, Ran, Tail
from edgees.endpoint import Session
from edgees.errors import ScorerError, UsageError
from edgees.population import request_seed

pytest.importorskip("uvicorn")

HERE = Path(__file__).parent / "agents"
PYTHON = sys.executable
A, B = Member(7, 0.1), Member(8, -0.1)


class FakeEngine:
    """Text is bytes, written one at a time for all that runs. It says ``KEY|last message|seed``."""

    context_length = 3000

    def __init__(self) -> None:
        self.most = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return list("\0".join(m["content"] for m in messages).encode())

    def serve(self, source: Source, progress: Progress | None = None) -> None:
        running: dict[int, tuple[Request, bytes, bytearray]] = {}
        done, more = 0, True
        while more or running:
            taken = source.take(64 - len(running), not running) if more else []
            more = taken is not None
            for ticket, request in taken or ():
                last = bytes(request.prompt).decode().split("\0")[-1]
                running[ticket] = (request, f"{request.member.key}|{last}|{request.seed}".encode(), bytearray())
            self.most = max(self.most, len(running))
            for ticket, (request, text, made) in list(running.items()):
                made += text[len(made) : len(made) + 1]
                wanted = source.piece(ticket, bytes(made[-1:]))
                if not wanted or len(made) in (len(text), request.max_tokens):
                    del running[ticket]
                    done += 1
                    outcome = "stop" if len(made) == len(text) else "length"
                    source.done(ticket, Completion(made.decode(), tuple(made), outcome))
                    if progress is not None:
                        progress(done, done)
            time.sleep(0.0002)


@pytest.fixture(autouse=True)
def no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether bwrap is installed must not matter, and a sandboxed program could not write the tests' files."""
    which = shutil.which

    def ours_only(name: str) -> str | None:
        found = which(name)
        return found if name != "bwrap" or (found and found.startswith(str(tmp_path))) else None

    monkeypatch.setattr(shutil, "which", ours_only)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "work"))


Opener = Callable[..., Agents]


@pytest.fixture
def agents() -> Iterator[Opener]:
    opened: list[Agents] = []

    def make(script: str = "faulty.py", engine: Any = None, **options: Any) -> Agents:
        options = {"workers": 4, "deadline": 120.0, **options}
        opened.append(Agents(f"{quote(PYTHON)} {quote(str(HERE))}/{script}", engine=engine or FakeEngine(), **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def policy(place: int, row: str) -> Policy:
    return Policy(max_tokens=400, seed=3, generation=2, row=row)


def play_mode(agents: Agents, mode: str, policy_of: Callable[[int, str], Policy] = policy, **columns: Any) -> Played:
    [played] = agents.play([(A, "r1", {"mode": mode, **columns})], policy_of)
    return played


def until_gone(pid: int) -> None:
    """A process that is never reaped, or never ends, fails the test."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return  # its parent, init, reaps it some time
        except OSError:
            return
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def left_over() -> list[str]:
    return os.listdir(tempfile.gettempdir())


# ---- as it should be


def test_a_program_plays_each_rollout_with_its_own_member(agents: Opener) -> None:
    rollouts = [(member, row, {"question": f"what of {row}"}) for member in (A, B) for row in ("r1", "r2", "r3")]
    progress: list[tuple[int, int]] = []
    played = agents("plain.py").play(rollouts, policy, lambda done, tokens: progress.append((done, tokens)))
    for (member, row, columns), p in zip(rollouts, played, strict=True):
        seeds = [request_seed(3, 2, row), request_seed(3, 2, f"{row} turn 1")]
        first = f"{member.key}|{columns['question']}|{seeds[0]}"
        second = f"{member.key}|and {first}?|{seeds[1]}"
        assert (p.ending.reward, p.ending.outcome, p.ending.fault) == (len(second) / 100, "finished", "")
        assert p.ending.parts == {"letters": len(first)}
        assert p.answer == second
        assert [call.text for call in p.calls] == [first, second]
        assert p.ending.messages[-1] == {"role": "assistant", "content": second}
        assert p.tokens == tuple((first + second).encode())
        assert p.seconds > 0
    assert progress[-1] == (12, 12)
    assert left_over() == []


def test_one_at_a_time_or_many_makes_no_difference(agents: Opener) -> None:
    rollouts = [(member, f"r{i}", {"question": f"what of {i}"}) for member in (A, B) for i in range(6)]
    engines = FakeEngine(), FakeEngine()
    one, many = (
        agents("plain.py", engine, workers=workers).play(rollouts, policy)
        for engine, workers in zip(engines, (1, 12), strict=True)
    )
    assert engines[0].most == 1
    kept = [[(p.ending, p.answer, p.tokens, [c.text for c in p.calls]) for p in played] for played in (one, many)]
    assert kept[0] == kept[1]


def test_the_same_row_twice_is_two_episodes(agents: Opener) -> None:
    one, two = agents("plain.py").play([(A, "r", {"question": "q"})] * 2, policy)
    assert one.ending == two.ending and one.tokens == two.tokens and len(one.calls) == len(two.calls) == 2


def test_nothing_to_play(agents: Opener) -> None:
    assert agents().play([], policy) == []


def test_a_stock_client_needs_no_settings(agents: Opener) -> None:
    pytest.importorskip("openai")
    [played] = agents("with_openai.py").play([(A, "r1", {"question": "why?"})], policy)
    assert (played.ending.reward, played.ending.fault) == (1.0, "")
    assert played.answer == f"7|why?|{request_seed(3, 2, 'r1')}"
    assert (played.calls[0].model, played.calls[0].temperature) == ("gpt-4o-mini", 1.0)


def test_what_a_program_sees(agents: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("WANTED", "w")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    program = agents(passed=("WANTED", "OPENAI_API_KEY", "NOT_THERE"))
    environment, folder, files = json.loads(play_mode(program, "looks").answer)
    base = environment.pop("OPENAI_BASE_URL").removesuffix("/v1")
    assert base.startswith("http://127.0.0.1:")
    environment.pop("LC_CTYPE", None)  # Python's own doing
    assert environment == {
        "PATH": os.environ["PATH"], "LANG": os.environ.get("LANG", "C.UTF-8"), "VIRTUAL_ENV": "/venv", "WANTED": "w",
        "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": "sk-edgees", "ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": "sk-edgees",
        "EDGEES_REWARD_URL": f"{base}/reward", "EDGEES_TASK": '{"mode": "looks"}',
        "EDGEES_TASK_FILE": f"{folder}/task.json", "EDGEES_SEED": str(request_seed(3, 2, "episode r1")),
    }  # fmt: skip
    assert files == ["task.json"] and not Path(folder).exists()
    assert Path(folder) != Path.cwd()


def test_a_long_row_is_on_standard_input_and_in_the_file(agents: Opener) -> None:
    played = play_mode(agents(), "looks", text="é" * 200_000)
    assert "EDGEES_TASK" not in json.loads(played.answer)[0]


# ---- rewards


@pytest.mark.parametrize(
    ("mode", "reward", "parts", "answer"),
    [
        ("posts_twice", 0.75, {"part": 2}, ""),
        ("files", 0.125, {"part": 1}, ""),
        ("prints_number", 0.5, {}, ""),
        ("floods", 0.25, {}, ""),
        ("silent", None, {}, "all done"),
        ("locks", 0.5, {}, ""),
    ],
)
def test_where_a_reward_comes_from(
    agents: Opener, mode: str, reward: float | None, parts: dict[str, float], answer: str
) -> None:
    played = play_mode(agents(), mode)
    assert (played.ending.reward, played.ending.parts, played.answer) == (reward, parts, answer)
    assert (played.ending.outcome, played.ending.fault) == ("finished", "")
    assert left_over() == []


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("fails", "the agent program exited with status 1: it broke"),
        ("killed", "the agent program was ended by SIGKILL"),
        ("posts_text", "the agent posted '0.5' as its reward, which is no finite number"),
        ("prints_text", "the agent program gave no proper reward: its output: '0.5' is no finite number"),
        ("eats", "the agent program exited with status 1: MemoryError"),
    ],
)
def test_what_is_no_reward_is_a_fault_and_never_zero(agents: Opener, tmp_path: Path, mode: str, fault: str) -> None:
    program = agents(log=tmp_path / "log")
    played = play_mode(program, mode)
    assert (played.ending.reward, played.ending.outcome, played.ending.fault) == (None, "failed", fault)
    assert len(played.calls) == 1 and played.ending.messages[0]["content"] == "hello"
    assert f"row r1: {fault}\n" in (tmp_path / "log").read_text()
    assert left_over() == []


def session_of(**values: Any) -> Any:
    """A session whose client said ``values``."""

    class Nothing:
        def close_session(self, session: Session) -> None: ...

    session = Session(Nothing(), "t", "http://127.0.0.1", A, policy(0, "r"))  # type: ignore[arg-type]
    for name, value in values.items():
        setattr(session, name, value)
    return session


@pytest.mark.parametrize(
    ("output", "reward", "answer"),
    [
        (b"", None, ""),
        (b"\n \n", None, ""),
        (b"hello", None, "hello"),
        (b"5", 5.0, ""),
        (b"-1e-1\n\n", -0.1, ""),
        (b"5\nhello", None, "hello"),  # a number in the midst may mean anything
        (b'{"reward": 1}\n{"other": 2}\nbye\n', 1.0, "bye"),
        (b'{"reward": 1}\n{"reward": 2, "x": 3}', 2.0, ""),
        (b'{"reward": 1, "answer": "42"}', 1.0, "42"),
        (b'{"answer": "42"}', None, '{"answer": "42"}'),
        (b"[1]", None, "[1]"),
        (b"true", None, "true"),
        (b'"5"', None, '"5"'),
        (b"\xff\xfe", None, "\ufffd\ufffd"),
        (b'{"reward": ' + b"[" * 100_000, None, '{"reward": ' + "[" * 100_000),
        (b'{"reward": null}', "None is no finite number", ""),
        (b'{"reward": true}', "True is no finite number", ""),
        (b'{"reward": NaN}', "nan is no finite number", ""),
        (b"Infinity", "inf is no finite number", ""),
        (b"1" + b"0" * 400, f"{'1' + '0' * 99} is no finite number", ""),
    ],
)
def test_the_last_lines_of_the_output(tmp_path: Path, output: bytes, reward: float | str | None, answer: str) -> None:
    end, said = ending(Ran(0, "", False, 0, 1.0, output, b""), session_of(), tmp_path, 10.0)
    assert said == answer
    if isinstance(reward, str):
        assert end.fault == f"the agent program gave no proper reward: its output: {reward}"
        assert (end.reward, end.outcome) == (None, "failed")
    else:
        assert (end.reward, end.fault, end.outcome) == (reward, "", "finished")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'{"reward": "1"}', "'1' is no finite number"),
        (b'{"score": 1}', "None is no finite number"),
        (b"[1]", "[1] is no finite number"),
        (b"", "it is no JSON"),
        (b"\xff", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
    ],
)
def test_a_reward_file_that_says_no_number(tmp_path: Path, data: bytes, fault: str) -> None:
    (tmp_path / "reward.json").write_bytes(data)
    end, _ = ending(Ran(0, "", False, 0, 1.0, b'{"reward": 1}', b""), session_of(), tmp_path, 10.0)
    assert end.reward is None and end.fault.startswith(f"the agent program gave no proper reward: reward.json: {fault}")


def test_a_reward_file_that_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "reward.json"
    (tmp_path / "elsewhere").write_text("1")
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("elsewhere")):
        make()
        end, _ = ending(Ran(0, "", False, 0, 1.0, b"", b""), session_of(), tmp_path, 10.0)
        assert end.reward is None and end.fault
        path.unlink()


# ---- programs that do not end, or end badly


def test_a_program_that_hangs_is_ended_at_its_deadline(agents: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgees.children.program, "GRACE_S", 1000.0)
    program = agents()
    play_mode(program, "files")
    program.deadline = 1.0
    end = play_mode(program, "hangs").ending
    assert (end.reward, end.outcome, end.reason) == (None, "failed", "time")
    assert end.fault.startswith("the agent program still ran after 1 s")
    assert left_over() == []


@pytest.mark.parametrize(
    ("ran", "said", "expected"),
    [
        ({"late": True, "status": -9}, {"reward": 0.5}, (0.5, "truncated", "time", "")),
        ({"late": True, "status": -9, "stdout": b"1"}, {}, (None, "failed", "time", "still ran after")),
        ({"status": 1}, {"reward": 0.5}, (0.5, "finished", "", "")),
        ({"status": 1, "stdout": b"1"}, {"limited": "requests"}, (None, "truncated", "turns", "")),
        ({"status": 0, "stdout": b"1"}, {"limited": "tokens"}, (1.0, "truncated", "tokens", "")),
        ({"status": None}, {}, (None, "failed", "", "was lost: its supervisor was killed")),
        ({"status": 0}, {"reward_error": "bad"}, (None, "failed", "", "bad")),
    ],
)
def test_deadlines_limits_and_posted_rewards(
    tmp_path: Path, ran: dict[str, Any], said: dict[str, Any], expected: tuple[float | None, str, str, str]
) -> None:
    plain = {"error": "", "late": False, "left": 0, "seconds": 1.0, "stdout": b"", "stderr": b""}
    end, _ = ending(Ran(**{**plain, **ran}), session_of(**said), tmp_path, 10.0)
    reward, outcome, reason, fault = expected
    assert (end.reward, end.outcome, end.reason) == (reward, outcome, reason)
    assert fault in end.fault and bool(fault) == bool(end.fault)


@pytest.mark.parametrize("mode", ["forks", "escapes"])
def test_what_a_program_leaves_behind_is_ended(agents: Opener, tmp_path: Path, mode: str) -> None:
    if mode == "escapes" and sys.platform != "linux":
        pytest.skip("only Linux tells whose child a process was")
    file = tmp_path / "pid"
    played = play_mode(agents(), mode, pid_file=str(file))
    assert (played.ending.reward, played.ending.outcome) == (0.5, "finished")
    assert not Path(f"/proc/{file.read_text()}").exists()  # reaped by the time that the episode ends


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_program_that_kills_its_supervisor_goes_with_it(agents: Opener, tmp_path: Path) -> None:
    played = play_mode(agents(), "murders", pid_file=str(tmp_path / "pid"))
    assert played.ending.fault == "the agent program was lost: its supervisor was killed"
    until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_programs_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from edgees.children.program import Program\n"
        f"here = Path({str(tmp_path)!r}); row = here / 'own' / 'row'; row.parent.mkdir(); row.write_text('x')\n"
        "script = f'echo $$ > {here}/pid.new; mv {here}/pid.new {here}/pid; sleep 1000'\n"
        "Program(['sh', '-c', script], dict(os.environ), row.parent, row, {}).run(1000)\n"
    )
    parent = subprocess.Popen([PYTHON, "-c", code], cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    until_gone(int((tmp_path / "pid").read_text()))
    deadline = time.monotonic() + 60
    while (tmp_path / "own").exists():
        assert time.monotonic() < deadline, "its folder is still there"
        time.sleep(0.01)


def test_output_is_kept_within_bounds() -> None:
    tail = Tail(1000)
    most = 0
    for i in range(100):
        tail.add(bytes([i]) * 700)
        most = max(most, len(tail.data))
    assert tail.last() == bytes([98]) * 300 + bytes([99]) * 700
    assert most <= 2700


def test_limits_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "row").write_text("x")
    code = "import resource as r; print([r.getrlimit(k) for k in (r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_CORE)])"
    limits = {"FSIZE": 1000, "CPU": 77, "CORE": 0}
    program = Program([PYTHON, "-c", code], dict(os.environ), tmp_path, tmp_path / "row", limits)
    ran = program.run(60)
    program.close()
    assert (ran.stdout.decode().strip(), ran.status) == ("[(1000, 1000), (77, 77), (0, 0)]", 0)


def test_a_client_that_hangs_up_in_mid_stream_goes_on(agents: Opener) -> None:
    played = play_mode(agents(), "disconnects")
    assert (played.ending.reward, played.ending.outcome) == (0.5, "finished")
    assert [call.outcome for call in played.calls] == ["stop", "gone", "stop"]
    said = f"7|hello|{request_seed(3, 2, 'r1')}7|still there?|{request_seed(3, 2, 'r1 turn 2')}"
    assert bytes(played.tokens).decode() == said


def test_limits_of_the_conversation_are_no_faults(agents: Opener) -> None:
    limited = play_mode(agents(), "asks_much", lambda place, row: Policy(400, row=row, max_requests=4))
    assert (limited.ending.outcome, limited.ending.reason, limited.ending.fault) == ("truncated", "turns", "")
    assert (limited.ending.reward, len(limited.calls)) == (None, 4)
    full = play_mode(agents(), "talks_too_long").ending
    assert (full.reward, full.outcome, full.reason, full.fault) == (None, "overflow", "the context is full", "")


def test_one_fault_does_not_spoil_the_others(agents: Opener) -> None:
    modes = ["files", "fails", "silent", "posts_text", "posts_twice"]
    played = agents().play([(A, mode, {"mode": mode}) for mode in modes], policy)
    assert [p.ending.reward for p in played] == [0.125, None, None, None, 0.75]
    assert [bool(p.ending.fault) for p in played] == [False, True, False, True, False]


# ---- the first program, and the end of all


def test_a_program_that_fails_at_once_is_said_so(agents: Opener, tmp_path: Path) -> None:
    rollouts = [(A, f"r{i}", {"mode": "at_once", "pid_file": str(tmp_path / str(i))}) for i in range(50)]
    with pytest.raises(ScorerError, match="asked the model anything: the agent program exited with status 1: no such"):
        agents().play(rollouts, policy)
    assert [file.name for file in tmp_path.glob("[0-9]*")] == ["0"]  # no other has been started
    nothing = Agents("true", engine=FakeEngine(), workers=1)  # type: ignore[arg-type]
    with pytest.raises(ScorerError, match="it said nothing, and gave no reward"):
        nothing.play([(A, "r1", {})], policy)
    assert left_over() == []


def test_after_one_sound_episode_a_failure_at_once_is_one_of_many(agents: Opener) -> None:
    modes = ["files", "at_once", "files"]
    played = agents().play([(A, mode, {"mode": mode}) for mode in modes], policy)
    assert [p.ending.reward for p in played] == [0.125, None, 0.125]


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    for command, said in [
        ("no-such-program-anywhere x", "there is no program no-such-program-anywhere"),
        ("", "is empty"),
        ("python 'x", "cannot be read: No closing quotation"),
    ]:
        with pytest.raises(UsageError, match=said):
            Agents(command, engine=FakeEngine())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sandbox is 'yes'"):
        Agents("true", engine=FakeEngine(), sandbox="yes")  # type: ignore[arg-type]
    file = tmp_path / "program"
    file.write_bytes(b"\x7fELF, but not really")
    file.chmod(0o755)
    program = Agents(str(file), engine=FakeEngine(), sandbox="off")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="program cannot be started: Exec format error"):
        program.play([(A, "r1", {}), (A, "r2", {})], policy)


def test_an_interrupt_ends_all_programs(agents: Opener, tmp_path: Path) -> None:
    program = agents(workers=3)
    assert play_mode(program, "files").ending.reward == 0.125
    files = [tmp_path / f"pid{i}" for i in range(3)]
    rollouts = [(A, f"r{i}", {"mode": "starts", "pid_file": str(tmp_path / f"pid{i}")}) for i in range(20)]

    def progress(done: int, tokens: int) -> None:
        if all(file.exists() and len(file.read_text().split()) == 2 for file in files):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.play(rollouts, policy, progress)
    for pid in (int(pid) for file in files for pid in file.read_text().split()):
        assert not Path(f"/proc/{pid}").exists()
    assert len(list(tmp_path.glob("pid*"))) == 3 and left_over() == []
    assert play_mode(program, "files").ending.reward == 0.125  # and it can go on


def test_an_engine_that_fails_ends_all_programs(agents: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    program = agents(engine=engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "serve", lambda source, progress: source.nonsense)
        with pytest.raises(AttributeError, match="nonsense"):
            program.play([(A, f"r{i}", {"mode": "hangs"}) for i in range(9)], policy)
    assert left_over() == []


# ---- commands, workers, the sandbox


def test_words_that_name_files_get_their_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("agent.py", "a b.toml"):
        (tmp_path / name).write_text("")
    words = words_of("env agent.py run run/ ./agent.py --config='a b.toml' --config=none x=agent.py -v")
    here = str(tmp_path)
    assert os.path.isabs(words[0]) and words[1:] == [
        f"{here}/agent.py", "run", f"{here}/run", f"{here}/agent.py", f"--config={here}/a b.toml", "--config=none",
        "x=agent.py", "-v",
    ]  # fmt: skip


def test_python_is_that_of_the_active_environment_else_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    assert words_of("python x") == [PYTHON, "x"]
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert words_of("python3 x") == [PYTHON, "x"]  # it has none of that name
    assert words_of("python x") == [str(tmp_path / "python"), "x"]


def test_workers_are_bounded() -> None:
    assert 1 <= default_workers() <= 64


FAKE_BWRAP = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def test_bubblewrap_is_used_where_it_works(agents: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["bubblewrap (bwrap) is not there" in note for note in agents().notes] == [True]
    (tmp_path / "bin").mkdir()
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.write_text(FAKE_BWRAP.format(log=tmp_path / "calls"))
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bwrap.parent}{os.pathsep}{os.environ['PATH']}")
    program = agents()
    assert program.notes == []
    folder = json.loads(play_mode(program, "looks").answer)[1]
    _, used = (tmp_path / "calls").read_text().splitlines()
    assert "--ro-bind / /" in used and f"--bind {folder} {folder}" in used and "--die-with-parent" in used
    assert "--unshare-net" not in used  # the endpoint is on loopback
    (tmp_path / "calls").unlink()
    assert agents(sandbox="off").notes == [] and not (tmp_path / "calls").exists()
    bwrap.write_text("#!/bin/sh\necho no user namespaces >&2; exit 1\n")
    assert "bwrap does not work (no user namespaces)" in agents().notes[0]
    assert play_mode(agents(), "files").ending.reward == 0.125


def test_an_empty_tmp_unless_the_program_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert Sandbox(["/usr/bin/env", "/home/x/agent.py"]).hidden == ["--tmpfs", "/tmp"]
    assert Sandbox(["/usr/bin/env", "--file=/tmp/x/agent.py"]).hidden == []
