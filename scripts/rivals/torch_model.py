"""A Hugging Face folder in torch on the CPU: prompts, greedy answers, held-out scores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from shared import Found, Work, judge, peak_rss_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgees.tasks.rows import Row, Task

BATCH = 32
"""Held-out rows answered at once."""


class TorchModel:
    """The model with its tokenizer. ``answered`` and ``tokens`` count what :meth:`answers` made."""

    def __init__(self, folder: str, task: Task, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.task = task
        self.answered = self.tokens = 0

    @torch.no_grad()
    def answers(self, rows: Sequence[Row]) -> list[str]:
        """Greedy answers to ``rows``, all at once; special tokens are no part of them."""
        texts = [
            self.tokenizer.apply_chat_template(self.task.conversation(row), tokenize=False, add_generation_prompt=True)
            for row in rows
        ]
        given = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        made = self.model.generate(
            **given, max_new_tokens=self.task.max_tokens, do_sample=False, pad_token_id=end, eos_token_id=end
        )[:, given["input_ids"].shape[1] :]
        self.answered += len(rows)
        self.tokens += int((made != end).sum())  # the end of the turn, which also pads, is not counted
        return list(self.tokenizer.batch_decode(made, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def heldout(self, work: Work) -> tuple[dict[str, Any], float, int]:
        """(scores of all held-out rows, seconds, tokens made). In float32, whatever training computed in."""
        self.model.float().eval()
        start, before = time.monotonic(), self.tokens
        rows = sorted(work.task.heldout, key=lambda row: len(row.messages[-1]["content"]))  # less padding
        texts = [text for at in range(0, len(rows), BATCH) for text in self.answers(rows[at : at + BATCH])]
        return judge(work.task, work.scorer, rows, texts), time.monotonic() - start, self.tokens - before


def untrained(work: Work) -> Found:
    """The base, as all torch rivals begin."""
    model = TorchModel(work.model, work.task)
    after, seconds, tokens = model.heldout(work)
    return Found(after, peak_rss_bytes(), {"eval_dtype": "float32"}, eval_seconds=seconds, eval_tokens=tokens)
