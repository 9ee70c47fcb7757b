"""An agent with the standard library alone: two questions, the second about the answer to the first."""

from __future__ import annotations

import http.client
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit


def request(url: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    connection.request("POST", parts.path, json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def ask(text: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    connection, response = request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer['error']['message']}")
    return str(answer["choices"][0]["message"]["content"])


def pay(reward: Any) -> int:
    connection, response = request(os.environ["EDGEES_REWARD_URL"], {"reward": reward, "part": 2})
    response.read()
    connection.close()
    return response.status


if __name__ == "__main__":
    row = json.load(sys.stdin)
    first = ask(row["question"])
    second = ask(f"and {first}?")
    print("thinking\n")
    print(json.dumps({"reward": len(second) / 100, "letters": len(first), "answer": second}))
