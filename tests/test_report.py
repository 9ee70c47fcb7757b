"""What a person sees of a run: lines, live display, metrics.csv, reward.png, the run's page."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgees import report
from edgees.checkpoint import evaluation_record, generation_record
from edgees.errors import RunError

START = {
    "run": "runs/x y",
    "model": "m.gguf",
    "task": "home",
    "generations": 2,
    "members": 8,
    "rows": 4,
    "generation": 0,
}
BASE = {"generation": 0, "heldout": 0.25, "heldout_se": 0.0625, "best": True}
FIRST = {
    "generation": 1,
    "reward": 0.3125,
    "reward_std": 0.05,
    "shrink": 0.5,
    "excluded": 2,
    "tokens": 1500,
    "tokens_per_second": 150.0,
    "distinct": 20,
    "majority": 0.625,
    "seconds": 10.0,
    "peak_rss_bytes": 612_000_000,
}
SECOND = FIRST | {"generation": 2, "reward": 0.375, "excluded": 0}
LAST = {
    "generation": 2, "heldout": 0.5, "heldout_se": 0.125, "best": True, "heldout_distinct": 3, "heldout_majority": 0.9,
}  # fmt: skip
END = {
    "run": "runs/x y",
    "generations": 2,
    "base": 0.25,
    "best": 0.5,
    "seconds": 75.0,
    "tokens": 3000,
    "peak_rss_bytes": 612_000_000,
}


def play(observer: report.Observer) -> None:
    observer.on_start(START)
    observer.on_eval(BASE)
    for record in (FIRST, SECOND):
        observer.on_progress(16, 32, 700)
        observer.on_generation(record)
    observer.on_message("no signal: all rewards are equal")
    observer.on_eval(LAST)
    observer.on_end(END)


def test_plain_lines_carry_the_figures() -> None:
    out = io.StringIO()
    observer = report.observer(out)
    assert isinstance(observer, report.PlainObserver)
    play(observer)
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "tuning m.gguf on home: 2 generations, 8 members x 4 rows",
        "run folder: runs/x y",
        "held-out score of the base: 0.250 +- 0.062",
    ]
    assert re.fullmatch(
        r"generation 1/2: reward 0\.312 \+- 0\.050, shrink 0\.50, 2 rewards excluded, "
        r"20 different answers \(62% the same\), "
        r"150 tok/s, 612 MB, 10 s, \d+\.\d s left",
        lines[3],
    )
    assert lines[5] == "no signal: all rewards are equal"
    assert lines[6] == "held-out score after generation 2: 0.500 +- 0.125, best so far"
    assert lines[-8:] == [
        "base:        0.250",
        "best:        0.500",
        "difference:  +0.250",
        "generations: 2",
        "time:        1 min 15 s",
        "tokens:      3,000",
        "peak memory: 612 MB",
        "next: edgees eval 'runs/x y'",
    ]
    assert not [c for c in out.getvalue() if ord(c) < 32 and c != "\n"]


def test_unknown_figures_are_a_dash_not_a_crash() -> None:
    out = io.StringIO()
    observer = report.PlainObserver(out)
    observer.on_start({"run": "r", "model": "m", "task": "t", "seconds": 90.0})
    observer.on_eval({"generation": 0, "heldout": None, "heldout_se": float("nan"), "best": False})
    observer.on_generation({"generation": 1, "reward": None, "reward_std": None, "seconds": None})
    observer.on_end({"run": "r", "generations": 1, "base": None, "best": None, "seconds": 3.0})
    assert "held-out score of the base: - +- -" in out.getvalue()
    assert "at most 1 min 30 s" in out.getvalue()
    assert "generation 1: reward - +- -" in out.getvalue()


def test_a_closed_pipe_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    play(report.PlainObserver(Gone()))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", [30, 100])
@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_of_any_width_shows_the_figures(columns: int, no_color: bool) -> None:
    import fcntl
    import pty
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_report as t; from edgees import report\nobserver = report.observer(sys.stdout)\n"
        "assert isinstance(observer, report.TerminalObserver)\nt.play(observer)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, env=environment)
    os.close(child)
    received = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the child closed its side
            break
        if not chunk:
            break
        received += chunk
    os.close(parent)
    text = received.decode()
    assert process.wait(timeout=60) == 0, text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "no signal: all rewards are equal" in re.sub(r"\s+", " ", plain)
    for figure in ("0.500", "2/2", "150 tok/s", "+0.250", "1 min 15 s"):
        assert figure in plain
    assert (
        max(len(line.split("\r")[-1]) for line in plain.replace("\r\n", "\n").split("\n") if "next:" not in line)
        <= columns
    )
    colours = re.findall(r"\x1b\[[0-9;]*m", text)
    assert not [c for c in colours if re.search(r"\[(3[0-7]|38|9[0-7])", c)] or not no_color


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    records: list[dict[str, Any]] = [BASE, FIRST, SECOND, LAST]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"gener')
    return folder


def test_metrics_become_one_row_per_generation(run: Path) -> None:
    files, notes = report.write(run, {"model": "m.gguf", "task": "home"}, END)
    assert [file.relative_to(run).as_posix() for file in files] == ["metrics.csv", "plots/reward.png", "README.md"]
    assert notes == []
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["generation"] for row in rows] == ["0", "1", "2"]
    assert [row["heldout"] for row in rows] == ["0.25", "", "0.5"]
    assert [row["reward"] for row in rows] == ["", "0.3125", "0.375"]
    assert [row["best"] for row in rows] == ["1", "", "1"]
    assert tuple(rows[0]) == report.COLUMNS


def picture_size(run: Path) -> tuple[int, int]:
    report.write(run)
    png = (run / "plots" / "reward.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def write_records(run: Path, *records: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_plot_is_a_picture_of_a_readable_size(run: Path) -> None:
    """With a row of small plots below where there is something to show in it; figures that are all 0 are not."""
    assert picture_size(run) == (960, 900)  # distinct answers
    reward = {"generation": 1, "reward": 0.5, "invalid": 0.0}
    write_records(run, BASE, reward)
    assert picture_size(run) == (960, 720)
    for more in ({"kl": 0.1}, {"perplexity": 20.0}, {"length": 5.0}, {"heldout_length": 5.0}, {"invalid": 0.1}):
        write_records(run, BASE, reward | more)
        assert picture_size(run) == (960, 900), more


def test_without_matplotlib_everything_else_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files, notes = report.write(run)
    assert [file.name for file in files] == ["metrics.csv", "README.md"]
    assert notes == [report.PLOT_HINT]
    assert "reward.png" not in (run / "README.md").read_text()


def test_the_page_says_what_how_and_what_next(run: Path) -> None:
    report.write(run, {"model": "m.gguf", "task": "home"}, END)
    page = (run / "README.md").read_text()
    assert page.startswith("# my run\n")
    assert "`m.gguf` tuned on `home`" in page
    assert "| difference | +0.250 |" in page
    assert "| 0 | 0.250 | 0.062 | - | - |" in page
    assert "| 2 | 0.500 | 0.125 | 3 | 90% |" in page  # case 30
    assert "edgees export 'my run' --to gguf --out 'my run-gguf' --verify" in page
    assert "](plots/reward.png)" in page


SIGNS = {"kl": 0.125, "perplexity": 21.46, "heldout_length": 11.5, "heldout_truncated": 3}
TOLD: list[dict[str, Any]] = [
    {"generation": 0, "finding": "length", "text": "cut <b>short</b>\nby `score.py`"},
    {"generation": 2, "finding": "decay", "text": "it falls"},
    {"generation": 2, "finding": "decay", "text": "it falls"},  # told again by a resumed run
    {"generation": 3, "finding": "decay", "text": "what was found before no longer holds", "ended": True},
]


def test_signs_of_forgetting_stand_in_the_table_and_the_page(run: Path) -> None:
    write_records(run, BASE, FIRST | {"invalid": 0.0625, "length": 9.5}, SECOND, LAST | SIGNS)
    report.write(run)
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kl"] for row in rows] == ["", "", "0.125"]
    assert [row["perplexity"] for row in rows] == ["", "", "21.46"]
    assert [rows[1]["invalid"], rows[1]["length"], rows[2]["heldout_length"]] == ["0.0625", "9.5", "11.5"]
    page = (run / "README.md").read_text()
    assert "| the commonest | tokens a reply | cut off | KL from the base | perplexity |\n|---|" in page
    assert "| 0 | 0.250 | 0.062 | - | - | - | - | - | - |" in page
    assert "| 2 | 0.500 | 0.125 | 3 | 90% | 11.5 | 3 | 0.125 | 21.5 |" in page


def test_what_the_watchdogs_said_is_on_the_page(run: Path) -> None:
    report.write(run)
    assert "watchdogs" not in (run / "README.md").read_text()  # as in runs of before there were any
    write_records(run, BASE, FIRST, *TOLD, SECOND, LAST)
    report.write(run)
    page = (run / "README.md").read_text()
    assert page.count("after generation 2: **decay**: it falls") == 1
    assert "- after generation 0: **length**: cut \\<b\\>short\\</b\\> by \\`score.py\\`\n" in page
    assert "- after generation 3: **decay**: what was found before no longer holds" in page
    with (run / "metrics.csv").open(newline="") as file:
        assert [row["generation"] for row in csv.DictReader(file)] == ["0", "1", "2"]  # a finding is no generation


def test_journal_lines_become_records() -> None:
    line: dict[str, Any] = {
        "generation": 4, "rows": ["a", "b"], "coefs": [0.0, 0.0], "length": 7.5, "distinct": 5,
        "rewards": {"plus": [1.0, None], "minus": [0.0, None]}, "excluded": [[1, 1, "a", "score: None"]],
    }  # fmt: skip
    record = generation_record(line)
    assert (record["generation"], record["reward"], record["length"]) == (5, 0.5, 7.5)
    assert (record["excluded"], record["invalid"]) == (1, 1 / 8)
    assert generation_record(line | {"answers": 4})["invalid"] == 1 / 4
    assert generation_record(line | {"rows": []})["invalid"] is None
    entry: dict[str, Any] = {"eval": 2, "mean": 0.5, "se": 0.1, "rows": 8, "metrics": {"exact": 0.25}}
    assert evaluation_record(entry | {"kl": 0.2, "perplexity": None}, True) == {
        "generation": 2, "heldout": 0.5, "heldout_se": 0.1, "best": True, "heldout_rows": 8, "heldout_exact": 0.25,
        "kl": 0.2, "perplexity": None, "heldout_excluded": 0, "heldout_seconds": None,
    }  # fmt: skip
    assert "kl" not in evaluation_record(entry, True)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        report.write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"generation": 1}\nbroken\n{"generation": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: not JSON"):
        report.write(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.6, "1 h 00 min"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text
