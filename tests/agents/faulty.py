"""Agents that misbehave: the row's ``mode`` says how. All but ``at_once`` ask the model something first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from plain import ask, pay, request

row = json.load(sys.stdin)
mode = row["mode"]
assert json.loads(Path(os.environ["EDGEES_TASK_FILE"]).read_text()) == row


def sleep_stubbornly() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pause()


def leave_child(away: bool) -> None:
    """A process that goes on when this one ends, its number in a file; away: in a session of its own."""
    if os.fork() == 0:
        if away:
            os.setsid()
            if os.fork():
                os._exit(0)
        Path(row["pid_file"]).write_text(str(os.getpid()))
        sleep_stubbornly()
    while not Path(row["pid_file"]).exists() or not Path(row["pid_file"]).read_text():
        time.sleep(0.005)


if mode == "at_once":
    if "pid_file" in row:
        Path(row["pid_file"]).write_text(str(os.getpid()))
    sys.exit("no such luck\n")
if mode == "looks":
    print(json.dumps({"environment": dict(os.environ), "folder": os.getcwd(), "files": os.listdir()}))
    ask("hello")
    print(json.dumps({"reward": 0, "answer": json.dumps([dict(os.environ), os.getcwd(), os.listdir()])}))
    sys.exit()

ask("hello")
if mode == "fails":
    print('{"reward": 1.0}')
    print("warming up\nit broke\n", file=sys.stderr)
    sys.exit(1)
elif mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waiting", file=sys.stderr, flush=True)
    sleep_stubbornly()
elif mode == "forks":
    leave_child(away=False)
    print('{"reward": 0.5}')
elif mode == "escapes":
    leave_child(away=True)
    print('{"reward": 0.5}')
elif mode == "murders":
    Path(row["pid_file"]).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    sleep_stubbornly()
elif mode == "floods":
    line = b"x" * 999_999 + b"\n"
    for _ in range(100):
        sys.stdout.buffer.write(line)
        sys.stderr.buffer.write(line)
    print('{"reward": 0.25}')
elif mode == "silent":
    print("a word\nall done")
elif mode == "posts_twice":
    assert (pay(0.25), pay(0.75)) == (200, 200)
    Path("reward.json").write_text('{"reward": 3}')
    print('{"reward": 4}')
    sys.exit(3)
elif mode == "posts_text":
    assert pay("0.5") == 400
    print('{"reward": 4}')
elif mode == "files":
    Path("reward.json").write_text('{"reward": 0.125, "part": 1, "word": "x"}')
    print('{"reward": 4}')
elif mode == "prints_text":
    print('{"reward": "0.5"}')
elif mode == "prints_number":
    print("3\nthe reward is\n0.5\n")
elif mode == "disconnects":
    body = {"model": "any", "messages": [{"role": "user", "content": "count " + "x" * 300}], "stream": True}
    connection, response = request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    response.read(10)
    response.close()
    connection.close()
    ask("still there?")
    print('{"reward": 0.5}')
elif mode == "asks_much":
    for i in range(10):
        ask(f"question {i}")
elif mode == "talks_too_long":
    ask("x" * 5000)
elif mode == "eats":
    print(json.dumps({"reward": len(bytearray(1 << 34))}))
elif mode == "locks":
    os.mkdir("locked")
    Path("locked/file").write_text("x")
    os.chmod("locked", 0)
    print('{"reward": 0.5}')
elif mode == "starts":
    Path(row["pid_file"]).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '1000']).pid}")
    sleep_stubbornly()
