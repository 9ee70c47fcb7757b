"""How a tuned model was asked when it was scored, as files that those who use it read.

    {"attempts": "majority:5", "temperature": 0.7, "max_tokens": 64, "tools": true, "system": "..."}

stands in a run's journal (header) and goes with every export: as ``recommended.json``, and in the form that each kind
of program takes: Ollama's Modelfile beside a GGUF, ``generation_config.json`` beside safetensors. No program makes
several attempts by itself, so these are told in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgees.attempts import parse
from edgees.context import Context
from edgees.episodes import Message

NOTHING = Context()
Recommended = Mapping[str, Any]
"""attempts, temperature, max_tokens, tools, system; empty for a run that was begun before it was recorded."""
_GREEDY_HAS_NOT = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def told(found: Recommended) -> str:
    """In words."""
    return parse(found["attempts"]).told(found["temperature"])


def documents(found: Recommended, to: str, gguf: str | None, context: Context = NOTHING) -> dict[str, str]:
    """File name -> text of what lies beside an export. gguf: name of the GGUF file that is exported, after which these
    are named, as others may lie in the same folder. context: the one it was scored in."""
    stem = f"{Path(gguf).stem}." if gguf else ""
    made = {}
    if found:
        text = json.dumps({**found, "about": told(found)}, ensure_ascii=False, indent=2)
        made[f"{stem}recommended.json"] = text + "\n"
    if not context.empty:
        made[f"{stem}context.json"] = json.dumps(context.to_dict(), ensure_ascii=False, indent=1) + "\n"
    if found and to == "gguf" and gguf:
        made[f"{stem}Modelfile"] = modelfile(found, gguf, context)
    return made


def before(found: Recommended, context: Context = NOTHING) -> list[Message]:
    """The messages that stood before every question: the system message with the notes in it, and the examples."""
    system = found.get("system") if context.system is None else context.system
    return context.apply([{"role": "system", "content": system}] if system else [])


def baked(template: str, messages: Sequence[Message]) -> str:
    """A chat template that puts these before conversations that bring no system message of their own."""
    said = json.dumps([{"role": m["role"], "content": m.get("content") or ""} for m in messages], ensure_ascii=True)
    # Jinja reads JSON's strings as they are, but for what it would take for the end of a block.
    said = said.replace("%", "\\u0025").replace("{{", "{ {").replace("}}", "} }").replace("{#", "{ #")
    return (
        "{%- if not messages or messages[0]['role'] not in ['system', 'developer'] -%}"
        "{%- set messages = " + said + " + messages -%}{%- endif -%}" + template
    )


def modelfile(found: Recommended, gguf: str, context: Context = NOTHING) -> str:
    """For ``ollama create NAME -f FILE``."""
    lines = [f"# scored with {told(found)}", f"FROM ./{gguf}", f"PARAMETER temperature {found['temperature']:g}"]
    lines.append("PARAMETER repeat_penalty 1")  # Ollama's own is 1.1, also where decoding is greedy
    if found["temperature"]:
        lines += ["PARAMETER top_k 0", "PARAMETER top_p 1", "PARAMETER min_p 0"]
    lines.append(f"PARAMETER num_predict {found['max_tokens']}")
    for message in before(found, context):
        role, text = message["role"], message.get("content")
        if role not in ("system", "user", "assistant") or not text or message.get("tool_calls"):
            lines.append(f"# a message of an example that cannot stand here ({role}): see context.json")
        elif '"""' in text:
            lines.append(f"# a message ({role}) with quotes that cannot stand here: see recommended.json, context.json")
        else:
            lines.append(f'{"SYSTEM" if role == "system" else f"MESSAGE {role}"} """{text}"""')
    return "\n".join(lines) + "\n"


def generation_config(found: Recommended, base: Mapping[str, Any]) -> dict[str, Any]:
    """A base's ``generation_config.json`` with the recommended way of sampling, which is from the whole distribution.

    The base's own values for what greedy decoding has not are left out: transformers warns of them.
    """
    out = {key: value for key, value in base.items() if key not in _GREEDY_HAS_NOT}
    out |= {"do_sample": bool(found["temperature"]), "max_new_tokens": found["max_tokens"]}
    if found["temperature"]:
        out |= {"temperature": found["temperature"], "top_k": 0, "top_p": 1.0}
    return out
