"""An agent as most are written: a stock client that finds everything in its environment."""

from __future__ import annotations

import json
import os

import openai

row = json.loads(os.environ["EDGEES_TASK"])
with openai.OpenAI() as client:
    answer = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": row["question"]}], temperature=1.0
    )
print(json.dumps({"reward": 1.0, "answer": answer.choices[0].message.content}))
