"""How a tuned model was asked when it was scored, as files that those who use it read.

    {"attempts": "majority:5", "temperature": 0.7, "max_tokens": 64, "tools": true, "system": "..."}

stands in a run's journal (header) and goes with every export, the context in force put in (:func:`in_context`): as
``recommended.json``, and in the form that each kind of program takes: Ollama's Modelfile beside a GGUF,
``generation_config.json`` beside safetensors. No program makes several attempts by itself, so these are told in words.
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
"""attempts, temperature, max_tokens, tools, system, perhaps grammar (GBNF, or of what an environment lists: actions,
tools), perhaps examples (messages that stand before the question); empty for a run begun before it was recorded."""
_GREEDY_HAS_NOT = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def told(found: Recommended) -> str:
    """In words."""
    words = parse(found["attempts"]).told(found["temperature"])
    return words + (", replies held to a grammar" if found.get("grammar") else "")


def in_context(found: Recommended, context: Context) -> Recommended:
    """The same with a context's system message, notes and examples."""
    if not found:
        return found
    system = found["system"] if context.system is None else context.system
    said = context.apply([{"role": "system", "content": system}] if system else [])
    head = said.pop(0)["content"] if said and said[0]["role"] == "system" else system
    return {**found, "system": head, **({"examples": said} if said else {})}


def documents(found: Recommended, to: str, gguf: str | None, context: Context = NOTHING) -> dict[str, str]:
    """File name -> text of what lies beside an export. gguf: name of the GGUF file that is exported, after which these
    are named, as others may lie in the same folder. context: the one it was scored in."""
    stem = f"{Path(gguf).stem}." if gguf else ""
    found, made = in_context(found, context), {}
    if found:
        text = json.dumps({**found, "about": told(found)}, ensure_ascii=False, indent=2)
        made[f"{stem}recommended.json"] = text + "\n"
    if not context.empty:
        made[f"{stem}context.json"] = json.dumps(context.to_dict(), ensure_ascii=False, indent=1) + "\n"
    if found and to == "gguf" and gguf:
        made[f"{stem}Modelfile"] = modelfile(found, gguf)
    return made


def before(found: Recommended, context: Context) -> list[Message]:
    """The messages that stood before every question: the system message with the notes in it, and the examples."""
    asked = in_context({"system": None, **found}, context)
    return [*([{"role": "system", "content": asked["system"]}] if asked["system"] else []), *asked.get("examples", ())]


def baked(template: str, messages: Sequence[Message]) -> str:
    """A chat template that puts these before conversations that bring no system message of their own."""
    said = ", ".join(
        f'{{"role": {_literal(m["role"])}, "content": {_literal(m.get("content") or "")}}}' for m in messages
    )
    # The line end goes with the block before it, so that the template begins as it would alone.
    return (
        "{%- if not messages or messages[0]['role'] not in ['system', 'developer'] -%}"
        f"{{%- set messages = [{said}] + messages -%}}{{%- endif %}}\n{template}"
    )


def _literal(text: str) -> str:
    """A string of Jinja's, with no escapes but those that every implementation of it knows (llama.cpp's has no \\u)."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def modelfile(found: Recommended, gguf: str) -> str:
    """For ``ollama create NAME -f FILE``."""
    lines = [f"# scored with {told(found)}", f"FROM ./{gguf}", f"PARAMETER temperature {found['temperature']:g}"]
    lines.append("PARAMETER repeat_penalty 1")  # Ollama's own is 1.1, also where decoding is greedy
    if found["temperature"]:
        lines += ["PARAMETER top_k 0", "PARAMETER top_p 1", "PARAMETER min_p 0"]
    lines.append(f"PARAMETER num_predict {found['max_tokens']}")
    said: list[Message] = [{"role": "system", "content": found["system"]}] if found["system"] else []
    said += found.get("examples", [])
    if all(_sayable(message) for message in said):
        for message in said:
            word = "SYSTEM" if message["role"] == "system" else f"MESSAGE {message['role']}"
            lines.append(f'{word} """{message["content"]}"""')
    else:
        lines.append("# what stands before a question cannot be written here (quotes, or calls of tools): see the JSON")
    return "\n".join(lines) + "\n"


def _sayable(message: Message) -> bool:
    """Whether a Modelfile can hold it: text between three quotes."""
    text = message.get("content")
    plain = isinstance(text, str) and '"""' not in text and not text.endswith('"')
    return plain and set(message) == {"role", "content"}


def generation_config(found: Recommended, base: Mapping[str, Any]) -> dict[str, Any]:
    """A base's ``generation_config.json`` with the recommended way of sampling, which is from the whole distribution.

    The base's own values for what greedy decoding has not are left out: transformers warns of them.
    """
    out = {key: value for key, value in base.items() if key not in _GREEDY_HAS_NOT}
    out |= {"do_sample": bool(found["temperature"]), "max_new_tokens": found["max_tokens"]}
    if found["temperature"]:
        out |= {"temperature": found["temperature"], "top_k": 0, "top_p": 1.0}
    return out
