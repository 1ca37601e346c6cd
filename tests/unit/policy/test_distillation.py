"""``[distillation]``: what is refused, the sampled form's advantages, and whether a teacher fits the policy."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from http_stub import Call, running
from megatron_dppo.config.layout import resolve_layout, resolve_parallel
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.hf.folder import build_hf_model, model_shape, read_hf_config
from megatron_dppo.losses import policy_loss
from megatron_dppo.run.step import add_distillation_advantages, add_teacher_logprobs
from megatron_dppo.setup.inputs import ModelInputs
from megatron_dppo.setup.teacher_setup import teacher_problems, teacher_servers
from megatron_dppo.types import LossInputs, TrainingSample
from megatron_dppo_plan.teacher import PlannedTeacher
from tests.unit.configs import config

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
TEACHER = {"teacher_path": "teacher"}
SERVED: dict[str, Any] = {"teacher_urls": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"distillation": {"coef": 0.5}}, "0.5 has no effect"),
        ({"distillation": {"task_reward": False}}, "task_reward = False"),
        (
            {"distillation": TEACHER | {"divergence": "jsd"}},
            "'jsd': Input should be 'sampled', 'reverse_kl'",
        ),
        ({"distillation": TEACHER | {"weight": 0.3}}, "weight = 0.3: unknown key"),
        ({"distillation": TEACHER | {"divergence": "tv"}}, "divergence"),
        ({"distillation": TEACHER | {"coef": 0.0}}, "coef"),
        ({"distillation": TEACHER | {"temperature": 2.0}}, "temperature"),
        (
            {"distillation": TEACHER | {"divergence": "forward_kl"}, "model": {"path": "m", "fused_head": False}},
            "with model.fused_head = false",
        ),
        (
            {"distillation": TEACHER | {"divergence": "reverse_kl"}, "rollout": {"top_p": 0.9}},
            "with rollout.top_p = 0.9: the filter",
        ),
        (
            {"distillation": TEACHER | {"task_reward": False}, "rollout": {"dynamic_sampling": True}},
            "only the teacher",
        ),
        ({"reward": {"function": "none"}}, "is no training"),
        ({"distillation": SERVED | {"teacher_offload": "layer"}}, "no effect with teacher_urls"),
        ({"distillation": SERVED | TEACHER}, "loads the teacher"),
        ({"distillation": TEACHER | {"teacher_engine": "vllm"}}, "applies to teacher"),
        ({"distillation": {"teacher_engine": "vllm"}}, "set teacher_path or teacher_urls"),
        ({"distillation": SERVED | {"divergence": "forward_kl"}}, "the full vocabulary"),
        ({"distillation": SERVED, "rollout": {"temperature": 0.7}}, "log-probabilities at temperature 1"),
        ({"distillation": SERVED, "rollout": {"top_p": 0.7}}, "distribution covers all"),
    ],
)
def test_what_does_nothing_or_does_not_fit_is_refused(sections: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert part in str(error.value)


def test_what_fits() -> None:
    assert not config().distillation.is_enabled
    pure = config(distillation=TEACHER | {"task_reward": False}, rollout={"top_p": 0.9}, reward={"function": "none"})
    assert pure.distillation.is_enabled and not pure.distillation.is_exact
    exact = config(distillation=TEACHER | {"divergence": "forward_kl"}, model={"path": "m", "random_init": True})
    assert exact.distillation.is_exact


def sample(mask: list[bool], mu: list[float], teacher: list[float] | None) -> TrainingSample:
    return TrainingSample(
        tokens=torch.arange(len(mask)),
        labels=torch.arange(len(mask)),
        loss_mask=torch.tensor(mask),
        advantages=torch.tensor([0.5 if inside else 0.0 for inside in mask]),
        rollout_logprobs=torch.tensor(mu),
        teacher_logprobs=None if teacher is None else torch.tensor(teacher),
    )


def test_the_advantages_of_the_sampled_form_by_hand() -> None:
    """-(log mu - log teacher) times coef on top of the task's 1/2, clamped at 20, 0 outside the mask."""
    given = [
        sample([False, True, True, True], [0.0, -1.0, -0.5, -0.1], [-9.0, -0.25, -2.0, -90.0]),
        sample([True], [-1.0], None),  # of a pipeline stage that computes no log-probabilities
    ]
    both, stage = add_distillation_advantages(given, config(distillation=TEACHER | {"coef": 2.0}).distillation)
    assert both.advantages.tolist() == [0.0, 0.5 + 1.5, 0.5 - 3.0, 0.5 - 40.0]
    assert both.teacher_logprobs is None and stage.advantages.tolist() == [0.5]
    alone, _ = add_distillation_advantages(given, config(distillation=TEACHER | {"task_reward": False}).distillation)
    assert alone.advantages.tolist() == [0.0, 0.75, -1.5, -20.0]
    exact = TEACHER | {"task_reward": False, "divergence": "reverse_kl"}
    untaught = [sample([False, True], [0.0, -1.0], None)]
    (alone,) = add_distillation_advantages(untaught, config(distillation=exact).distillation)
    assert alone.advantages.tolist() == [0.0, 0.0]
    (both,) = add_distillation_advantages(untaught, config(distillation=exact | {"task_reward": True}).distillation)
    assert both.advantages.tolist() == [0.0, 0.5]


