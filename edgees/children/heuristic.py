"""Script of the heuristics child: reads programs that a model wrote, checks them, and scores them on instances.

Options: {"file": the problem (bin_packing.py is one), "seed": of its instances, "memory": bytes a program may take}.
Requests: {"op": "problem"}; {"op": "read", "text"}; {"op": "score", "code", "heldout"}, once a process.
Answers: {"function", "signature", "about", "first": [[label, code]]}, {"code"} or {"refused": words}, {"costs"} or
{"fault": words}; to all {"error", "where"} where the problem itself fails.

A program may use a few names and what a list of modules offers, all of it copies: nothing with an underscore before
it, no attribute set, no class, no way to a file, a socket or another module that the author of this knows of. That is
a check of code, not a wall between machines: this process holds nothing but the instances, lives for one program,
opens no file and has a deadline and bounded memory. Comments, annotations and docstrings are left out.
"""

from __future__ import annotations

import ast
import bisect
import collections
import contextlib
import functools
import heapq
import inspect
import itertools
import json
import math
import os
import sys
import textwrap
import traceback
import types
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
sys.path.insert(0, _HERE)
import protocol  # type: ignore[import-not-found]  # noqa: E402
import score  # type: ignore[import-not-found]  # noqa: E402

sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
del sys.modules["score"]  # a likely name for a module of the user's

