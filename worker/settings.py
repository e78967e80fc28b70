"""All settings of a worker: flags over `LLORCH_*` environment over a TOML file over defaults.

Owns their names, ranges and help texts, and the one sentence that a wrong one is answered with.
Read once, on the main thread, before anything else runs; frozen from then on. The flags
themselves are built from these fields in `worker/cli.py`.
"""

# ruff: noqa: E501 - the settings are a table, one a line
from __future__ import annotations

import difflib
import os
import re
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from worker.errors import ConfigError
from worker.messages import Backend

ENV_PREFIX = "LLORCH_"
ENV_ONLY = frozenset({"worker_token", "callback_token"})
"""Secrets: a flag would show in the process list, a file would be committed."""
BACKEND_FIELDS: Mapping[str, Backend] = {"cuda_device": "cuda", "metal_device": "metal"}
"""Settings that exist on one command only."""
# A Kubernetes Service called "llorch-…" puts such variables into every pod of its namespace.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_\w+)?)$")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _setting(default: Any, group: str, text: str) -> Any:
    return Field(default, description=text, json_schema_extra={"group": group})


class Settings(BaseSettings):
    """One worker's settings. `Settings.load` is the way in; the constructor is for tests."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    backend: Backend = _setting("cpu", "", "set by the command")

    # fmt: off
    model: str | None = _setting(None, "model", "an alias of the models file, a .gguf file, a folder of SafeTensors, or hf:owner/repo@revision::file=name.gguf; without it the bundled tiny model")
    models_file: Path | None = _setting(None, "model", "the models.toml to look aliases up in")
    outtype: Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q4_0", "q3_k_m", "q2_k"] = _setting("q8_0", "model", "weight type when SafeTensors are converted")
    cache_dir: Path | None = _setting(None, "model", "where downloads and conversions go; without it $XDG_CACHE_HOME/llorch-worker")

    worker_id: str = Field(default_factory=lambda: str(uuid.uuid4()), min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$", description="name of this worker towards the pool; without it a fresh UUID", json_schema_extra={"group": "server"})
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on", json_schema_extra={"group": "server"})
    port: Port = _setting(8080, "server", "port to listen on; 0 takes any free one")
    worker_token: str | None = Field(default=None, repr=False, min_length=1, description="bearer token that clients must send", json_schema_extra={"group": "server"})
    drain_timeout: Annotated[float, Field(ge=0, le=86400)] = _setting(30.0, "server", "seconds that running streams get to finish on a stop")
    keepalive: Annotated[float, Field(ge=0, le=3600)] = _setting(15.0, "server", "seconds between comment lines on a silent stream; 0 = off")
    slow_reader_timeout: Seconds = _setting(30.0, "server", "seconds a client may leave its stream unread before it is cut off")
    metrics_interval_ms: int = _setting(500, "server", "milliseconds between metrics events of a stream, 250 to 1000; 0 = off")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "server", "least severe level to log")
    log_format: Literal["auto", "json", "console"] = _setting("auto", "server", "auto: console on a terminal, JSON lines else")
    config: Path | None = _setting(None, "server", "TOML file with any of these settings")

    callback_url: str | None = _setting(None, "pool", "where the pool manager takes the ready callback")
    callback_token: str | None = Field(default=None, repr=False, min_length=1, description="bearer token for the pool manager", json_schema_extra={"group": "pool"})
    callback_timeout: Seconds = _setting(60.0, "pool", "seconds to keep trying the callback")
    callback_optional: bool = _setting(False, "pool", "serve even if the callback fails for good")
    heartbeat_url: str | None = _setting(None, "pool", "where the pool manager takes heartbeats")
    heartbeat_interval: Seconds = _setting(15.0, "pool", "seconds between heartbeats")
    advertise_host: str | None = Field(default=None, min_length=1, description="host name that the pool manager should use in place of --host", json_schema_extra={"group": "pool"})

    cuda_device: Annotated[int, Field(ge=0, le=255)] = _setting(0, "device", "index of the CUDA device")
    metal_device: Annotated[int, Field(ge=0, le=255)] = _setting(0, "device", "index of the Metal device")
    n_gpu_layers: str | None = _setting(None, "device", "layers on the device: \"all\" on a GPU, \"0\" on a CPU, nothing between")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = _setting(None, "device", "compute threads; without it from the CPU budget of the container")
    mmap: bool | None = _setting(None, "device", "map the model file; without it on for CPUs, off for GPUs")
    mlock: bool = _setting(False, "device", "keep the model from being swapped out")
    blas: Literal["on", "off"] = _setting("off", "device", "use the BLAS plug-in for prompts, where the wheel has one")

    slots: Annotated[int, Field(ge=1, le=256)] = _setting(8, "engine", "sequences that run at once")
    context_length: Annotated[int, Field(ge=32, le=2**24)] | None = _setting(None, "engine", "tokens that one sequence may hold; without it the model's own, as far as it fits")
    batch: Annotated[int, Field(ge=1, le=2**20)] = _setting(2048, "engine", "tokens in one decode call at most")
    micro_batch: Annotated[int, Field(ge=1, le=2**20)] = _setting(512, "engine", "tokens in one compute graph at most")
    prefill_budget: Annotated[int, Field(ge=1, le=2**20)] = _setting(256, "engine", "prompt tokens in a step; a prompt that is alone gets a micro-batch")
    kv_type: Literal["f16", "q8_0", "f32"] = _setting("f16", "engine", "type of the KV cache")
    kv_unified: bool = _setting(False, "engine", "one KV pool for all sequences")
    flash_attention: Literal["auto", "on", "off"] = _setting("auto", "engine", "flash attention")
    prefix_cache: bool = _setting(True, "engine", "reuse the cells of a shared prompt prefix")

    max_queued_requests: Count = _setting(256, "limits", "requests that may wait for a slot")
    max_queued_prompt_tokens: Count = _setting(131072, "limits", "prompt tokens that may wait for a slot")
    max_prompt_chars: Count = _setting(32768, "limits", "characters of a prompt at most")
    max_tokens_out: Count = _setting(2048, "limits", "max_tokens of a request at most, and its default")
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = _setting(4 * 2**20, "limits", "bytes of a request body at most")
    stall_timeout: Seconds = _setting(60.0, "limits", "seconds without engine progress before it counts as stalled and is replaced")
    crash_limit: Annotated[int, Field(ge=1, le=1000)] = _setting(5, "limits", "engine crashes within the window that are survived")
    crash_window: Seconds = _setting(300.0, "limits", "seconds over which crashes are counted")
    # fmt: on

    @property
    def command(self) -> str:
        return f"llorch-{self.backend}"

    @property
    def cache_path(self) -> Path:
        """The cache folder in force; not created yet."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "llorch-worker"

    @property
    def device_index(self) -> int:
        return self.metal_device if self.backend == "metal" else self.cuda_device

    @field_validator("callback_url", "heartbeat_url")
    @classmethod
    def _is_http_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://manager:9200/ready")
        return url

    @field_validator("metrics_interval_ms")
    @classmethod
    def _is_off_or_in_range(cls, interval_ms: int) -> int:
        if interval_ms != 0 and not 250 <= interval_ms <= 1000:
            raise ValueError("must be 0 (off) or from 250 to 1000 milliseconds")
        return interval_ms

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        on_gpu = self.backend in ("cuda", "metal")
        if self.n_gpu_layers is not None:
            allowed = ("all", "-1") if on_gpu else ("0",)
            if self.n_gpu_layers not in allowed:
                raise ConfigError(
                    f"--n-gpu-layers is {self.n_gpu_layers!r}, but {self.command} keeps the whole "
                    f"model on its one device: only {allowed[0]!r} is possible.",
                    field="n_gpu_layers",
                )
        for small, large in (("micro_batch", "batch"), ("slots", "batch")):
            if getattr(self, small) > getattr(self, large):
                raise ConfigError(
                    f"{flag(small)} is {getattr(self, small)}, which is more than {flag(large)} "
                    f"({getattr(self, large)}); it must not be larger.",
                    field=small,
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _AliasSource(settings_cls), _FileSource(settings_cls))

    @classmethod
    def load(cls, backend: Backend, flags: Mapping[str, Any]) -> Settings:
        """Flags as given (unset ones absent) over everything else; raises `ConfigError`."""
        _refuse_unknown_environment(backend)
        try:
            return cls(backend=backend, **flags)
        except ValidationError as error:
            raise _explain(error, flags) from None


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def closest(name: str, candidates: list[str]) -> str:
    """A `; did you mean …?` for an unknown name, or nothing."""
    match = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {match[0]}?" if match else ""


