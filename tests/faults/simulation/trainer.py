"""The trainer as a simulation needs it: weights that change, prompts, rewards, and what a checkpoint holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import routing_shape
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.rollout.store import StoredRollouts
from megatron_dppo.types import Prompt, RolloutGroup
from tests.faults.simulation import model
from tests.faults.simulation.faults import Plan
from tests.unit.configs import config as build_config

NAMES = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
HF_CONFIG = Qwen3MoeConfig(
    vocab_size=model.VOCABULARY,
    hidden_size=8,
    num_hidden_layers=model.LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=model.EXPERTS,
    num_experts_per_tok=model.CHOSEN,
    max_position_embeddings=32,
    eos_token_id=model.END,
)
ROUTING = routing_shape(HF_CONFIG)
"""the whole model's"""


def fresh_weights(*of: object) -> dict[str, bytes]:
    """Weights that follow from anything: four float32 numbers a tensor."""
    seed = "/".join(map(str, of))
    return {n: bytes(b % 120 for b in hashlib.blake2b(f"{seed}/{n}".encode(), digest_size=16).digest()) for n in NAMES}


class Tokenizer:
    """Text is the tokens' numbers."""

    eos_token_id = model.END

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


class Prompts:
    """Prompt i of the stream; no two are alike."""

    longest = 5  # tokens of each

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> Prompt:
        return _prompt(i)


@lru_cache(1000)
def _prompt(i: int) -> Prompt:
    tokens = (3, 4 + i % 12, 4 + i // 12 % 12, 4 + i // 144 % 12, 3 + i % 5)
    return Prompt(prompt_id=str(i), text=" ".join(map(str, tokens)) + " ", token_ids=tokens, label="")


def reward_of(prompt: str, tokens: Sequence[int]) -> RewardResult:
    """Return the reward of a response by a rule, so that some groups carry no signal, and a number that is its own."""
    identity = model.prefix_hash([*Tokenizer().encode(prompt), *tokens]) % 2**20
    return RewardResult(reward=float(sum(tokens) % 3 > 0), parts={"identity": float(identity)})


class Scorer:
    """Rewards by ``reward_of``."""

    def score(self, items: Sequence[RewardItem], *, is_batch: bool) -> list[RewardResult]:
        return [reward_of(item.prompt, item.token_ids) for item in items]


@dataclass
class Saved:
    """Content of a checkpoint."""

    step: int
    weights: dict[str, bytes]
    stream: SchedulerState | None = None
    contents: dict[int, StoredRollouts] = field(default_factory=dict)


class SimDeviceState:
    """Weights of the trainer on the device."""

    def __init__(self) -> None:
        self.has_weights = self.has_all = True

    def offload(self, *, weights: bool) -> None:
        self.has_all, self.has_weights = False, self.has_weights and not weights

    def restore(self) -> None:
        self.has_weights = self.has_all = True


class SimTrainer:
    """As much of a ``PolicyTrainer`` as rollouts, sync and probe see.

    Args:
        weights: by name.
        policy_version: of these weights.
    """

    dp_rank = 0
    groups = SimpleNamespace(world=None, replica=None, dp=None)
    layout = SimpleNamespace(dp=1)

    def __init__(self, weights: dict[str, bytes], policy_version: int) -> None:
        self.weights, self.policy_version = weights, policy_version
        self.routing_shape = ROUTING
        self.device_state = SimDeviceState()

    @property
    def digest(self) -> int:
        return model.digest_of(self.weights)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.device_state.has_weights, "weights are sent that are not on the device"
        for name, data in self.weights.items():
            yield name, torch.frombuffer(bytearray(data), dtype=torch.float32)

    def learn(self, trained: object) -> None:
        """New weights, a function of the old ones and of what was trained on."""
        assert self.device_state.has_all, "an update without what it needs on the device"
        fresh = fresh_weights(self.digest, trained)
        self.weights = fresh
        self.policy_version += 1

    def rows(self, tokens: Sequence[int]) -> list[int]:
        """The row of the model's tables after each token."""
        return model.rows_of(tokens, self.digest)

    def difference(self, groups: Sequence[RolloutGroup]) -> float:
        """The mean |pi - mu| of what would train, with the rollouts' experts where they are replayed."""
        every = [0.0] if not groups else []
        for group in groups:
            first = len(group.prompt.token_ids)
            for c in (rollout.completion for rollout in group.rollouts):
                tokens = np.clip(c.token_ids.numpy(), 0, model.VOCABULARY - 1)
                rows = np.array(self.rows([*group.prompt.token_ids, *tokens.tolist()])[:-1])
                if c.routed_experts is not None:
                    rows = replayed(rows, c.routed_experts.numpy())
                mine = np.exp(model.LOGPROBS[rows[first - 1 :], tokens].astype(np.float64))
                theirs = np.array(c.logprobs, dtype=np.float64)
                every += np.abs(mine - np.exp(theirs))[np.isfinite(theirs)].tolist()
        return float(np.mean(every)) if every else float("nan")


def replayed(rows: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """The rows when given experts are used: another one wherever they are not the router's own choice."""
    return np.where((routes != model.ROUTES[rows]).any((1, 2)), rows ^ 1, rows)


def configure(plan: Plan) -> Config:
    """The configuration of a run."""
    return _configure(replace(plan, seed=0, faults=(), token_seconds=0, latency=0, train_seconds=0, save_every=1))


@lru_cache(50000)
def _configure(plan: Plan) -> Config:
    return build_config(
        run={"num_steps": plan.steps, "output_dir": "/simulated/run"},
        model={"dtype": "fp32"},
        rollout={
            "engine": "sglang",
            "dtype": "fp32",
            "prompts_per_step": plan.prompts,
            "samples_per_prompt": plan.siblings,
            "max_new_tokens": plan.new_tokens,
            "abort_slowest": plan.stopping,
            "partial_rollouts": plan.partial,
            "oversample": plan.oversample,
            "order": plan.order,
            "dynamic_sampling": plan.dynamic,
            "servers": {
                "urls": [f"http://s{i}:80" for i in range(plan.servers)],
                "max_in_flight": plan.max_in_flight,
                "health_seconds": plan.health_seconds,
                "client_processes": 0,  # in virtual time there is this process alone
                "colocated": plan.colocated,
            },
            "weight_sync": {
                "method": plan.method,
                "attempts": plan.attempts,
                "probe_every": plan.probe_every,
                "checksum_every": plan.checksum_every,
            },
        },
        train={"max_staleness": plan.staleness, "router_replay": "rollout" if plan.routing else "off"},
        loss={"name": "dppo_topk_tv", "topk": plan.topk} if plan.topk else {"name": "dppo_binary_tv"},
    )
