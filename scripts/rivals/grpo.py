"""TRL's GRPOTrainer with a LoRA adapter on all linears (peft): groups of 8, sampled at temperature 1."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from shared import Budget, Found, Work, mean, peak_rss_bytes
from torch_model import TorchModel
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 8
PROMPTS = 4
"""Prompts, and so groups, of an optimizer step; one group at a time goes through the model (memory)."""
RATE, RANK, ALPHA = 2e-4, 16, 32


class Stop(TrainerCallback):  # type: ignore[misc]  # transformers comes without types here
    """Ends training with the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.budget = Budget(seconds)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.budget = Budget(self.seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.budget.step()
        control.should_training_stop = self.budget.over()


def train(work: Work) -> Found:
    model = TorchModel(work.model, work.task, torch.bfloat16)  # peft keeps the adapter in float32
    stop = Stop(work.seconds)
    rollouts = tokens = 0
    curve: list[tuple[float, float]] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, row: Any, **_: Any) -> list[float | None]:
        nonlocal rollouts, tokens
        texts = [completion[0]["content"] for completion in completions]
        scores = work.scorer.score([work.task.train[index] for index in row], texts).rewards
        rollouts += len(texts)
        tokens += sum(map(len, completion_ids))
        curve.append((stop.budget.elapsed(), mean(scores)))
        return [value if value == value else None for value in scores]

    rows = [{"prompt": work.task.conversation(row), "row": index} for index, row in enumerate(work.task.train)]
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=1_000_000,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=PROMPTS,
            num_generations=GROUP,
            max_completion_length=work.task.max_tokens,
            gradient_checkpointing=False,  # the time is what is short here
            bf16=False,
            use_cpu=True,
            seed=work.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=model.model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=model.tokenizer,
            peft_config=lora,
            callbacks=[stop],
        )
        trainer.train()
        seconds, peak = stop.budget.elapsed(), peak_rss_bytes()
    model.model = trainer.model.float().merge_and_unload()
    after, eval_seconds, eval_tokens = model.heldout(work)
    told = {
        "group": GROUP, "prompts": PROMPTS, "rate": RATE, "schedule": "constant", "rank": RANK, "alpha": ALPHA,
        "linears": "all", "loss": str(settings.loss_type), "beta": settings.beta, "temperature": settings.temperature,
        "dtype": "bfloat16, adapter float32",
    }  # fmt: skip
    steps = stop.budget.steps
    return Found(after, peak, told, seconds, eval_seconds, eval_tokens, steps, rollouts, tokens, curve)
