"""Script of the template child: renders chat templates in Jinja's sandbox under a memory limit.

Requests: {"op": "load", "id", "source"} and {"op": "render", "id", "variables", "now"}.
Answers: {"text"} or {"error", "kind": "template" | "memory" | "security", "line"}.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import protocol  # type: ignore[import-not-found]

sys.path.pop(0)

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: training masks in Hugging Face templates; only the body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, except that reaching for an internal stops at once instead of becoming an empty string."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is refused")


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build(clock: list[str]) -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])

    def strftime_now(form: str) -> str:
        now = datetime.fromisoformat(clock[0]) if clock[0] else datetime.now()
        return now.strftime(form)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def main() -> None:
    options = json.loads(sys.argv[1])
    clock = [""]
    environment = build(clock)
    environment.from_string("{{ messages }}").render(messages=[])  # lazy imports happen before memory is limited
    templates: dict[str, jinja2.Template] = {}
    protocol.limit(int(options["memory"]))
    largest = int(options["largest"])

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "load":
                if len(templates) >= 64:
                    templates.clear()
                templates[request["id"]] = environment.from_string(request["source"])
                return {}
            if request["id"] not in templates:
                return {"unknown": True}
            clock[0] = request["now"]
            text = templates[request["id"]].render(**request["variables"])
            if len(text) > largest:
                return {"error": f"the rendered text has {len(text):,} characters", "kind": "memory"}
            json.dumps(text)  # a second copy must fit as well, while failing is still an answer
            return {"text": text}
        except (MemoryError, OverflowError) as error:
            return {"error": str(error) or "out of memory", "kind": "memory"}
        except SecurityError as error:
            return {"error": str(error), "kind": "security"}
        except jinja2.TemplateSyntaxError as error:
            return {"error": str(error.message), "kind": "syntax", "line": error.lineno}
        except RecursionError:
            return {"error": "nested too deeply", "kind": "memory"}
        except Exception as error:  # whatever a template can provoke in a filter
            return {"error": f"{error}", "type": type(error).__name__, "kind": "template"}

    protocol.serve(handle, traced=False)


main()