def test_its_mean_gradient_is_that_of_the_reverse_kl() -> None:
    """Every word sampled once, weighted by its probability: the expectation without noise."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    (log_p.exp() * (log_p - log_q)).sum().backward()
    assert logits.grad is not None
    expected, logits.grad = logits.grad.clone(), None
    mu = logits.detach().log_softmax(0)
    drawn = sample([True] * 9, mu.tolist(), log_q.tolist())
    (taught,) = add_distillation_advantages([drawn], config(distillation=TEACHER | {"task_reward": False}).distillation)
    inputs = LossInputs(
        logprobs=logits.log_softmax(0),
        advantages=taught.advantages,
        loss_mask=drawn.loss_mask,
        rollout_logprobs=mu,
        token_weights=mu.exp(),
    )
    policy_loss(inputs, LossConfig()).loss_sum.backward()
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of the policy's sizes."""
    target = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(MODEL, target)
    build_hf_model(read_hf_config(MODEL), torch.float32, seed=3).save_pretrained(target)
    return target


def problems(path: Path, world_size: int = 1, **parallel: int) -> str:
    hf_config = read_hf_config(MODEL)
    chosen = config(distillation={"teacher_path": str(path)}, parallel=parallel)
    layout = resolve_layout(chosen.parallel, chosen.batch, world_size, model_shape(hf_config))
    policy = ModelInputs(hf_config=hf_config, num_parameters=1, tokenizer=load_tokenizer(MODEL), layout=layout)
    return "\n".join(str(error) for error in teacher_problems(chosen, policy))


def changed(folder: Path, target: Path, **values: Any) -> Path:
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return target


def test_a_teacher_that_fits_and_those_that_do_not(folder: Path, tmp_path: Path) -> None:
    assert problems(folder) == ""
    assert "is not a Hugging Face folder: config.json is missing" in problems(tmp_path / "absent")
    shutil.copytree(MODEL, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "has no *.safetensors weights" in problems(tmp_path / "empty")
    found = problems(changed(folder, tmp_path / "words", vocab_size=64))
    assert "has a vocabulary of 64, the policy one of 53" in found and "have other shapes" not in found
    assert "do not fit config.json" in found, "all that is wrong at once"
    found = problems(changed(folder, tmp_path / "short", max_position_embeddings=40))
    assert "has 40 positions, but data.max_prompt_tokens + rollout.max_new_tokens" in found


def test_a_teacher_with_other_words_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "other"
    shutil.copytree(folder, target)
    file = target / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda word: vocabulary[word])[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    found = problems(target)
    assert "another tokenizer than model.path: 2 tokens differ" in found
    assert f"{min(first, second)!r} is {vocabulary[min(first, second)]} in the teacher" in found


def test_a_teacher_is_split_as_the_policy_is(folder: Path, tmp_path: Path) -> None:
    assert problems(folder, 2, expert_model_parallel_size=2) == ""
    dense = tmp_path / "dense"
    shutil.copytree(MODEL, dense)
    values = json.loads((MODEL / "config.json").read_text())
    sparse = ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size")
    values = {key: value for key, value in values.items() if "expert" not in key and key not in sparse}
    values |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    for num_layers in (3, 1):
        (dense / "config.json").write_text(json.dumps(values | {"num_hidden_layers": num_layers}))
        build_hf_model(read_hf_config(dense), torch.float32, seed=3).save_pretrained(dense)
        assert problems(dense, 2, expert_model_parallel_size=2) == "", "no experts: whole on both ranks"
        result = problems(dense, 2, pipeline_model_parallel_size=2)
        if num_layers == 3:
            assert result == "", "two layers on the first stage, one on the last"
    assert "must support the parallel layout of the policy" in result and "1 layers are not a multiple of" in result


def test_the_plan_knows_what_a_rank_holds_of_a_teacher_by_hand() -> None:
    """Qwen3-8B in bf16 on TP2: half of 8.19 B; by layer both ends and two of 36."""
    ends = 2 * 151936 * 4096
    inside = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096) + 4096
    exact = {"teacher_path": "Qwen3-8B", "divergence": "forward_kl"}
    sizes = []
    for offload in ("model", "layer"):
        parallel = {"tensor_model_parallel_size": 2}
        chosen = config(distillation=exact | {"teacher_offload": offload}, parallel=parallel)
        layout, teacher = (
            resolve_parallel(chosen.parallel, 4, model_shape(read_hf_config(MODEL))),
            PlannedTeacher.from_config(chosen),
        )
        assert teacher is not None
        assert teacher.bytes_on_rank(chosen, layout) == pytest.approx(ends + inside, rel=1e-6)
        sizes.append(teacher.bytes_on_device(chosen, layout))
    assert sizes[0] == pytest.approx(ends + inside, rel=1e-6)
    assert sizes[1] == pytest.approx(ends + 2 * inside / 36, rel=1e-6)