class _AliasSource(InitSettingsSource):
    """`MODEL_PATH`, `BIND_ADDR` and `CUDA_DEVICE`, which other workers of a pool read too."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, init_kwargs={})

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if model := os.environ.get("MODEL_PATH"):
            values["model"] = model
        if address := os.environ.get("BIND_ADDR"):
            match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>\d+)", address)
            if match is None:
                raise ConfigError(
                    f"BIND_ADDR is {address!r}; it must be host:port, such as 127.0.0.1:8080.",
                    field="host",
                )
            values["host"] = match["v6"] or match["host"]
            values["port"] = match["port"]
        device = os.environ.get("CUDA_DEVICE")
        if device and self.current_state.get("backend") == "cuda":
            values["cuda_device"] = device
        return values


class _FileSource(InitSettingsSource):
    """The TOML file that `--config` or `LLORCH_CONFIG` names; keys as fields or as flags."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, init_kwargs={})

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        try:
            table = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"The config file {path} cannot be read: {error.strerror}.", field="config"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The config file {path} is not TOML: {error}.", field="config"
            ) from None
        values = {key.replace("-", "_"): value for key, value in table.items()}
        known = [name for name in Settings.model_fields if name not in ENV_ONLY | {"backend"}]
        for name in values:
            if name in ENV_ONLY:
                raise ConfigError(
                    f"{name} in {path} is a secret; set the environment variable "
                    f"{ENV_PREFIX}{name.upper()} in its place.",
                    field=name,
                )
            if name not in known:
                raise ConfigError(
                    f"{name} in {path} is not a setting{closest(name, known)}", field=name
                )
            _refuse_other_backend(name, f"{name} in {path}", self.current_state.get("backend"))
        return values


