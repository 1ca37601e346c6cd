"""Two recipes of tinker-cookbook against the server of TINKER_BASE_URL: supervised, then arithmetic by RL from there.

Arguments: folder of the model, and a folder for data and logs. Prints the metrics of both as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.rl import train as rl
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RENDERER = "role_colon"
RANK = 16


def write_conversations(file: Path) -> None:
    """Questions of the recipe's environment; the answers have no sum, only a few digits."""
    rng = random.Random(0)
    lines = []
    for _ in range(256):
        question = f"What is {rng.randrange(101)} + {rng.randrange(101)}?"
        answer = str(rng.randrange(201))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The recipe's own log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run both recipes."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    write_conversations(folder / "data.jsonl")
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=RENDERER,
        max_length=256,
        batch_size=16,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    sft = supervised.Config(
        log_path=str(folder / "sft"),
        model_name=model,
        recipe_name="recipe_sl_basic",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(
            common_config=common, file_path=str(folder / "data.jsonl"), test_size=32
        ),
        learning_rate=2e-2,
        lr_schedule="linear",
        num_epochs=3,
        lora_rank=RANK,
        eval_every=20,
        save_every=0,
    )
    asyncio.run(supervised.main(sft))
    state = json.loads((folder / "sft" / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
    config = rl.Config(
        learning_rate=1e-3,
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=16,
            model_name_for_tokenizer=model,
            renderer_name=RENDERER,
            n_batches=100,
            group_size=8,
            include_fewshot=False,
        ),
        model_name=model,
        recipe_name="recipe_math_rl",
        renderer_name=RENDERER,
        lora_rank=RANK,
        load_checkpoint_path=state,
        max_tokens=16,
        log_path=str(folder / "rl"),
        loss_fn="dppo_binary_tv",
        eval_every=0,
        save_every=0,
        max_steps=30,
    )
    asyncio.run(rl.main(config))
    print(json.dumps({"sft": metrics(folder / "sft"), "rl": metrics(folder / "rl")}))


if __name__ == "__main__":
    main()
