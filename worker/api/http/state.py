"""The state that all routes share; `lifecycle` creates it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from worker.api.http.adapters import AdapterScales
from worker.api.http.faults import is_number
from worker.api.http.one_per_turn import OnePerTurn
from worker.api.http.stream_log import Streams
from worker.errors import NotReady
from worker.installation import own_version
from worker.observability.history import History
from worker.observability.logs import digest
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.supervisor import Supervisor
from worker.wire.engine_info import EngineInfo
from worker.wire.sampling import MAX_SAMPLERS, PARAMETERS, Sampling, order_of

KEPT_REFUSALS = 16
FETCHES_AT_ONCE = 8
TEXT_BYTES = 4 * 2**20
MEDIA_BYTES = 16 * 2**20
"""Holds a phone's photograph of up to 12 MiB as base64, which is 4/3 of its size."""
_UNBOUNDED = 2**31 - 1


class ServedModel:
    """Facts about the served model, made once for each engine that becomes ready.

    Before the first one is ready, they permit everything.
    """

    def __init__(self, info: EngineInfo | None, settings: Settings) -> None:
        model = info.model if info is not None else None
        names = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
        self.info = info
        self.metadata: Mapping[str, Any] = model.metadata if model is not None else {}
        """The metadata of the model's file."""
        self.vocab_size = model.vocab_size if model is not None else _UNBOUNDED
        self.context_length = model.context_length if model is not None else _UNBOUNDED
        """The most tokens in one sequence."""
        limit = settings.max_tokens_out
        self.max_tokens_out = self.context_length if limit is None else limit
        """The most tokens that a request may generate."""
        self.max_text_bytes = settings.max_body_bytes or TEXT_BYTES
        """The most bytes of a request's body outside base64's alphabet."""
        most_bytes = MEDIA_BYTES if info is None or any(self.modalities.values()) else TEXT_BYTES
        self.max_body_bytes = settings.max_body_bytes or most_bytes
        """The most bytes of a request's body."""
        self.generates_text = model is None or model.pooling is None
        self.has_chat_template = model is None or model.has_chat_template
        self.chat_template = "\n".join(str(self.metadata[n]) for n in names if n in self.metadata)
        """The chat templates as one text, including the one for tools."""
        self.template_takes_tools = model is None or model.template_takes_tools
        """If false, the engine describes the tools in the prompt itself."""
        self.sampling = sampling_defaults(self.metadata, dict(settings.sampling))
        """Default parameters that replace those of `Sampling`, and the samplers' order: each from
        its flag, else from the model's file, else as in llama.cpp."""

    @cached_property
    def build(self) -> str:
        """llama.cpp's build in its own notation, then this worker's version. The build number is 0,
        because llama.cpp's sources for Python have none."""
        if self.info is None:
            return ""
        name = "llama_cpp_commit"
        commit = str(self.info.build.get(name) or self.info.versions.get(name))
        return f"b0-{commit[:9]}-llorch-worker-{own_version()}"

    @property
    def modalities(self) -> dict[str, bool]:
        """Whether the model accepts `vision` and `audio` input."""
        projector = self.info.projector if self.info is not None else None
        return {
            "vision": projector is not None and projector.sees,
            "audio": projector is not None and projector.hears,
        }

    @cached_property
    def metadata_sha256(self) -> str:
        """A digest of the metadata, equal on every worker with the same metadata."""
        return digest(json.dumps(dict(self.metadata), sort_keys=True, default=str))


def sampling_defaults(metadata: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """`ServedModel.sampling` for a model's file with this metadata and for these flags."""
    sequence = metadata.get("general.sampling.sequence")
    order = _known_order(sequence) if isinstance(sequence, str) else ()
    found = {"samplers": flags.get("samplers", order or Sampling(0).samplers)}
    for name, known in PARAMETERS.items():
        # Not the default of `Sampling`: at its temperature of 1, small models write nonsense.
        value = known.usual
        if known.key and is_number(own := metadata.get(f"general.sampling.{known.key}")):
            low, high = known.range
            value = min(max(own, low), high)
        if (value := flags.get(name, value)) is not None:
            found[name] = int(value) if known.is_integer else float(value)
    return found


def _known_order(sequence: str) -> tuple[str, ...]:
    """The samplers' order in a model's file, up to as many names as a request may send. Unknown
    names are left out, as in llama.cpp."""
    found: tuple[str, ...] = ()
    for name in sequence.split(";", MAX_SAMPLERS)[:MAX_SAMPLERS]:
        with suppress(ValueError):
            found += order_of((name,))
    return found


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error before it was accepted. Quotes nothing of its
    body."""

    at: float
    """Unix time in seconds."""
    path: str
    status: int
    code: str
    reason: str


class AppState:
    """Belongs to the API process's event loop; no other thread changes it."""

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        metrics: Metrics,
        worker_id: str,
        model_ref: str,
        incarnation: str,
        request_shutdown: Callable[[], None],
    ) -> None:
        self.settings, self.supervisor, self.metrics = settings, supervisor, metrics
        self.worker_id, self.model_ref, self.incarnation = worker_id, model_ref, incarnation
        self.request_shutdown = request_shutdown
        self.started_at = time.time()
        """Unix time of the worker's start."""
        self.acceptances = OnePerTurn()
        """Spreads jobs that the engine accepts together over turns of the event loop."""
        self.refusals: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)
        """The last ones, newest last."""
        self.fetches = asyncio.Semaphore(FETCHES_AT_ONCE)
        """Held by each request that fetches media, because these take as many bytes as a body."""
        self.history = History(metrics)
        self.streams = Streams(settings)
        """Streams that outlive their readers."""
        reference, _, file = model_ref.partition("::file=")
        self.model_file = (file or reference.partition("@")[0]).rstrip("/").rsplit("/", 1)[-1]
        """The name of the model's file or checkpoint as in the settings, without a folder."""
        self.model_names = settings.served_model_name or (self.model_file.removesuffix(".gguf"),)
        """All names that the model is listed under: its aliases, or else its file's name."""
        self.model_name = self.model_names[0]
        """The model's name in all dialects' answers."""
        is_named = bool(settings.served_model_name)
        self.adapters = AdapterScales(settings.adapters, self.model_names, is_strict=is_named)
        self.all_names = self.adapters.all_names
        self._served: ServedModel | None = None

    @property
    def served(self) -> ServedModel:
        info = self.supervisor.info
        if self._served is None or self._served.info is not info:
            self._served = ServedModel(info, self.settings)
        return self._served

    def require_model(self, name: str | None) -> None:
        """
        Raises:
            ModelNotFound: the name is not one that this worker answers to.
        """
        self.adapters.of(name, None)

    def name_of(self, model: str | None) -> str:
        """The name in an answer to a request for this model."""
        return model if model is not None and model in self.adapters.names else self.model_name

    def loaded(self) -> EngineInfo:
        """
        Raises:
            NotReady: the model is still loading.
        """
        if (info := self.supervisor.info) is not None:
            return info
        progress = self.supervisor.status().progress
        message = f"the model is not loaded yet ({progress.phase}, {progress.percent:.0f} %)"
        raise NotReady(message, phase=progress.phase, percent=progress.percent)
