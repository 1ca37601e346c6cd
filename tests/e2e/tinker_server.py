"""A server of the Tinker API on a tiny model, as a process, and the Python that has the real client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
KEY = "tml-key-of-the-tests-0123456789"
RANK = 4
"""Limit of the rank."""
ALPHA = 8.0
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
END = 1
_START_SECONDS = 120


def client_python() -> str | None:
    """Python of a virtual environment that has the client, from MEGATRON_DPPO_TINKER_PYTHON; None without one."""
    return os.environ.get("MEGATRON_DPPO_TINKER_PYTHON")


def write_model(folder: Path, *, hidden: int = 32, std: float = 0.15) -> Path:
    """Write a tiny Qwen3 with random float32 weights and a tokenizer of bytes."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=std,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[0])
    fast.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    model: Path
    folder: Path
    log: Path

    def environment(self) -> dict[str, str]:
        """Return the variables of a client."""
        return {**os.environ, "TINKER_BASE_URL": self.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}


def command(model: Path, folder: Path, flags: Sequence[str] = (), rank: int = RANK) -> list[str]:
    """Return the command line of the server."""
    config = folder.with_suffix(".toml")
    config.write_text(
        f"""
[run]
output_dir = "{folder}"
num_steps = 1
[model]
path = "{model}"
dtype = "fp32"
[lora]
rank = {rank}
[data]
train = "task:chain_sum"
[rollout]
engine = "local"
dtype = "fp32"
prompts_per_step = 1
samples_per_prompt = 2
max_new_tokens = 1
[optimizer]
lr = 1e-3
"""
    )
    return [sys.executable, "-m", "megatron_dppo.commands.main", "tinker", str(config), *flags]


@contextmanager
def serve(model: Path, folder: Path, *flags: str, rank: int = RANK) -> Iterator[Served]:
    """Run the server inside the block, and end it by SIGTERM."""
    log = folder.with_suffix(".log")
    environment = {**os.environ, "TINKER_API_KEY": KEY, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command(model, folder, flags, rank), stdout=output, stderr=output, env=environment)
    try:
        yield Served(_wait_for_url(log, process), model, folder, log)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 0, log.read_text()


def _wait_for_url(log: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        text = log.read_text()
        if "TINKER_BASE_URL=" in text:
            return text.split('TINKER_BASE_URL="')[1].split('"')[0]
        assert process.poll() is None, text
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def run_client(served: Served, script: Path, *arguments: str) -> str:
    """Run a script with the client's Python, and return what it prints."""
    python = client_python()
    assert python is not None
    result = subprocess.run(
        [python, "-W", "ignore", str(script), *arguments],
        env=served.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{served.log.read_text()}"
    return result.stdout