def served(call: Call) -> Any:
    """Return an answer as SGLang and vLLM give it: minus a hundredth of the token's id and of its position."""
    body = call.body
    if call.path == "/generate":
        ids, start = body["input_ids"], body["logprob_start_len"]
        rows = [[None if i == start else -(ids[i] + i) / 100, ids[i], None] for i in range(start, len(ids))]
        return {"text": "", "meta_info": {"input_token_logprobs": rows}}
    ids = body["prompt"]
    rows = [None, *({str(ids[i]): {"logprob": -(ids[i] + i) / 100, "rank": 3}} for i in range(1, len(ids)))]
    return {"choices": [{"text": "x", "prompt_logprobs": rows}]}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_score_the_sampled_tokens(engine: Any) -> None:
    """Sequences 7 8 9 5 and 3 4, the first with a prompt of two tokens; a third one has no loss."""
    path = "/generate" if engine == "sglang" else "/v1/completions"

    async def answer(call: Call) -> Any:
        return served(call)

    def of(ids: list[int], mask: list[bool]) -> TrainingSample:
        zeros = torch.zeros(len(mask))
        tokens, labels = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
        return TrainingSample(tokens=tokens, labels=labels, loss_mask=torch.tensor(mask), advantages=zeros)

    samples = [of([7, 8, 9, 5], [False, True, True]), of([3, 4], [True]), of([3, 4], [False])]
    busy = (503, {"error": "busy"})
    with running({path: answer}) as stub, running({path: busy}) as ill:
        servers = TeacherServers([ill.url, stub.url], engine)
        found = [sample.teacher_logprobs for sample in add_teacher_logprobs(samples, servers, None)]
        assert {call.path for call in stub.calls} == {path} and ill.calls, "both are asked, the one that is ill too"
        assert [error.status for error in servers.problems()] == [503]
        first = stub.calls[0].body
    assert [row.tolist() for row in found if row is not None] == [
        pytest.approx([0.0, -0.11, -0.08]),
        pytest.approx([-0.05]),
        [0.0],
    ]
    assert first.get("max_tokens", 0) <= 1 and first.get("sampling_params", {}).get("max_new_tokens", 0) == 0


@pytest.mark.parametrize(
    "answer",
    [
        {"meta_info": {"input_token_logprobs": [[None, 7, None], [-0.5, 6, None]]}},  # of another token
        {"meta_info": {"input_token_logprobs": [[None, 7, None], [0.5, 8, None]]}},  # above 0
        {"meta_info": {"input_token_logprobs": [[None, 7, None], [None, 8, None]]}},
        {"meta_info": {"input_token_logprobs": []}},
        {"meta_info": {"input_token_logprobs": [1, 2]}},
        {"meta_info": None},
        "busy",
    ],
)
def test_an_answer_about_something_else_ends_the_step(answer: Any) -> None:
    zeros = torch.zeros(1)
    tokens, labels = torch.tensor([7]), torch.tensor([8])
    one = TrainingSample(tokens=tokens, labels=labels, loss_mask=torch.tensor([True]), advantages=zeros)
    with running({"/generate": answer}) as stub, pytest.raises(ServerError, match=r"distillation\.teacher_urls"):
        add_teacher_logprobs([one], TeacherServers([stub.url], "sglang"), None)


def test_ranks_score_their_first_sample_on_servers_that_are_evenly_spaced() -> None:
    async def answer(call: Call) -> Any:
        return served(call)

    zeros = torch.zeros(1)
    tokens, labels = torch.tensor([3]), torch.tensor([4])
    one = TrainingSample(tokens=tokens, labels=labels, loss_mask=torch.tensor([True]), advantages=zeros)
    with ExitStack() as stack:
        stubs = [stack.enter_context(running({"/generate": answer})) for _ in range(4)]
        urls = [stub.url for stub in stubs]
        settings = config(distillation={"teacher_urls": urls}, rollout={"engine": "sglang"})
        for rank in range(2):
            servers = teacher_servers(settings.distillation, rank=rank, ranks=2)
            assert servers is not None
            servers.logprobs([one])
        assert [len(stub.calls) for stub in stubs] == [1, 0, 1, 0]
