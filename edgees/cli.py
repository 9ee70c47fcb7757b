"""The command line. Everything heavy is imported inside the commands, so that ``edgees --help`` is instant.

Exit codes: 0 ok, 1 runtime, 2 usage or configuration, 3 will not fit, 4 scorer broken, 130 interrupted (state saved).
With ``--json`` exactly one JSON document goes to standard output, last; everything else goes to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from edgees import __version__
from edgees.errors import EdgeesError, Interrupted, WillNotFit

if TYPE_CHECKING:
    from edgees.report import Observer


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the ``edgees`` command; always leaves through SystemExit with a documented code."""
    # A polite kill is Ctrl-C: temporary files go, runs are saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(argv)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()
        code = code or 1
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command and turns whatever comes out of it into an exit code and at most three lines on stderr."""
    try:
        result = cli.main(args=None if argv is None else list(argv), prog_name="edgees", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        _complain(Interrupted("interrupted"), error)
        return Interrupted.exit_code
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except Exception as error:
        known = _as_refusal(error)
        _complain(known, error)
        return known.exit_code


def _as_refusal(error: Exception) -> EdgeesError:
    if isinstance(error, EdgeesError):
        return error
    if isinstance(error, MemoryError):
        return WillNotFit("out of memory", "smaller batches, a shorter context or --scope adapter need less")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WillNotFit(f"no space left on the disk{_about(error)}", "free some space, then: edgees resume RUN")
    if isinstance(error, OSError) and error.strerror:
        return EdgeesError(f"{error.strerror}{_about(error)}", "check the path and its permissions")
    return EdgeesError(
        f"unexpected {type(error).__name__}: {error}",
        "this is a fault in edgees: run again with --debug for the traceback",
    )


def _about(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""


def _complain(refusal: EdgeesError, cause: BaseException) -> None:
    with contextlib.suppress(OSError):
        if os.environ.get("EDGEES_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(cause, file=sys.stderr)
        print(f"error: {refusal.message}", file=sys.stderr)
        if refusal.hint:
            print(f"hint: {refusal.hint}", file=sys.stderr)


def _abandon_stdout() -> None:
    """The reader has gone: let the interpreter's last flush go nowhere instead of complaining."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- building blocks of commands --------------------------------------------------------------------------------------


