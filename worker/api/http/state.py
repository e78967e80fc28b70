"""The collaborators that all routes share; `lifecycle` provides them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from worker.api.http.faults import fault
from worker.api.http.turnstile import Turnstile
from worker.errors import ModelNotFound, NotReady
from worker.observability.logs import digest
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.supervisor import Supervisor
from worker.wire.engine_info import EngineInfo


@dataclass(slots=True)
class AppState:
    """Belongs to the API process's event loop; no other thread uses it."""

    settings: Settings
    supervisor: Supervisor
    metrics: Metrics
    worker_id: str
    model_ref: str
    incarnation: str
    request_shutdown: Callable[[], None]
    accepted: Turnstile = field(default_factory=Turnstile)
    """Accepted jobs pass through it one at a time."""
    body_bytes: int = 0
    """Bytes of all bodies that are being read."""

    @property
    def model_name(self) -> str:
        """The model's name in answers of all dialects."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that the model is listed by: its aliases, or else its file's."""
        return self.settings.served_model_name or (self.model_file.removesuffix(".gguf"),)

    @property
    def model_file(self) -> str:
        """The name of the model's file or checkpoint, as it was asked for, without a folder."""
        reference, _, file = self.model_ref.partition("::file=")
        return (file or reference.partition("@")[0]).rstrip("/").rsplit("/", 1)[-1]

    def require_model(self, name: str | None) -> None:
        """Refuse any other model's name than the configured ones: no model stands in for another.

        Raises:
            ModelNotFound: the name is not one that this worker answers to.
        """
        served = self.settings.served_model_name
        if name is not None and served and name not in served:
            message = f"model must be {' or '.join(map(repr, self.model_names))}"
            raise ModelNotFound(message, errors=[fault("model", "unknown", message)])

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

    @property
    def vocab_size(self) -> int:
        info = self.supervisor.info
        return info.model.vocab_size if info is not None else 2**31 - 1

    @property
    def max_tokens_out(self) -> int:
        """The most tokens of one request: the setting, or else the context's length."""
        info, limit = self.supervisor.info, self.settings.max_tokens_out
        if limit is not None:
            return limit
        return info.model.context_length if info is not None else 2**31 - 1

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the model's file, once it is loaded."""
        info = self.supervisor.info
        return info.model.metadata if info is not None else {}

    @property
    def metadata_sha256(self) -> str:
        """Equal metadata has an equal digest on every worker."""
        return digest(json.dumps(dict(self.metadata), sort_keys=True, default=str))

    @property
    def chat_template(self) -> str:
        """The model's chat templates as one text, the one for tools included."""
        names = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
        return "\n".join(str(self.metadata[name]) for name in names if name in self.metadata)


def state_of(request: Request) -> AppState:
    state: AppState = request.app.state
    return state
