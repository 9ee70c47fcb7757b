"""A home assistant on the package openai. It knows nothing of edgees: python agent.py answers one request from
standard input through whatever OPENAI_BASE_URL points to.
"""

import json
import sys

from openai import OpenAI

SYSTEM = 'Turn each request into JSON: {"device": "light, heat, blind, music or fan", "room": "...", "state": "..."}'
SHOTS = (
    ("please open the den blinds", {"device": "blind", "room": "den", "state": "open"}),
    ("i want the gym at 21 degrees", {"device": "heat", "room": "gym", "state": 21}),
)
TRIES = 2


def main():
    task = json.load(sys.stdin)
    client = OpenAI(max_retries=5)
    messages = [{"role": "system", "content": SYSTEM}]
    for request, call in SHOTS:
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": json.dumps(call)}]
    messages.append({"role": "user", "content": task["prompt"]})
    text = ""
    for _ in range(TRIES):
        reply = client.chat.completions.create(model="home", messages=messages, max_tokens=32)
        text = reply.choices[0].message.content or ""
        try:
            call = json.loads(text)
            missing = {"device", "room", "state"} - set(call)
        except (ValueError, TypeError):
            missing = {"device", "room", "state"}
        if not missing:
            break
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"That lacks {', '.join(sorted(missing))}. Answer with the JSON object only."},
        ]
    print(text)


if __name__ == "__main__":
    main()
