"""A column that engines report and a built-in loss reads: the files that it takes, and that these are all.

The package is copied, the additions are made, and a program follows the column through the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from source_folders import PACKAGES, TRAINER

ROOT = Path(__file__).parents[2]
COLUMN = """ROLLOUT_ENTROPIES = TokenColumn(
    response="entropies",
    name="rollout_entropies",
    record="entropies",
    dtype=torch.float32,
    alignment=Alignment.RESPONSE,
    fill=0.0,
    is_loss_only=True,
)
"""
LOSS = '''"""Entropic: tokens that were sampled from a narrow distribution are masked.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t)
    keep_t = not H(mu_t) < threshold

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: entropy of mu
Source: made up
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megatron_dppo import losses
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from megatron_dppo.losses import Decision, Tokens


class Entropic(Loss):
    """Entropic."""

    name: Literal["entropic"] = "entropic"
    threshold: float = 1.0

    @property
    def needs(self) -> FunctionNeeds:
        """The entropies of mu."""
        return FunctionNeeds(columns=("rollout_entropies",), zero_advantage=False)

    def decide(self, tokens: Tokens) -> Decision:
        """Mask narrow ones."""
        entropies = tokens.columns["rollout_entropies"]
        return losses.weigh_by_ratio(tokens, entropies, entropies >= self.threshold)
'''
ADDITIONS = {
    "types/token_columns.py": {
        "TOKEN_COLUMNS: list[TokenColumn] = [\n": f"{COLUMN}\nTOKEN_COLUMNS: list[TokenColumn] = [\n"
        "    ROLLOUT_ENTROPIES,\n"
    },
    "megatron_dppo_engines/responses.py": {
        "    topk_token_ids: Tensor | None = None\n": "    entropies: Tensor | None = None\n"
        "    topk_token_ids: Tensor | None = None\n",
        "COLUMN_LIMITS: dict[str, tuple[float, float]] = {}": "COLUMN_LIMITS: dict[str, tuple[float, float]] = "
        '{"entropies": (0.0, float("inf"))}',
    },
    "types/samples.py": {
        "    reference_logprobs: Tensor | None = None\n": "    rollout_entropies: Tensor | None = None\n"
        "    reference_logprobs: Tensor | None = None\n"
    },
    "types/loss.py": {
        "    reference_logprobs: Tensor | None = None\n": "    rollout_entropies: Tensor | None = None\n"
        "    reference_logprobs: Tensor | None = None\n"
    },
    "megatron_dppo_engines/sglang/wire.py": {
        "Mapping[str, ColumnField]] = {}": "Mapping[str, ColumnField]] = "
        '{"entropies": ColumnField("output_entropies", {"return_entropies": True})}'
    },
    "megatron_dppo_engines/vllm/wire.py": {
        "Mapping[str, ColumnField]] = {}": "Mapping[str, ColumnField]] = "
        '{"entropies": ColumnField("entropies", {"entropies": True})}'
    },
    "engines/local/decode.py": {
        "Callable[[Tensor, Tensor], Tensor]] = {}": "Callable[[Tensor, Tensor], Tensor]] = "
        '{"entropies": lambda logprobs, _: torch.distributions.Categorical(logits=logprobs).entropy()}'
    },
    "losses/entropic.py": {"": LOSS},
}
"""File -> text before and after. The keys are the files that docs/extending.md names."""
PROGRAM = '''
import json, math
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
import megatron_dppo
import megatron_dppo as md
assert Path(megatron_dppo.__file__).is_relative_to(Path.cwd())
from megatron_dppo.data.training_samples import RowShape, pack, to_samples
from megatron_dppo_engines.servers.contract import Contract, check_frame
from megatron_dppo_engines.sglang import wire as sglang
from megatron_dppo_engines.vllm import wire as vllm
from megatron_dppo.errors import FunctionError
from megatron_dppo_engines.errors import ContractViolation
from megatron_dppo.losses.user_check import check_user_functions, made_up_inputs
from megatron_dppo.setup.engines import rollout_sampling_params
from megatron_dppo.types import Rollout, RolloutGroup
from tests.unit.configs import config
from tests.unit.engines import test_local_engine
import test_sglang, test_vllm

assert "rollout_entropies" in md.LossConfig(name="entropic").required_inputs
assert rollout_sampling_params(config(loss={"name": "entropic"})).columns == ("entropies",)
assert rollout_sampling_params(config()).columns == ()

# The local engine against the model read once more.
params = test_local_engine.params(columns=("entropies",))
engine = test_local_engine.engine()
prompts = test_local_engine.PROMPTS[:2]
completions = engine.generate(prompts, params)
model = test_local_engine.MODELS[0]
for prompt, done in zip(prompts, completions, strict=True):
    ids = torch.cat([torch.tensor(prompt.token_ids), done.token_ids.long()])
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1].double().log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(done.entropies.double(), expected, rtol=1e-4, atol=1e-4)
assert engine.generate(prompts, test_local_engine.params())[0].entropies is None