LONGEST = 8000
"""Characters of a program."""
FILE = "<program>"
MODULES: dict[str, dict[str, Any]] = {
    "math": {name: value for name, value in vars(math).items() if not name.startswith("_")},
    "itertools": {name: value for name, value in vars(itertools).items() if not name.startswith("_")},
    "heapq": {name: getattr(heapq, name) for name in heapq.__all__},
    "bisect": {name: getattr(bisect, name) for name in ("bisect", "bisect_left", "bisect_right", "insort")},
    "collections": {name: getattr(collections, name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "functools": {name: getattr(functools, name) for name in ("cmp_to_key", "lru_cache", "partial", "reduce")},
}
BUILTINS = [
    "abs", "all", "any", "bin", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "hash", "int", "isinstance", "iter", "len", "list", "map", "max", "min", "next", "pow", "range", "repr", "reversed",
    "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip", "Exception", "ArithmeticError", "AssertionError",
    "IndexError", "KeyError", "LookupError", "OverflowError", "StopIteration", "TypeError", "ValueError",
    "ZeroDivisionError",
]  # fmt: skip
_INNER = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_")
_LEFT_OUT = ("typing", "__future__")
_UNUSED = (ast.ClassDef, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.MatchClass)


class Refused(Exception):
    """What is wrong with a program, in words."""


class _Bare(ast.NodeTransformer):
    """Without annotations, docstrings and imports of ``typing``."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value else ast.Pass()

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        node.names = [name for name in node.names if name.name not in _LEFT_OUT]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in _LEFT_OUT else node


def read(text: str, function: str) -> str:
    """The program in a text: imports, functions, constants. :raises Refused: it cannot be read, or may not be run."""
    if len(text) > LONGEST:
        raise Refused(f"it has {len(text):,} characters, more than {LONGEST:,}")
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        raise Refused(f"it is not Python: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"it is not Python: {error or 'nested too deeply'}") from None
    try:
        kept = [statement for statement in tree.body if not _idle(statement)]
        for statement in kept:
            if not isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign)):
                raise Refused(f"it is more than functions, constants and imports (line {statement.lineno})")
        if not any(isinstance(statement, ast.FunctionDef) and statement.name == function for statement in kept):
            raise Refused(f"it has no function {function}")
        bare = ast.fix_missing_locations(_Bare().visit(ast.Module(kept, [])))
        for node in ast.walk(bare):
            _check(node)
        code = ast.unparse(bare)
        compile(code, FILE, "exec")
    except (SyntaxError, ValueError) as error:
        raise Refused(f"it is not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise Refused("it is nested too deeply") from None
    return code + "\n"


def _idle(node: ast.stmt) -> bool:
    """What a program may have beside itself, such as an example of its use."""
    if isinstance(node, ast.If):
        return "__name__" in ast.dump(node.test)
    return isinstance(node, (ast.Expr, ast.Pass))


def _check(node: ast.AST) -> None:
    line = f" (line {node.lineno})" if hasattr(node, "lineno") else ""
    if isinstance(node, _UNUSED):
        raise Refused(f"functions alone are needed, and there is {type(node).__name__}{line}")
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or "."] if not node.level else ["."]
    for module in modules:
        if module not in MODULES:
            raise Refused(f"it imports {module}; there are {', '.join(MODULES)}{line}")
    if isinstance(node, ast.Attribute):
        if node.attr.startswith(_INNER):
            raise Refused(f"it uses the attribute {node.attr}{line}")
        if not isinstance(node.ctx, ast.Load):
            raise Refused(f"it sets the attribute {node.attr}{line}")
    for field in ("id", "name", "arg", "asname", "names", "rest"):
        value = getattr(node, field, None)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.startswith("__"):
                raise Refused(f"it uses the name {name}{line}")


def _modules() -> dict[str, types.ModuleType]:
    found = {}
    for name, content in MODULES.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(content)
    return found


def _globals() -> dict[str, Any]:
    """What a program finds: made anew for each instance, so that it knows nothing of the one before."""
    modules = _modules()

    def load(name: str, *_: Any) -> Any:
        if name not in modules:
            raise ImportError(f"there is no module {name}")
        return modules[name]

    own = vars(__import__("builtins"))
    return {"__builtins__": {**{name: own[name] for name in BUILTINS}, "__import__": load}, "__name__": "program"}


def costs_of(code: str, function: str, cost: Any, instances: Any) -> dict[str, Any]:
    """{"costs": [...]}, or {"fault": words} for the first instance that the program fails on."""
    compiled = compile(code, FILE, "exec")
    costs = []
    try:
        for instance in instances:
            names = _globals()
            exec(compiled, names)
            costs.append(float(cost(names[function], instance)))
            if not math.isfinite(costs[-1]):
                return {"fault": f"its cost is {costs[-1]}"}
    except MemoryError:
        return {"fault": "out of memory"}
    except BaseException as error:
        try:
            own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
            words = " ".join(str(error)[:300].split())
            where = f" (line {own[-1]})" if own else ""
            return {"fault": f"{type(error).__name__}: {words}{where}"}
        except MemoryError:
            return {"fault": "out of memory"}
    return {"costs": costs}


def described(module: types.ModuleType) -> dict[str, Any]:
    """What a problem says of itself. :raises ValueError: it lacks something."""
    about = inspect.getdoc(module)
    heuristics = getattr(module, "HEURISTICS", None)
    missing = [name for name in ("instances", "cost") if not callable(getattr(module, name, None))]
    if missing or not isinstance(heuristics, dict) or not heuristics:
        what = ", ".join([*missing, *([] if isinstance(heuristics, dict) and heuristics else ["HEURISTICS"])])
        raise ValueError(f"a problem has functions instances and cost and a dict HEURISTICS; missing: {what}")
    if not about:
        raise ValueError("a problem says what it is about in a docstring of the file")
    trees = []
    for label, heuristic in heuristics.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(heuristic))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise ValueError(f"HEURISTICS[{label!r}] is not a function that was written with def")
        trees.append((str(label), tree))
    first = trees[0][1]
    documentation = ast.get_docstring(first)
    if not documentation:
        raise ValueError(f"{first.name}, the first of HEURISTICS, has no docstring")
    signature = ast.unparse(ast.FunctionDef(first.name, first.args, [ast.Pass()], [], first.returns, lineno=1))
    programs = []
    for label, tree in trees:
        tree.name, tree.decorator_list = first.name, []
        try:
            programs.append([label, read(ast.unparse(tree), first.name)])
        except Refused as error:
            raise ValueError(f"HEURISTICS[{label!r}] must run where programs run: {error}") from None
    return {
        "function": first.name, "signature": signature.splitlines()[0], "documentation": documentation, "about": about,
        "first": programs,
    }  # fmt: skip


def confine(memory: int) -> None:
    """Memory bounded, and no file opened or grown from here on."""
    protocol.limit(memory)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
            resource.setrlimit(kind, (0, resource.getrlimit(kind)[1]))


def main() -> None:
    options = json.loads(sys.argv[1])
    loaded: list[types.ModuleType] = []

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if not loaded:
                loaded.append(score.load_file(options["file"]))
            if request["op"] == "problem":
                return described(loaded[0])
            if request["op"] == "read":
                return {"code": read(request["text"], request["function"])}
            instances = list(loaded[0].instances(int(options["seed"]), bool(request["heldout"])))
            if not instances:
                raise ValueError("instances() gave none")
        except Refused as refused:
            return {"refused": str(refused)}
        except BaseException as error:  # SystemExit too: it must not end the loop
            failed: dict[str, Any] = score.failure(error, options["file"])
            return failed
        confine(int(options["memory"]))
        return costs_of(request["code"], request["function"], loaded[0].cost, instances)

    protocol.serve(handle)


if __name__ == "__main__":
    main()
