"""What every route reads: the collaborators of the HTTP surface, handed in by `lifecycle`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from worker.api.tools.answer import Conventions, conventions_of
from worker.api.turnstile import Turnstile
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.supervisor import Supervisor


@dataclass(slots=True)
class AppState:
    """Lives on the API process's event loop; nothing in it is shared with another thread."""

    settings: Settings
    supervisor: Supervisor
    metrics: Metrics
    worker_id: str
    model_ref: str
    incarnation: str
    started_at: float
    """On the `time.monotonic()` clock."""
    request_shutdown: Callable[[], None]
    accepted: Turnstile = field(default_factory=Turnstile)
    """Accepted jobs pass through it, one at a time."""
    body_bytes: int = 0
    """Of bodies that are being read."""

    def draining(self) -> bool:
        return self.supervisor.draining

    @property
    def model_name(self) -> str:
        """What OpenAI's and the other dialects call the model: its alias, or its file's stem."""
        if self.settings.served_model_name:
            return self.settings.served_model_name[0]
        reference, _, file = self.model_ref.partition("::file=")
        name = (file or reference.partition("@")[0]).rstrip("/").rsplit("/", 1)[-1]
        return name.removesuffix(".gguf")

    def serves(self, name: str | None) -> bool:
        """Whether a client may call the model so; every name is taken where none was set."""
        names = self.settings.served_model_name
        return name is None or not names or name in names

    @property
    def vocab_size(self) -> int:
        info = self.supervisor.info
        return info.model.vocab_size if info is not None else 2**31 - 1

    @property
    def max_tokens_out(self) -> int:
        """Of one request: the setting, else what the context holds."""
        info, limit = self.supervisor.info, self.settings.max_tokens_out
        if limit is not None:
            return limit
        return info.model.context_length if info is not None else 2**31 - 1

    @property
    def chat_template(self) -> str:
        """The text of the model's templates, the one for chats with tools included."""
        info = self.supervisor.info
        metadata = info.model.metadata if info is not None else {}
        names = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
        return "\n".join(str(metadata[name]) for name in names if name in metadata)

    @property
    def conventions(self) -> Conventions:
        """How the model writes its answers."""
        return conventions_of(self.chat_template)


def state_of(request: Request) -> AppState:
    state: AppState = request.app.state.worker
    return state
