"""The service behind the API: sessions, models, samplers and checkpoints, in the thread of the model."""

import re
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import UserError
from megatron_dppo.hf.folder import stream_folder
from megatron_dppo.mcore.optim import AdamStep
from megatron_dppo.setup.engines import build_sampling_engine
from megatron_dppo_tinker import bodies
from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.futures import Request, RequestQueue, Result, failure
from megatron_dppo_tinker.losses import read_loss
from megatron_dppo_tinker.models import AdapterSpec, ModelParts, TrainedModel, newest_checkpoint
from megatron_dppo_tinker.samplers import Sampler, SamplingEngine, Weights, read_job
from megatron_dppo_tinker.wire import ForwardBackwardRequest, write_forward_output

_PATH = re.compile(
    r"tinker://([0-9a-f]{32}:train:\d{1,9})/(weights|sampler_weights)/([A-Za-z0-9_][A-Za-z0-9._-]{0,127})"
)
_MAX_SESSIONS = 1024
_MAX_SAMPLERS = 1024
_IDLE_SECONDS = 120.0
"""Time without a heartbeat after which the models of a session may make room. Clients send one every 10 seconds."""
IGNORED = (
    "this server is megatron-dppo: it trains no adapter on the output layer (train_unembed is ignored), keeps "
    "checkpoints until you delete them (ttl_seconds is ignored), and stores no telemetry"
)
"""Message that a client logs at the start of a session."""


@dataclass
class _Session:
    last_heartbeat: float
    is_finished: bool = False


@dataclass
class _ModelEntry:
    """A model as clients see it, from its request on."""

    spec: AdapterSpec
    user_metadata: dict[str, str]
    model: TrainedModel | None = None
    """None before its request is done."""


@dataclass
class Limits:
    """Limits of the service."""

    max_models: int = 2
    max_snapshot_bytes: int = 4 << 30
    """Maximum size of the samplers' adapters in memory. The newest is kept in any case."""


