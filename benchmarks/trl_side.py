"""TRL's GRPOTrainer on the same task; runs in TRL's own environment (see end_to_end.py).

    python benchmarks/trl_side.py SETTINGS.json

Writes one JSON line ``{"step": 0}`` just before the first rollout and ``{"step": k, "reward": mean}`` after the updates
of rollout k, as megatron_dppo's ``metrics.jsonl`` does; with held-out prompts also their greedy ``accuracy``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Recorder(TrainerCallback):
    """One line for each rollout."""

    def __init__(self, settings: dict[str, Any], tokenizer: Any, reward: Any) -> None:
        self._path, self._updates = Path(settings["metrics"]), settings["updates_per_rollout"]
        self._held_out, self._every = settings["held_out"], settings["eval_every"]
        self._tokenizer = tokenizer
        self._reward = reward
        self._limit = settings["max_new_tokens"]

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the start: everything is loaded and the first rollout follows."""
        self._write({"step": 0})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
        """Record the metrics, which the trainer logs after the last update of a rollout."""
        if "reward" in logs and state.is_world_process_zero:
            extra = {key: logs[key] for key in ("completions/mean_length", "grad_norm") if key in logs}
            step = state.global_step // self._updates
            if self._held_out and step % self._every == 0:
                extra["accuracy"] = self._accuracy(more["model"])
            self._write({"step": step, "reward": logs["reward"], **extra})

    @torch.no_grad()
    def _accuracy(self, model: Any) -> float:
        """Return the mean score of greedy answers to the held-out prompts."""
        texts = [row["prompt"] for row in self._held_out]
        batch = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.autocast("cpu", torch.bfloat16):
            ids = model.generate(**batch, max_new_tokens=self._limit, do_sample=False)
        answers = self._tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = self._reward(prompts=texts, completions=answers, label=[row["label"] for row in self._held_out])
        return sum(scores) / len(scores)


def main() -> None:
    """Train until the parent process has seen enough."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["base"])
    updates, samples = settings["updates_per_rollout"], settings["samples_per_prompt"]
    module, _, function = settings["reward"].partition(":")
    reward = getattr(importlib.import_module(module), function)
    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        seed=settings["seed"],
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa", **settings["model"]},
        per_device_train_batch_size=settings["prompts_per_step"] * samples // updates,
        steps_per_generation=updates,
        max_steps=settings["num_steps"] * updates,
        logging_steps=updates,
        num_generations=samples,
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        **{"bf16": False, **settings["grpo"]},
    )
    GRPOTrainer(
        model=settings["base"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(settings["prompts"]),
        processing_class=tokenizer,
        callbacks=[Recorder(settings, tokenizer, reward)],
    ).train()


if __name__ == "__main__":
    main()