class Command(click.Command):
    """A command with ``--debug`` everywhere; with ``from_config`` also one option per field of ``Config``, or per field
    that it names."""

    def __init__(self, *args: Any, from_config: bool | Sequence[str] = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.from_config = from_config
        self.params.append(debug_option())

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if not self.from_config:
            return params
        own = [param for param in params if isinstance(param, click.Argument)]
        only = None if self.from_config is True else tuple(self.from_config or ())
        return [*own, *config_options(only), *(param for param in params if param not in own)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Settings stand under the headings that the configuration gives them."""
        if not self.from_config:
            super().format_options(ctx, formatter)
            return
        from edgees.config import SETTINGS

        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                setting = SETTINGS.get(str(param.name))
                heading = str(setting.metadata["group"]).capitalize() if setting else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Group(click.Group):
    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a person needs them."""
        return list(self.commands)


def debug_option() -> click.Option:
    def switch_on(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["EDGEES_DEBUG"] = "1"

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=switch_on,
        help="Show tracebacks of errors.",
    )


METAVARS = {"int": "N", "float": "X"}

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


@contextlib.contextmanager
def one_document(wanted: bool) -> Iterator[dict[str, Any]]:
    """Yields a dict to fill. When ``wanted``, whatever anybody prints meanwhile, C libraries and scorers included, goes
    to standard error, and the dict is printed on standard output at the end, unless the body raises."""
    document: dict[str, Any] = {}
    if not wanted:
        yield document
        return
    with _stdout_to_stderr() as out:
        yield document
        out.write(json.dumps(plain(document), ensure_ascii=False, allow_nan=False) + "\n")
        out.flush()


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[TextIO]:
    try:
        real = sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # not a file (a test's buffer): then only Python's own output moves
        real = False
    if not real:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield out
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with io.TextIOWrapper(os.fdopen(os.dup(saved), "wb"), encoding="utf-8") as out:
            yield out
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def plain(value: Any) -> Any:
    """JSON-ready: NaN and infinities become null, paths strings, NumPy scalars numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- options from the configuration -----------------------------------------------------------------------------------


def config_options(only: Sequence[str] | None = None) -> list[click.Option]:
    """One option per setting, or per one of ``only``: name, type and help come from ``edgees.config``, nothing is
    listed twice.

    All default to None, that is, not given: the file's value, or else the default, holds then. Values go on as text;
    the configuration converts and checks them, with the same words as for a file.
    """
    from edgees.config import SETTINGS, describe

    options = []
    for name, setting in SETTINGS.items():
        if only is not None and name not in only:
            continue
        flag = "--" + name.replace("_", "-")
        if setting.type == "bool":
            options.append(click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=describe(name)))
            continue
        options.append(
            click.Option(
                [flag, name],
                type=str,
                default=None,
                multiple=str(setting.type).startswith("tuple"),
                metavar=METAVARS.get(str(setting.type).removesuffix(" | None"), "TEXT"),
                help=describe(name),
            )
        )
    return options


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that the user gave."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


# --- commands ---------------------------------------------------------------------------------------------------------


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="edgees")
def cli() -> None:
    """Tune all weights of a 4-bit language model with forward passes only.

    \b
    edgees tune --model model.gguf --task jsonl:rows.jsonl --reward score.py
    edgees eval runs/NAME
    edgees export runs/NAME --to gguf --out out/ --verify
    """


@cli.command()
@json_option
def doctor(as_json: bool) -> None:
    """What runs on this machine, and why the rest does not."""
    from edgees import doctor as findings

    with one_document(as_json) as document:
        found = findings.examine()
        document |= found
        if as_json:
            return
        for fine, subject, text, hint in findings.lines(found):
            click.echo(f"{ {True: 'ok', False: 'NO', None: '--'}[fine] }  {subject:<10}{text}")
            if hint:
                click.echo(f"    {'':<10}hint: {hint}")


@cli.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--example", default="", metavar="NAME", help="Which example; see --list.")
@click.option("--list", "listing", is_flag=True, help="Name the examples, one a line.")
@json_option
def init(folder: Path | None, example: str, listing: bool, as_json: bool) -> None:
    """Write an example to start from into FOLDER: settings, environment or agent, scorer, README."""
    from edgees import examples

    with one_document(as_json) as document:
        if listing:
            found = examples.names()
            document["examples"] = found
            for name, about in found.items() if not as_json else ():
                click.echo(f"{name:<12}{about}")
            return
        if folder is None or not example:
            raise click.UsageError("give a folder and --example NAME, or --list")
        files = examples.copy(example, folder)
        document["files"] = [str(path) for path in files]
        if not as_json:
            for path in files:
                click.echo(path)
            click.echo(f"next: cd {shlex.quote(str(folder))} && edgees tune config.toml")


@cli.command(from_config=True)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--card", default="", metavar="NAME", help="Engine torch: a card of the table (rtx4090, ...) to compute on."
)
@click.option("--budget", default="", metavar="SIZE", help="Memory to fit into instead of what is free, e.g. 8G.")
@json_option
def estimate(config: Path | None, card: str, budget: str, as_json: bool, **flags: Any) -> None:
    """Memory, disk and time of a run with these settings, nothing loaded. Exit code 3: it will not fit."""
    from edgees import config as settings
    from edgees import estimate as estimating

    with one_document(as_json) as document:
        found = estimating.estimate(settings.load(config, given(flags)), card=card, budget=budget)
        document |= found
        for line in [] if as_json else estimating.lines(found):
            click.echo(line)
    estimating.require_fit(found)


@cli.command(from_config=True)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=A|B",
    help="Compare choices of a setting, e.g. 'sigma=.02|.04'; several: all combinations.",
)
@json_option
def probe(config: Path | None, vary: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """What one pair of members can teach, from one generation: which sigma, tensors and noise. Nothing is changed."""
    from edgees import config as settings
    from edgees import probe as probing

    with one_document(as_json) as document:
        document |= probing.probe(settings.load(config, given(flags)), vary)
        for line in [] if as_json else probing.lines(document):
            click.echo(line)


@cli.command(from_config=True)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check everything, estimate the time, write nothing.")
@json_option
def tune(config: Path | None, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Tune a model on a task. Settings come from CONFIG (TOML or YAML); flags win over it."""
    from edgees import config as settings
    from edgees import tune as tuning

    with one_document(as_json) as document:
        chosen = settings.load(config, given(flags))
        if dry_run:
            document |= tuning.rehearse(chosen)
            show_rehearsal(document, as_json)
            return
        with watching() as observer:
            document |= tuning.tune(chosen, observer=observer).to_dict()


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def resume(run: Path, as_json: bool) -> None:
    """Go on with a run that was interrupted; the result is that of a run that never was."""
    from edgees import tune as tuning

    with one_document(as_json) as document, watching() as observer:
        document |= tuning.resume(run, observer=observer).to_dict()


@cli.command()
@click.argument("history", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The base model that the history began with.")
@click.option(
    "--engine", type=click.Choice(["llamacpp", "torch"]), help="MODEL is another form of that base, for this engine."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder to make.")
@json_option
def replay(history: Path, model: str, engine: str | None, out: Path, as_json: bool) -> None:
    """Rebuild a run folder from its HISTORY (history.jsonl) and the base alone, bit for bit.

    With --engine the base may have another form: another quantisation, or a Hugging Face folder instead of a GGUF."""
    from edgees import tune as tuning

    with one_document(as_json) as document:
        result = tuning.replay(history, model=model, out=out, engine=engine)
        document |= result.to_dict()
        if not as_json:
            click.echo(f"{out}: {result.generations} generation(s) rebuilt from {history}")


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def report(run: Path, as_json: bool) -> None:
    """Write metrics.csv, plots/reward.png and README.md of a run anew, and print its table."""
    from edgees import tune as tuning
    from edgees.report import closing

    with one_document(as_json) as document:
        result, files, notes = tuning.report_of(run)
        document |= result.to_dict() | {"files": files}
        if as_json:
            return
        for name, value in closing(document):
            click.echo(f"{name + ':':<12} {value}")
        for text in (*notes, *files):
            click.echo(text)


@contextlib.contextmanager
def watching() -> Iterator[Observer]:
    """An observer on standard output that leaves the terminal usable however the run ends."""
    from edgees.report import observer

    watcher = observer(sys.stdout)
    try:
        yield watcher
    finally:
        watcher.close()


def show_rehearsal(found: Mapping[str, Any], as_json: bool) -> None:
    """What ``tune --dry-run`` found, in words."""
    if as_json:
        return
    from edgees.report import duration, number, size

    sample = found["sample"]
    answer = sample["answer"] if len(sample["answer"]) <= 60 else sample["answer"][:60] + "..."
    lines = [
        f"model:     {found['model']}, {found['weights']:,} weights in {found['tensors']} tensors are tuned",
        f"task:      {found['task']}, {found['train']} rows to train on, {found['heldout']} held out",
        f"sample:    {sample['row']}: reward {number(sample['reward'])} for {answer!r}",
        f"disk:      {size(found['disk_bytes'])}",
        f"time:      about {duration(found['seconds'])}",
        *found["warnings"],
        "all is well; nothing was written",
    ]
    click.echo("\n".join(lines))


@cli.command()
@click.argument("what", metavar="RUN|MODEL")
@click.option("--host", default="127.0.0.1", show_default=True, help="Other addresses let other machines in.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option("--api-key", default="", metavar="TEXT", envvar="EDGEES_API_KEY", help="What clients must show.")
@click.option("--last", is_flag=True, help="The last weights of a run instead of the best on held-out rows.")
@click.option(
    "--engine", default="", metavar="TEXT", help="llamacpp or torch, of a model; by its form where not given."
)
@click.option("--context", default=0, metavar="N", help="Tokens a conversation may have; 0: as the model.")
@click.option("--parallel", default=4, show_default=True, metavar="N", help="Answers at once.")
@click.option("--threads", default=0, metavar="N", help="CPU threads; 0: all cores.")
@click.option("--max-tokens", default=1024, show_default=True, metavar="N", help="Of one answer.")
def serve(
    what: str, host: str, port: int, api_key: str, last: bool, engine: str, context: int, parallel: int, threads: int,
    max_tokens: int,
) -> None:  # fmt: skip
    """Answer OpenAI and Anthropic clients with a model, or with what a run has made of one."""
    from edgees import serve as serving

    serving.serve(
        what, host=host, port=port, api_key=api_key, weights="last" if last else "best", engine=engine, context=context,
        parallel=parallel, threads=threads, max_tokens=max_tokens, say=progress_note,
    )  # fmt: skip


SEARCHED = (
    "model", "task", "reward", "eval_data", "system", "context_file", "engine", "device", "threads", "parallel", "seed",
    "scope", "params", "noise", "rank", "pairs", "antithetic", "sigma", "lr", "shaping", "turns", "episode_tokens",
    "max_tokens", "temperature", "context", "scorer_timeout", "heldout", "reflector",
)  # fmt: skip
"""Settings that a search takes."""
OF_HEURISTICS = (
    "heuristic", "out", "model", "engine", "device", "threads", "seed", "max_tokens", "temperature", "context",
    "scorer_timeout", "reflector", "tuned", "last", "rollouts", "seconds", "as_json",
)  # fmt: skip
"""What of it has a meaning with --heuristic; the first two, and the reflector, have none without."""


@cli.command(from_config=SEARCHED)
@click.option("--row", "names", multiple=True, metavar="ID", help="A row to search on; several allowed.")
@click.option("--rows", "count", default=0, metavar="N", type=click.IntRange(0), help="The first N held-out rows.")
@click.option("--apart", is_flag=True, help="Each row by itself, with the whole budget, instead of all together.")
@click.option("--run", "tuned", type=click.Path(path_type=Path), help="A run whose weights are the centre.")
@click.option("--last", is_flag=True, help="Its last weights instead of the best on held-out rows.")
@click.option(
    "--rollouts", default=0, metavar="N", type=click.IntRange(0), help="Answers a row. [default: 64 without --time]"
)
@click.option("--time", "seconds", default="0", metavar="TEXT", help="Time for all of it: 60s, 5m.")
@click.option("--method", default="es", show_default=True, type=click.Choice(["es", "best-of"]), help="How to search.")
@click.option("--sigma-end", default=0.0, show_default=True, metavar="X", help="Last sigma, as a share of the first.")
@click.option("--enough", default=1.0, show_default=True, metavar="X", help="A row with this reward is done.")
@click.option(
    "--heuristic",
    default="",
    metavar="NAME|FILE.py",
    help="No row: evolve a program that solves bin-packing, salesman, or the problem of a file. The reflector writes, "
    "--rollouts counts its proposals.",
)
@click.option("--out", type=click.Path(path_type=Path), help="With --heuristic: a file for the best program.")
@json_option
def search(
    names: tuple[str, ...], count: int, apart: bool, tuned: Path | None, last: bool,
    rollouts: int, seconds: str, method: str, sigma_end: float, enough: float, heuristic: str, out: Path | None,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """More compute for a hard row: evolution strategies on it at test time, or best-of-n. Nothing is written.

    Pairs, sigma, lr and scope have defaults of their own here: 8, 0.08, 0.1 and adapter. Ctrl-C: the best so far.
    With --heuristic programs evolve instead, and temperature, max-tokens, context, scorer-timeout (of a program on all
    instances) are .8, 512, 4096, 20.
    """
    from edgees import config as settings
    from edgees import search as searching

    try:
        limit = settings.duration(seconds)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--time") from None
    require_together(heuristic)
    if heuristic:
        from edgees import heuristics

        with one_document(as_json) as document:
            evolved = heuristics.evolve(
                heuristic, given(flags), proposals=rollouts, seconds=limit, run=tuned,
                weights="last" if last else "best", out=out, say=progress_note,
            )  # fmt: skip
            document |= evolved.to_dict()
            for line in [] if as_json else heuristics.lines(evolved):
                click.echo(line)
        if evolved.interrupted:
            raise Interrupted("interrupted; above stands the best so far")
        return
    with one_document(as_json) as document:
        plan = searching.Plan(method, rollouts, limit, sigma_end, enough, apart)
        found = searching.search(
            given(flags), plan, rows=names, count=count, run=tuned, weights="last" if last else "best",
            say=progress_note,
        )  # fmt: skip
        document |= found.to_dict()
        for line in [] if as_json else searching.lines(found):
            click.echo(line)
    if found.interrupted:
        raise Interrupted("interrupted; above stands the best so far")


def require_together(heuristic: str) -> None:
    """Searches on rows and evolutions of programs have different options. :raises click.UsageError: one too many."""
    context = click.get_current_context()
    came = [p for p in context.command.get_params(context) if p.name and p.expose_value]
    default = click.core.ParameterSource.DEFAULT
    for param in came:
        name = str(param.name)
        if context.get_parameter_source(name) == default:
            continue
        if heuristic and name not in OF_HEURISTICS:
            raise click.UsageError(f"{param.opts[0]} has no meaning with --heuristic")
        if not heuristic and name in ("out", "reflector"):
            raise click.UsageError(f"{param.opts[0]} is of --heuristic")


@cli.command(name="eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--task", metavar="TEXT", help="Another task than the run's own.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=128,
    metavar="N",
    help="Held-out rows to use, first those that had no say in choosing the best weights; 0: all. [default: 128]",
)
@click.option("--last", is_flag=True, help="The last weights instead of the best on held-out rows.")
@json_option
def evaluate(run: Path, task: str | None, rows: int, last: bool, as_json: bool) -> None:
    """Base against tuned on held-out rows, from outside: exported, and run by plain llama.cpp on the CPU."""
    from edgees import evaluate as judging

    with one_document(as_json) as document:
        weights = "last" if last else "best"
        result = judging.evaluate(run, task=task, rows=rows, weights=weights, say=progress_note)
        document |= result
        for line in [] if as_json else judging.lines(result):
            click.echo(line)
    judging.require_agreement(result)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["gguf", "safetensors", "adapter"]), help="What to write.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder (gguf: or a file NAME.gguf).")
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    help="gguf: F32, F16, BF16, Q8_0 (default unless the base is of floats: what was scored, at half of F16), Q4_0, "
    "Q4_1, Q5_0, Q5_1, Q4_K_M and other K mixes (re-rounded: scored again, the loss is said), same. "
    "safetensors: BF16 (default), F16, F32, NF4 (bitsandbytes; re-rounded).",
)
@click.option("--last", is_flag=True, help="The last weights instead of the best on held-out rows.")
@click.option("--verify", is_flag=True, help="Load the result in plain llama.cpp and compare it with what was scored.")
@click.option(
    "--bake-context", is_flag=True, help="Put the context into the GGUF's chat template, as its default system prompt."
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@json_option
def export(
    run: Path,
    to: str,
    out: Path,
    type_name: str | None,
    last: bool,
    verify: bool,
    bake_context: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the tuned model: GGUF for llama.cpp, safetensors for Hugging Face, or a LoRA adapter (adapter scope)."""
    from edgees import export as exporting

    with one_document(as_json) as document:
        result = exporting.export(
            run, to, out, type_name=type_name, weights="last" if last else "best", force=force, verify=verify,
            bake=bake_context, say=progress_note,
        )  # fmt: skip
        document |= result
        for line in [] if as_json else exporting.lines(result):
            click.echo(line)
    exporting.require_verified(result)


def progress_note(text: str) -> None:
    """What is being done, for those who wait: to standard error."""
    click.echo(text, err=True)