@dataclass
class Service:
    """State of the server. ``submit_*`` are called by the HTTP thread, everything else by the thread of the model."""

    parts: ModelParts
    base_model: str
    """Name by which clients ask for the model."""
    folder: Path
    limits: Limits
    queue: RequestQueue = field(default_factory=RequestQueue)

    def __post_init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, _ModelEntry] = {}
        self._samplers: dict[str, Sampler] = {}
        self._base = Sampler(None)
        config, inputs = self.parts.config, self.parts.inputs
        engine = build_sampling_engine(
            config.rollout, inputs.hf_config, inputs.tokenizer, self.parts.platform.device, [], None
        )
        assert isinstance(engine, LocalEngine)
        self._engine = SamplingEngine(engine, inputs.tokenizer, self._weights)

    # Requests that are answered at once.

    def create_session(self, body: bodies.CreateSession) -> dict[str, Any]:
        """Return a new session."""
        del body
        if len(self._sessions) >= _MAX_SESSIONS:
            self._sessions.pop(min(self._sessions, key=lambda name: self._sessions[name].last_heartbeat))
        session_id = secrets.token_hex(16)
        self._sessions[session_id] = _Session(time.monotonic())
        return {"type": "create_session", "session_id": session_id, "info_message": IGNORED}

    def heartbeat(self, body: bodies.SessionRequest) -> dict[str, Any]:
        """Note that a session is alive."""
        self._session(body.session_id).last_heartbeat = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish_session(self, session_id: str) -> dict[str, Any]:
        """Note that a session's models may make room for others."""
        self._session(session_id).is_finished = True
        return {}

    def info(self, body: bodies.ModelRequest) -> dict[str, Any]:
        """Return the description of a model."""
        entry = self._entry(body.model_id)
        data = {
            "arch": self.parts.inputs.hf_config.model_type,
            "model_name": self.base_model,
            "tokenizer_id": str(Path(self.parts.config.model.path).resolve()),
        }
        names = {"model_id": body.model_id, "model_name": self.base_model, "model_data": data}
        return {"type": "get_info", **names, "is_lora": True, "lora_rank": entry.spec.rank}

    def capabilities(self) -> dict[str, Any]:
        """Return the models that can be trained."""
        length = self.parts.inputs.hf_config.max_position_embeddings
        model = {"model_name": self.base_model, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    def weights_info(self, body: bodies.WeightsInfo) -> dict[str, Any]:
        """Return the description of saved weights."""
        spec = AdapterSpec.from_checkpoint(newest_checkpoint(self._saved_folder(body.tinker_path)))
        flags = {"train_mlp": spec.train_mlp, "train_attn": spec.train_attn, "train_unembed": False}
        return {"base_model": self.base_model, "is_lora": True, "lora_rank": spec.rank, **flags}

    def create_sampler(self, body: bodies.CreateSampler) -> dict[str, Any]:
        """Return a new sampling session for the base model or for saved weights."""
        self._session(body.session_id)
        if body.model_path is None:
            self._check_base_model(body.base_model)
            sampler = self._base
        else:
            checkpoint = newest_checkpoint(self._saved_folder(body.model_path))
            spec = AdapterSpec.from_checkpoint(checkpoint)
            sampler = Sampler(spec, checkpoint=checkpoint, path=body.model_path)
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        # The same request again gets the same session.
        self._add_sampler(name, self._samplers.get(name, sampler))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler_info(self, name: str) -> dict[str, Any]:
        """Return the description of a sampling session."""
        sampler = self._sampler(name)
        return {"sampler_id": name, "base_model": self.base_model, "model_path": sampler.path}

    # Requests that wait for the model. Each returns its future.

    def submit_create_model(self, body: bodies.CreateModel) -> dict[str, Any]:
        """Queue the construction of a model."""
        self._session(body.session_id)
        self._check_base_model(body.base_model)
        asked = body.lora_config
        served = self.parts.config.lora
        if asked.rank > served.rank:
            raise RequestError(f"rank = {asked.rank} is above {served.rank}, the limit of this server (lora.rank)")
        seed = self.parts.config.run.seed if asked.seed is None else asked.seed
        spec = AdapterSpec(asked.rank, seed, train_mlp=asked.train_mlp, train_attn=asked.train_attn)
        spec.config(served)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        return self._submit_new(model_id, spec, body.user_metadata, lambda: self._build(model_id))

    def submit_load(self, body: bodies.LoadWeights) -> dict[str, Any]:
        """Queue the construction of a model from a checkpoint, or the loading of one into a model."""
        if body.base_model is not None:
            self._check_base_model(body.base_model)
        checkpoint = newest_checkpoint(self._saved_folder(body.path))
        if body.optimizer and "/sampler_weights/" in body.path:
            raise RequestError(f"{body.path} has weights alone, and no optimizer state. Use a path of save_state")
        spec = AdapterSpec.from_checkpoint(checkpoint)
        model_id = f"{body.session_id}:train:{body.model_seq_id}" if body.model_id is None else body.model_id
        run = partial(self._load, model_id, checkpoint, body.path, optimizer=body.optimizer)
        if body.model_id is None:
            assert body.session_id is not None
            self._session(body.session_id)
            return self._submit_new(model_id, spec, body.user_metadata, run)
        assert body.seq_id is not None
        entry = self._entry(model_id)
        if spec.shape != entry.spec.shape:
            raise RequestError(f"{body.path} has adapters {spec}, and the model has {entry.spec}")
        return self._submit(model_id, body.seq_id, run)

    def submit_forward_backward(self, request: ForwardBackwardRequest, num_bytes: int) -> dict[str, Any]:
        """Queue a computation of gradients, or a forward pass, whose body has this size."""
        run = partial(self._forward_backward, request)
        return self._submit(request.model_id, request.seq_id, run, num_bytes)

    def submit_optim_step(self, body: bodies.OptimStep) -> dict[str, Any]:
        """Queue an update of the adapters."""
        asked = body.adam_params
        settings = AdamStep(
            lr=asked.learning_rate,
            betas=(asked.beta1, asked.beta2),
            eps=asked.eps,
            weight_decay=asked.weight_decay,
            clip_grad=asked.grad_clip_norm,
        )

        def run() -> Result:
            return {"metrics": self._model(body.model_id).optim_step(settings)}

        return self._submit(body.model_id, body.seq_id, run)

    def submit_save(self, body: bodies.SaveWeights) -> dict[str, Any]:
        """Queue a checkpoint of adapters and optimizer."""
        path = f"tinker://{body.model_id}/weights/{body.path}"
        folder = self._saved_folder(path)

        def run() -> Result:
            if folder.exists() and not body.overwrite:
                raise RequestError(f"{path} exists. Choose another name, or pass overwrite=True")
            folder.mkdir(parents=True, exist_ok=True)
            self._model(body.model_id).save_state(folder)
            return {"path": path, "type": "save_weights"}

        return self._submit(body.model_id, body.seq_id, run)

    def submit_save_for_sampler(self, body: bodies.SaveForSampler) -> dict[str, Any]:
        """Queue a copy of the adapters for sampling: in a file, or in memory for a new sampling session."""
        self._entry(body.model_id)
        if body.path is not None:
            run = partial(self._save_adapters, body.model_id, body.path)
        else:
            session_id = body.model_id.partition(":")[0]
            run = partial(self._snapshot, body.model_id, f"{session_id}:sample:{body.sampling_session_seq_id}")
        return self._submit(body.model_id, body.seq_id, run)

    def submit_sample(self, body: bodies.Sample) -> dict[str, Any]:
        """Queue a request for samples."""
        hf_config = self.parts.inputs.hf_config
        job = read_job(
            body,
            self._sampler(body.sampling_session_id),
            vocab_size=hf_config.vocab_size,
            max_tokens=hf_config.max_position_embeddings,
        )
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        self.queue.add(Request(request_id, None, batch=job))
        ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    # The thread of the model.

    def work(self, timeout: float, announce: Callable[[Request], None]) -> None:
        """Compute the oldest requests, if any comes within ``timeout`` seconds, and announce each result."""
        requests = self.queue.next(timeout)
        if not requests:
            return
        try:
            first = requests[0]
            if first.batch is not None:
                results: list[Result] = list(self._engine.run([each.batch for each in requests]))
            else:
                assert first.run is not None
                results = [first.run()]
        except (RequestError, UserError) as error:
            results = [failure(str(error), is_user=True)] * len(requests)
        except Exception as error:
            # A bug, or a device without memory: the client learns of it, and other requests may still succeed.
            traceback.print_exc()
            results = [failure(f"the server failed: {type(error).__name__}: {error!s:.500}", is_user=False)]
            results *= len(requests)
        for request, result in zip(requests, results, strict=True):
            self.queue.finish(request, result)
            announce(request)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _forward_backward(self, request: ForwardBackwardRequest) -> Result:
        loss = read_loss(request.loss_fn, request.loss_fn_config)
        model = self._model(request.model_id)
        logprobs, metrics = model.forward_backward(request.data, loss, forward_only=request.forward_only)
        return write_forward_output(logprobs, metrics)

    def _build(self, model_id: str) -> Result:
        self._make_room()
        entry = self._entry(model_id)
        entry.model = self.parts.build(entry.spec)
        return {"model_id": model_id, "type": "create_model"}

    def _load(self, model_id: str, checkpoint: Path, path: str, *, optimizer: bool) -> Result:
        entry = self._entry(model_id)
        # A new trainer: with the weights alone, moments and update count start at 0.
        entry.model = None
        self._make_room()
        model = self.parts.build(entry.spec)
        model.load_state(checkpoint, optimizer=optimizer)
        entry.model = model
        return {"path": path, "model_id": model_id, "type": "load_weights"}

    def _save_adapters(self, model_id: str, name: str) -> Result:
        path = f"tinker://{model_id}/sampler_weights/{name}"
        folder = self._saved_folder(path)
        if folder.exists():
            raise RequestError(f"{path} exists. Choose another name")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._model(model_id).save_adapters(folder)
        return {"path": path, "type": "save_weights_for_sampler"}

    def _snapshot(self, model_id: str, name: str) -> Result:
        model = self._model(model_id)
        self._add_sampler(name, Sampler(model.spec, adapters=model.adapters()))
        return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

    @contextmanager
    def _weights(self, sampler: Sampler) -> Iterator[Weights]:
        if sampler.spec is None:
            yield stream_folder(self.parts.config.model.path, self.parts.inputs.hf_config)
            return
        model = self._holder(sampler.spec)
        if sampler.adapters is None:
            assert sampler.checkpoint is not None
            sampler.adapters = model.read_adapters(sampler.checkpoint)
        with model.holding(sampler.adapters):
            yield model.trainer.export_weights()

    def _holder(self, spec: AdapterSpec) -> TrainedModel:
        """Return a model that can hold these adapters: one that is trained, or a new one."""
        for entry in list(self._models.values()):
            if entry.model is not None and entry.spec.shape == spec.shape:
                return entry.model
        self._make_room()
        model_id = f"{secrets.token_hex(16)}:sample"
        self._models[model_id] = _ModelEntry(spec, {}, model=self.parts.build(spec))
        model = self._models[model_id].model
        assert model is not None
        return model

    def _make_room(self) -> None:
        """Drop a model whose session has ended, if there are as many as the limit."""
        built = [name for name, entry in list(self._models.items()) if entry.model is not None]
        if len(built) < self.limits.max_models:
            return
        for name in built:
            session = self._sessions.get(name.partition(":")[0])
            idle = session is None or session.is_finished
            if session is not None and time.monotonic() - session.last_heartbeat > _IDLE_SECONDS:
                idle = True
            if idle:
                del self._models[name]
                return
        raise RequestError(
            f"{len(built)} models are in use, the limit of this server (--max-models). End the session of one, or wait "
            f"{_IDLE_SECONDS:g} seconds after its client has ended"
        )

    def _submit_new(
        self, model_id: str, spec: AdapterSpec, metadata: dict[str, str] | None, run: Callable[[], Result]
    ) -> dict[str, Any]:
        request_id = f"{model_id}:0"
        if model_id not in self._models:
            self._models[model_id] = _ModelEntry(spec, metadata or {})
        self.queue.add(Request(request_id, run))
        return {"request_id": request_id, "model_id": model_id}

    def _submit(self, model_id: str, seq_id: int, run: Callable[[], Result], num_bytes: int = 0) -> dict[str, Any]:
        """Queue a request of a model. A client numbers them from 1, and repeats a number only with the same request."""
        self._entry(model_id)
        if seq_id < 1:
            raise RequestError(f"seq_id = {seq_id}, expected 1 or more")
        self.queue.add(Request(f"{model_id}:{seq_id}", run, num_bytes=num_bytes))
        return {"request_id": f"{model_id}:{seq_id}", "model_id": model_id}

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError(f"the session {session_id!r:.80} is unknown; create a new ServiceClient", 404)
        return session

    def _entry(self, model_id: str) -> _ModelEntry:
        entry = self._models.get(model_id)
        if entry is None:
            raise RequestError(f"the model {model_id!r:.80} is unknown, or made room for another one", 404)
        return entry

    def _model(self, model_id: str) -> TrainedModel:
        model = self._entry(model_id).model
        if model is None:
            raise RequestError(f"the model {model_id} could not be built; see the error of its creation")
        return model

    def _sampler(self, name: str) -> Sampler:
        sampler = self._samplers.get(name)
        if sampler is None:
            raise RequestError(
                f"the sampling session {name!r:.80} is unknown, or made room for newer ones. Fix: keep weights under a "
                "name, by save_weights_for_sampler",
                404,
            )
        return sampler

    def _add_sampler(self, name: str, sampler: Sampler) -> None:
        """Add a sampler; beyond the limits the oldest ones are dropped, or read from their files again when needed."""
        self._samplers[name] = sampler
        held = [(each, old) for each, old in list(self._samplers.items()) if old.num_bytes]
        num_bytes = sum(old.num_bytes for _, old in held)
        for each, old in held[:-1]:
            if num_bytes <= self.limits.max_snapshot_bytes:
                break
            num_bytes -= old.num_bytes
            if old.checkpoint is None:
                del self._samplers[each]
            else:
                old.adapters = None
        while len(self._samplers) > _MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]

    def _check_base_model(self, name: str | None) -> None:
        if name != self.base_model:
            raise RequestError(f"base_model = {name!r:.120}, and this server has {self.base_model!r} (--base-model)")

    def _saved_folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise RequestError(f"{path!r:.120} is no path of this server: tinker://MODEL/weights/NAME")
        return self.folder / match[1].replace(":", "-") / match[2] / match[3]