# Through samples and a packed row into the loss of the head.
groups = [
    RolloutGroup(prompt=p, rollouts=(Rollout(prompt=p, completion=c, reward=1.0),))
    for p, c in zip(prompts, completions, strict=True)
]
batch = pack(to_samples(groups, [[1.0], [-1.0]]), RowShape(row_multiple=8))
vocabulary = model.config.vocab_size
torch.manual_seed(0)
hidden = torch.randn(len(batch.labels), 4, requires_grad=True)
targets = replace(batch.select(slice(None)), sequence_ids=None)
head = partial(md.dppo_head_loss, hidden, torch.randn(vocabulary, 4), targets, group=None, vocab_size=vocabulary)
every = torch.cat([done.entropies for done in completions])
threshold = float(every.median())
output = head(partial(md.policy_loss, config=md.LossConfig(name="entropic", threshold=threshold)))
assert output.keep_mask[batch.loss_mask].tolist() == (every >= threshold).tolist()
assert 0 < int(output.keep_mask.sum()) < len(every)

# A user's mask and loss.
Path("own.py").write_text("""
import torch
from megatron_dppo.losses import needs

@needs(columns=["rollout_entropies"])
def mask(inputs, *, threshold):
    return inputs.rollout_entropies >= threshold

@needs(columns=["rollout_entropies"])
def loss(inputs):
    return -inputs.advantages * inputs.rollout_entropies * inputs.logprobs

@needs(columns=["nothing"])
def wrong(inputs):
    return inputs.loss_mask
""")
masked = md.LossConfig(name="pg_is", mask="own.py:mask", mask_options={"threshold": threshold})
check_user_functions(masked)
check_user_functions(md.LossConfig(name="own.py:loss"))
assert head(partial(md.policy_loss, config=masked)).keep_mask.tolist() == output.keep_mask.tolist()
assert made_up_inputs(2).rollout_entropies.min() >= 0
try:
    check_user_functions(md.LossConfig(mask="own.py:wrong"))
except FunctionError as error:
    assert "loss.mask needs the column 'nothing'; engines return: rollout_entropies" in str(error), error
else:
    raise AssertionError

# Both servers: what is asked, what is read, and what is refused.
request, answer = test_sglang.recorded("0.5.23")
wanted = replace(request, params=replace(request.params, columns=("entropies",)))
assert "return_entropies" not in sglang.generate_body(request, flat=False)
assert sglang.generate_body(wanted, flat=False)["return_entropies"] is True
count = len(answer["output_ids"])
numbers = [0.5 + i for i in range(count)]
answer["meta_info"]["output_entropies"] = numbers
read = sglang.decode_generation(answer, wanted, "http://a")
assert read.entropies.tolist() == numbers

request, answer = test_vllm.recorded()
wanted_vllm = replace(request, params=replace(request.params, columns=("entropies",)))
assert vllm.generate_body(wanted_vllm)["sampling_params"]["entropies"] is True
length = len(answer["choices"][0]["token_ids"])
answer["choices"][0]["entropies"] = [0.25] * length
assert vllm.decode_generation(answer, wanted_vllm, "http://b").entropies.tolist() == [0.25] * length

contract = Contract(vocab_size=1 << 20, end_tokens=(1 << 19,))
read = replace(read, echo=None)
check_frame(read, wanted, contract, "http://a")
for asked, changed, text in (
    (wanted, None, "missing"),
    (wanted, [-1.0] * count, "a finite number of 0 to inf"),
    (wanted, [math.nan] * count, "a finite number"),
    (wanted, numbers[1:], "a number a token"),
    (replace(wanted, params=replace(wanted.params, columns=())), numbers, "does not ask for it"),
):
    wrong = replace(read, entropies=None if changed is None else torch.tensor(changed))
    try:
        check_frame(wrong, asked, contract, "http://a")
    except ContractViolation as error:
        assert text in str(error) and "entropies" in str(error), error
    else:
        raise AssertionError(text)
print("followed")
'''


@pytest.mark.slow
def test_a_column_takes_the_files_that_the_page_names_and_no_other(tmp_path: Path) -> None:
    assert len(ADDITIONS) <= 8
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    table = page[page.index("## A column of tokens") : page.index("## A family of models")]
    named = re.findall(r"^\| \d+ \| `([a-z_/]+\.py)`", table, re.MULTILINE)
    assert sorted(named) == sorted(file for file in ADDITIONS if not file.startswith("losses/"))
    for folder in (TRAINER, PACKAGES["megatron_dppo_engines"]):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in ADDITIONS.items():
        file = tmp_path / (name if name.startswith("megatron_dppo_engines") else f"megatron_dppo/{name}")
        text = file.read_text() if file.exists() else ""
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after, 1)
        file.write_text(text)
    path = os.pathsep.join(
        map(str, [tmp_path, *(folder.parent for folder in PACKAGES.values()), ROOT, ROOT / "packages/engines/tests"])
    )
    env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout == "followed\n", done.stdout + done.stderr
