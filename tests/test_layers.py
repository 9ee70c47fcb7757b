"""The import graph of edgees/: layers kept, no cycles, torch and llama_cpp only where they belong; the README's tree.

All imports count, also those inside functions and ``importlib.import_module("...")``; only imports under
``if TYPE_CHECKING:`` are exempt.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module imports only from rows above its own; modules in a row do not import each other. A name that is a package
# (tasks) is one unit: its modules may import each other, but not in a circle.
ROWS: list[list[str]] = [
    ["__init__", "attempts", "backends/__init__", "errors"],
    ["backends/grammar", "children", "config", "cuda", "examples", "model_path", "native", "stopping"],
    ["blocks", "episodes", "gguf_file", "hf_layout", "noise", "template", "tools"],
    ["nf4"],
    ["backends/base", "hf_files"],
    ["backends/streams", "delta", "gguf_from_hf", "ops"],
    ["backends/llamacpp", "backends/torch_nf4", "backends/toy"],
    ["context", "population", "tasks"],
    ["endpoint", "evolve", "recommend"],
    ["agents"],
    ["rollout"],
    ["rewards"],
    ["trials", "update"],
    ["history"],
    ["checkpoint"],
    ["merge", "moments"],
    ["evolve"],
    ["opening", "report", "watch"],
    ["evaluate", "forgetting", "probe", "programs", "proposing"],
    ["export"],
    ["tune"],
    ["doctor", "estimate", "heuristics", "search", "serve"],
    ["cli"],
    ["__main__"],
]
ONLY_IN = {
    "torch": {"ops", "backends/torch_nf4"},
    "bitsandbytes": {"ops", "backends/torch_nf4"},
    "transformers": {"backends/torch_nf4"},
    "llama_cpp": {"backends/llamacpp"},
}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the bodies of ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield node
        yield from runtime_nodes(node)


def imported(path: Path, root: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that ``path`` imports at run time; ``from a import b`` gives a.b."""
    package = ("edgees", *path.relative_to(root / "edgees").parent.parts)
    for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
            yield from ((arg.value, node.lineno) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def module_file(dotted: str, root: Path) -> Path | None:
    """The file of edgees/ that ``edgees.a.b`` names; the tail may be an attribute of a module."""
    parts = dotted.split(".")
    for stem in (root.joinpath(*parts), root.joinpath(*parts[:-1])) if parts[0] == "edgees" else ():
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file() and path.is_relative_to(root / "edgees"):
                return path
    return None


def unit(path: Path, root: Path) -> str:
    """``backends/base`` for edgees/backends/base.py, ``tasks`` for any file below edgees/tasks/."""
    parts = path.relative_to(root / "edgees").with_suffix("").parts
    known = {name for row in ROWS for name in row}
    for length in range(1, len(parts)):
        if "/".join(parts[:length]) in known:
            return "/".join(parts[:length])
    return "/".join(parts)


def faults(root: Path) -> list[str]:
    """What breaks the rules in ``root``/edgees, one line each; empty when all is well."""
    found: list[str] = []
    row_of = {name: index for index, row in enumerate(ROWS) for name in row}
    graph: dict[Path, set[Path]] = {}
    for path in sorted((root / "edgees").rglob("*.py")):
        here = unit(path, root)
        graph[path] = set()
        if here not in row_of:
            found.append(f"{path.relative_to(root)}: not in the table of rows")
            continue
        for dotted, line in imported(path, root):
            place = f"{path.relative_to(root)}:{line}"
            top = dotted.split(".")[0]
            if here not in ONLY_IN.get(top, {here}):
                found.append(f"{place}: {top} may be imported only in {', '.join(sorted(ONLY_IN[top]))}")
            target = module_file(dotted, root)
            if target is None:
                if top == "edgees":
                    found.append(f"{place}: there is no module {dotted}")
                continue
            there = unit(target, root)
            if target != path:
                graph[path].add(target)
            if there != here and there in row_of and row_of[there] >= row_of[here]:
                found.append(f"{place}: {here} (row {row_of[here]}) imports {there} (row {row_of[there]})")
    return found + ["cycle: " + " -> ".join(str(path.relative_to(root)) for path in cycle) for cycle in cycles(graph)]


def cycles(graph: dict[Path, set[Path]]) -> list[list[Path]]:
    """One cycle for each back edge of a depth-first walk."""
    found: list[list[Path]] = []
    done: set[Path] = set()

    def walk(node: Path, trail: list[Path]) -> None:
        if node in trail:
            found.append([*trail[trail.index(node) :], node])
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                walk(other, [*trail, node])
            done.add(node)

    for node in sorted(graph):
        walk(node, [])
    return found


def tree_of(readme: str) -> dict[str, str]:
    """{path: comment} of the README's tree: the ``text`` block with a line ``edgees/``; two blanks a level."""
    block = next((b for b in re.findall(r"```text\n(.*?)```", readme, re.S) if re.search(r"^edgees/", b, re.M)), "")
    files: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        match = re.fullmatch(r"( *)(\S+)(?: +(\S.*))?", line)
        if match is None:
            continue
        del folders[len(match[1]) // 2 :]
        if match[2].endswith("/"):
            folders.append(match[2])
            if match[3] and "".join(folders).startswith("edgees/examples/"):  # one line says it all
                files["".join(folders)] = match[3]
        else:
            files["".join(folders) + match[2]] = match[3] or ""
    return files


def source_files(root: Path) -> set[str]:
    """Files of edgees/ and csrc/ that are source: no caches, no compiled things."""
    return {
        re.sub(r"^(edgees/examples/[^/]+/).+", r"\1", path.relative_to(root).as_posix())
        for folder in ("edgees", "csrc")
        for path in (root / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in {".so", ".o", ".pyc", ".pyd", ".dylib", ".dll"}
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }


def test_imports_keep_to_the_layers() -> None:
    assert faults(ROOT) == []


def test_readme_lists_every_file() -> None:
    tree = tree_of((ROOT / "README.md").read_text(encoding="utf-8"))
    there = source_files(ROOT)
    listed = {path for path in tree if path.startswith(("edgees/", "csrc/"))}
    assert there - listed == set(), "files without a line in the README's tree"
    assert listed - there == set(), "lines of the README's tree without a file"
    assert [path for path, comment in tree.items() if not comment] == [], "a line per file says what it is for"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"native.py": "from edgees.errors import EdgeesError"}, None),
        ({"native.py": "from edgees import __version__\nimport edgees.errors"}, None),
        ({"errors.py": "from edgees.native import lib"}, "edgees/errors.py:1: errors (row 0) imports native (row 1)"),
        ({"errors.py": "from edgees import native"}, "edgees/errors.py:1: errors (row 0) imports native (row 1)"),
        ({"errors.py": "from . import native"}, "edgees/errors.py:1: errors (row 0) imports native (row 1)"),
        ({"errors.py": "def f():\n    import edgees.native"}, "edgees/errors.py:2: errors (row 0) imports native"),
        ({"config.py": "import edgees.native"}, "edgees/config.py:1: config (row 1) imports native (row 1)"),
        (
            {"config.py": "import importlib\nimportlib.import_module('edgees.cli')"},
            "edgees/config.py:2: config (row 1)",
        ),
        (
            {"backends/base.py": "from ..cli import main"},
            "edgees/backends/base.py:1: backends/base (row 4) imports cli",
        ),
        ({"native.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from edgees.cli import main"}, None),
        (
            {"native.py": "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import edgees.cli"},
            "edgees/native.py:5: native (row 1) imports cli",
        ),
        ({"cli.py": "def f():\n    import torch.nn"}, "edgees/cli.py:2: torch may be imported only in"),
        ({"cli.py": "from llama_cpp import llama_cpp"}, "edgees/cli.py:1: llama_cpp may be imported only in"),
        ({"backends/llamacpp.py": "import llama_cpp"}, None),
        ({"surprise.py": ""}, "edgees/surprise.py: not in the table of rows"),
        (
            {"cli.py": "from edgees.nowhere.at_all import x"},
            "edgees/cli.py:1: there is no module edgees.nowhere.at_all.x",
        ),
        ({"tasks/a.py": "from edgees.tasks import b", "tasks/b.py": "from edgees.errors import X"}, None),
        (
            {"tasks/a.py": "from edgees.tasks import b", "tasks/b.py": "from edgees.tasks.a import x"},
            "cycle: edgees/tasks/a.py -> edgees/tasks/b.py -> edgees/tasks/a.py",
        ),
    ],
)
def test_a_broken_tree_is_caught(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    modules = ("__init__", "errors", "native", "cli", "backends/__init__", "backends/base", "tasks/__init__")
    for name, text in {**{f"{module}.py": "" for module in modules}, **files}.items():
        path = tmp_path / "edgees" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = faults(tmp_path)
    if expected is None:
        assert found == []
    else:
        assert any(line.startswith(expected) for line in found), found


def test_the_readme_tree_is_read() -> None:
    tree = "edgees/\n  a.py      one\n  sub/      folder\n    b.py    two\ncsrc/\n  c.h\n"
    readme = f"# x\n```text\nnothing\n```\n```text\n{tree}```\n"
    assert tree_of(readme) == {"edgees/a.py": "one", "edgees/sub/b.py": "two", "csrc/c.h": ""}