def _refuse_unknown_environment(backend: Backend) -> None:
    known = [name for name in Settings.model_fields if name != "backend"]
    for variable in os.environ:
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in known:
            _refuse_other_backend(name, variable, backend)
        elif not _SERVICE_LINK.search(variable):
            hint = closest(variable, [ENV_PREFIX + each.upper() for each in known])
            raise ConfigError(
                f"The environment variable {variable} is not a setting{hint}", field=name
            )


def _refuse_other_backend(name: str, origin: str, backend: str | None) -> None:
    owner = BACKEND_FIELDS.get(name)
    if owner is not None and backend is not None and owner != backend:
        raise ConfigError(
            f"{origin} is set, but {name} applies to llorch-{owner} only, not to llorch-{backend}.",
            field=name,
        )


def _explain(error: ValidationError, flags: Mapping[str, Any]) -> ConfigError:
    """The first fault as one sentence, with where the value came from; all in `details`."""
    faults = error.errors(include_url=False)
    sentences = [_sentence(fault, flags) for fault in faults]
    fields = [str(fault["loc"][0]) for fault in faults if fault["loc"]]
    more = f" ({len(sentences) - 1} more: {', '.join(fields[1:])}.)" if len(sentences) > 1 else ""
    return ConfigError(sentences[0] + more, field=fields[0] if fields else None, errors=sentences)


def _sentence(fault: ErrorDetails, flags: Mapping[str, Any]) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "configuration"
    variable = ENV_PREFIX + name.upper()
    if name in flags:
        origin = flag(name)
    elif os.environ.get(variable):
        origin = variable
    else:
        origin = name
    given = "a secret that is too short" if name in ENV_ONLY else repr(fault["input"])
    if variable.endswith("_PORT") and str(fault["input"]).startswith("tcp://"):
        return (
            f"{origin} is {given}, which Kubernetes sets for a Service of that name; "
            "set enableServiceLinks: false in the pod or give --port."
        )
    return f"{origin} is {given}; {_expectation(fault)}."


def _expectation(fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "less_than_equal":
            return f"it must be at most {context['le']}"
        case "greater_than_equal":
            return f"it must be at least {context['ge']}"
        case "greater_than":
            return f"it must be more than {context['gt']}"
        case "int_parsing" | "int_from_float" | "int_type":
            return "it must be a whole number"
        case "float_parsing" | "float_type":
            return "it must be a number"
        case "bool_parsing" | "bool_type":
            return "it must be true or false"
        case "literal_error":
            return f"it must be one of {context['expected']}"
        case "string_pattern_mismatch":
            return "it must consist of visible ASCII characters without spaces"
        case "value_error":
            return "it " + str(context["error"])
        case _:
            return fault["msg"][0].lower() + fault["msg"][1:]
