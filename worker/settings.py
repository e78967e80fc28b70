"""All settings of a worker. Flags override `LLORCH_*` variables, which override a TOML file, which
overrides the defaults.

This module defines names, ranges and help texts; `flags` builds the command line from them, and
`setting_faults` explains a wrong value. Settings are read once, on the main thread, before anything
else runs, and are frozen from then on.
"""

# ruff: noqa: E501 - the settings are a table, one a line
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from ipaddress import ip_address
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import urlsplit

import pydantic_core
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from worker.errors import ConfigError, flag, wrong_value
from worker.expectations import closest
from worker.installation import default_cache_dir
from worker.setting_faults import (
    ENV_ONLY,
    ENV_PREFIX,
    explain,
    read_toml,
    set_variables,
    variable_of,
    without_secrets,
)
from worker.setting_files import (
    check_certificate,
    check_chat_template,
    check_keys,
    check_store,
)
from worker.wire.adapters import Adapter, parse_adapter, parse_control_vector
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_settings import EngineSettings
from worker.wire.overrides import parse_override, separated
from worker.wire.sampling import PARAMETERS, order_of

BACKEND_FIELDS: Mapping[str, BackendName] = {
    field: name for name, backend in BACKENDS.items() for field in backend.fields
}
"""Settings that only one command has."""
ALIASES = {
    "model": "MODEL_PATH", "host": "BIND_ADDR", "port": "BIND_ADDR", "cuda_device": "CUDA_DEVICE"
}  # fmt: skip
"""Settings with a second variable, the one that other workers of a pool read."""
OTHER_FILES = 64
"""The most files that a worker's process has open in addition to its connections."""
SWITCHES = ("enable_thinking", "thinking")
"""The variables that switch reasoning on or off in chat templates."""
_VISIBLE = r"^[\x21-\x7e]+$"
_SENDABLE = r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$"
"""What a header's value can be: spaces at its ends would be stripped."""
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
# A Kubernetes Service named "llorch-…" puts such variables into every pod of its namespace.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_\w+)?)$")


def _setting(default: Any, group: str, text: str, **limits: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"group": group}, **limits)


def _separated(value: Any) -> Any:
    """Split a text such as `a,b`, which comes from a variable; keep a list from a flag or file."""
    return (
        tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    )


def _each_separated(value: Any) -> Any:
    """Split a text such as `a,b`, or each text of a list, which comes from a repeated flag."""
    given = value if isinstance(value, list | tuple) else [value]
    parts = (_separated(each) if isinstance(each, str) else (each,) for each in given)
    return tuple(part for each in parts for part in each)


def _order(value: Any) -> tuple[str, ...]:
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(each, str) for each in given):
        raise ValueError("must be a text, or a list of texts")
    return order_of(value if isinstance(value, str) else given)


def _file_name(value: Any) -> Any:
    """Refuse an empty text, which `Path` would read as the working folder."""
    if value == "":
        raise ValueError("must be a text of at least 1 character")
    return value


def _object(value: Any) -> Any:
    """Read a text as JSON. A table of the TOML file is limited to what JSON can express."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:
        raise ValueError('must be a JSON object such as {"name": 1}') from error


def _overrides(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else [value]
    each = tuple(one for text in texts for one in separated(str(text)))
    _named_once("key", [parse_override(text)[0] for text in each])
    return each


def _adapters(given: tuple[str, ...]) -> tuple[str, ...]:
    _named_once("adapter", [parse_adapter(each).name for each in given])
    return given


def _named_once(kind: str, names: list[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"must name each {kind} once; {twice[0]!r} is given twice")


def _each(check: Callable[[str], object]) -> AfterValidator:
    """A validator that leaves texts unchanged; `check` raises `ValueError` for a wrong one."""

    def checked(given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            check(each)
        return given

    return AfterValidator(checked)


def _http_url(url: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_http and url.isprintable() and " " not in url:
            return url
    raise ValueError("must be a URL such as http://manager:9200/ready")


def _off_or_in_range(interval_ms: int) -> int:
    if interval_ms != 0 and not 250 <= interval_ms <= 1000:
        raise ValueError("must be 0 (off) or from 250 to 1000 milliseconds")
    return interval_ms


def _media_host(text: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.netloc != text or parts.username is not None:
        raise ValueError(f"must be HOST or HOST:PORT, such as pictures.example; {text!r} is not")
    return host.removesuffix("."), port


def check_host(text: str) -> str:
    """Return a host name or address unchanged; raises `ValueError` for anything else."""
    try:
        if not _HOST_NAME.fullmatch(text):
            ip_address(text)
    except ValueError:
        what = "must be a host name or an address, without scheme and port"
        raise ValueError(f"{what}; {text!r} is not") from None
    return text


def _check_origin(text: str) -> None:
    scheme, _, host = text.rstrip("/").partition("://")
    if text != "*" and not (scheme and host and "/" not in host):
        raise ValueError(f"must be an origin such as https://chat.example, or *; {text!r} is not")


def check_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a chat template: a switch must be a boolean, since a template takes any
    text for true, even "false"."""
    for name in SWITCHES:
        if isinstance(given.get(name), str):
            raise ValueError(f"must have true or false as {name}, not a text")
    return given


def _pair(value: Any) -> Any:
    """Read two numbers from `1,9` or from a list; `None` stays."""
    if value is None:
        return None
    numbers = _each_separated(value)
    if len(numbers) != 2:
        raise ValueError("must be two numbers, such as 1,9")
    return numbers


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1)]
File = Annotated[Path, BeforeValidator(_file_name)]
Names = Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_separated)]
Hosts = Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_each_separated)]
Indices = Annotated[
    tuple[Annotated[int, Field(ge=0, le=255)], ...],
    NoDecode,
    BeforeValidator(_each_separated),
    Field(min_length=1, max_length=16),
]
Range = Annotated[
    tuple[Annotated[int, Field(ge=1, le=512)], Annotated[int, Field(ge=1, le=512)]] | None,
    NoDecode,
    BeforeValidator(_pair),
]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
Variables = Annotated[
    dict[str, Any], NoDecode, BeforeValidator(_object), AfterValidator(check_variables)
]
Order = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_order)]
OutputType = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q4_0",
    "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip
"""Types of a converted file's weights; `convert.output_types` has the details of each."""


_READ_FROM_TEXT: Mapping[Any, Any] = {
    tuple[int, ...]: Indices,
    tuple[int, int] | None: Range,
    "control_vector": Annotated[Names, _each(parse_control_vector)],
    "override_kv": Annotated[tuple[str, ...], NoDecode, BeforeValidator(_overrides)],
}
"""Types for the engine's settings that pydantic cannot read by itself, by their annotation or
name."""
_ENGINE_FIELDS = {each.name: each for each in dataclasses.fields(EngineSettings)}
if TYPE_CHECKING:
    _TableFields = BaseSettings
else:
    # For users, the engine's settings and the samplers' parameters are settings like all others.
    _TableFields = create_model(
        "_TableFields",
        __base__=BaseSettings,
        **{
            name: (
                _READ_FROM_TEXT.get(name, _READ_FROM_TEXT.get(annotation, annotation)),
                Field(_ENGINE_FIELDS[name].default, **_ENGINE_FIELDS[name].metadata),
            )
            for name, annotation in get_type_hints(EngineSettings).items()
            if name != "backend"
        },
        **{
            name: (
                Annotated[int if known.is_integer else float, Field(allow_inf_nan=False)] | None,
                _setting(
                    None,
                    "sampling",
                    known.text,
                    ge=known.range[0],
                    le=known.range[1],
                ),
            )
            for name, known in PARAMETERS.items()
        },
    )


class Settings(_TableFields):
    """One worker's settings. Use `Settings.load`; only tests call the constructor."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    backend: BackendName = _setting("cpu", "", "set by the command")

    # fmt: off
    model: Name | None = _setting(None, "model", "an alias from the models file, a .gguf file, a folder of SafeTensors, hf:owner/repo:Q4_K_M@revision or hf:owner/repo@revision::file=name.gguf; default: the bundled tiny model")
    lora: Annotated[Names, AfterValidator(_adapters)] = _setting((), "model", "[NAME=]FILE[:SCALE], repeatable: a LoRA adapter, as a GGUF file or a PEFT folder; requests select it by naming NAME as their model; without NAME=, it applies to all requests that select no adapter; SCALE is 1 by default")
    draft: Name | None = _setting(None, "model", "a small model with the same vocabulary, named like --model, that guesses ahead for a stream that runs alone")
    mmproj: Name | None = _setting(None, "model", "FILE: the projector for pictures and sounds; default: the smallest one in the model's repository, or the only matching one beside the model file; none or --no-mmproj: text only")
    models_file: File | None = _setting(None, "model", "the models.toml that defines aliases; default: the one in the working folder, else the one that comes with the worker")
    outtype: OutputType = _setting("q8_0", "model", "weight type of converted SafeTensors")
    cache_dir: File | None = _setting(None, "model", "folder for downloads and conversions; default: llorch-worker in $XDG_CACHE_HOME or ~/.cache")
    worker_id: str = Field(default_factory=lambda: str(uuid.uuid4()), min_length=1, max_length=200, pattern=_VISIBLE, description="name of this worker in its pool; default: a new UUID", json_schema_extra={"group": "server"})
    host: Hosts = _setting(("127.0.0.1",), "server", "an address to listen on, or a name for all of its addresses, repeatable; the worker announces the first one", min_length=1, max_length=16)
    port: Port = _setting(8080, "server", "port to listen on; 0: any free port")
    api_prefix: str = _setting("", "server", "a prefix of all the worker's paths, such as /llm", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    uds: Name | None = _setting(None, "server", "a Unix socket to listen on, instead of --host and --port; the umask decides who may connect")
    ssl_certfile: Name | None = _setting(None, "server", "certificate chain in PEM format; the worker then serves HTTPS")
    ssl_keyfile: Name | None = _setting(None, "server", "the certificate's private key in PEM format")
    served_model_name: Names = _setting((), "server", "a model name, repeatable, that this worker serves in OpenAI's and the other dialects; default: any name")
    strict: bool = _setting(False, "server", "reject fields that OpenAI's and the other dialects' routes do not know, instead of ignoring them and naming them in x-ignored-fields")
    reasoning: Literal["none", "auto", "on", "off"] = _setting("auto", "chat", "whether the model reasons: on, off, or auto, as its chat template decides; the reasoning is returned apart from the answer, in reasoning_content; none: like auto, but the reasoning stays in the text")
    reasoning_effort: Annotated[Name | None, AfterValidator(lambda word: None if word == "default" else word)] = _setting(None, "chat", "how much the model reasons: none, minimal, low, medium, high or another word that its chat template knows; the word default leaves it to the template")
    reasoning_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] = _setting(-1, "chat", "maximum tokens of reasoning in an answer; 0: none, -1: no limit")
    reasoning_budget_message: str = _setting("", "chat", "text that is inserted when the reasoning budget is spent, before the reasoning is closed", max_length=4096)
    chat_template_kwargs: Variables | None = _setting(None, "chat", "a JSON object of variables for the chat template")
    allow_host: Annotated[Names, _each(check_host)] = _setting((), "server", "a host name, repeatable, that the Host header may have besides the worker's own names")
    allow_origin: Annotated[Names, _each(_check_origin)] = _setting((), "server", "a web origin such as https://chat.example, repeatable, whose pages may use this worker; *: any")
    allow_media_host: Annotated[Names, _each(_media_host)] = _setting((), "server", "HOST or HOST:PORT, repeatable, from which the worker fetches pictures and sounds that a request gives as http(s) URLs; *: any, except that addresses of private networks must be listed")
    worker_token: str | None = _setting(None, "server", "bearer token that clients must send", repr=False, pattern=_SENDABLE)
    api_key_file: Name | None = _setting(None, "server", "a file of keys that clients may send besides the token, one NAME:KEY per line; logs and metrics show the name")
    drain_timeout: Annotated[float, Field(ge=0, le=86400)] = _setting(30.0, "server", "seconds that running streams have to finish when the worker stops")
    page: bool = _setting(True, "server", "serve the worker's status at /, a chat at /chat/ and the API's documentation at /docs/")
    keepalive: Annotated[float, Field(ge=0, le=3600)] = _setting(15.0, "server", "seconds between the signs of life on a silent stream: comment lines, or spaces in a stream of JSON lines; 0: off")
    slow_reader_timeout: Seconds = _setting(30.0, "server", "seconds that a client may leave its answer unread before it is disconnected")
    metrics_interval_ms: Annotated[int, AfterValidator(_off_or_in_range)] = _setting(500, "server", "milliseconds between the metrics events of a stream, 250 to 1000; 0: off")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "server", "lowest level that is logged")
    log_format: Literal["auto", "json", "console"] = _setting("auto", "server", "json: JSON lines; console: readable lines; auto: json, but on a terminal console, which with the default --log-level shows the progress of the start, then only warnings")
    config: File | None = _setting(None, "server", "TOML file that sets any of these settings")
    samplers: Order | None = _setting(None, "sampling", "the samplers to use, in order: names separated by ; or commas, or llama.cpp's letters")

    callback_url: HttpUrl | None = _setting(None, "pool", "URL of the pool manager that receives the ready callback")
    callback_token: str | None = _setting(None, "pool", "bearer token that the worker sends to the pool manager", repr=False, pattern=_SENDABLE)
    callback_timeout: Seconds = _setting(60.0, "pool", "seconds for which the callback is retried")
    callback_optional: bool = _setting(False, "pool", "keep serving even if the callback fails for good")
    heartbeat_url: HttpUrl | None = _setting(None, "pool", "URL of the pool manager that receives heartbeats")
    heartbeat_interval: Seconds = _setting(15.0, "pool", "seconds between heartbeats")
    advertise_host: Annotated[Name, AfterValidator(check_host)] | None = _setting(None, "pool", "host name that is announced to the pool manager instead of --host")

    n_gpu_layers: str | None = _setting(None, "device", "layers on the device: \"all\" on a GPU, \"0\" on a CPU; nothing in between is possible")
    max_queued_requests: Count = _setting(256, "limits", "requests that may wait for a slot")
    max_queued_prompt_tokens: Count = _setting(131072, "limits", "prompt tokens that may wait for a slot")
    max_prompt_chars: Count | None = _setting(None, "limits", "maximum characters of a prompt on /execute and /v1/inference; default: only the context length limits it")
    max_tokens_out: Count | None = _setting(None, "limits", "maximum of a request's max_tokens, and its value in requests without one (on /v1/completions: 16); default: the context length")
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] | None = _setting(None, "limits", "maximum bytes of a request body; default: 4 MiB, or 16 MiB if the model takes pictures or sounds")
    sleep_idle_seconds: Seconds | None = _setting(None, "limits", "seconds without a request after which the engine ends and frees its memory, until the next request starts it again; default: never")
    resume_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = _setting(300.0, "limits", "seconds for which a stream with X-Llorch-Resume or X-Conversation-Id continues without a reader and stays available; 0: not at all")
    resume_mib: Count = _setting(64, "limits", "maximum MiB of all such streams together")
    stall_timeout: Seconds = _setting(60.0, "limits", "seconds without progress after which the engine counts as stalled and is replaced")
    survive_crashes: Annotated[int, Field(ge=0, le=1000)] = _setting(1, "limits", "engine crashes that a running stream survives; 0: the first one ends it")
    crash_limit: Annotated[int, Field(ge=1, le=1000)] = _setting(5, "limits", "engine crashes within --crash-window that the worker survives")
    crash_window: Seconds = _setting(300.0, "limits", "seconds within which --crash-limit counts crashes")
    # fmt: on

    @cached_property
    def engine(self) -> EngineSettings:
        """The settings of the engine process, as the pipe carries them."""
        return EngineSettings(**{name: getattr(self, name) for name in _ENGINE_FIELDS})

    @cached_property
    def sampling(self) -> tuple[tuple[str, Any], ...]:
        """The sampling defaults that the settings give, by name."""
        given = ((name, getattr(self, name)) for name in (*PARAMETERS, "samplers"))
        return tuple((name, value) for name, value in given if value is not None)

    @property
    def certificate(self) -> tuple[str, str] | None:
        """The files of the certificate and of its key."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return os.path.expanduser(self.ssl_certfile), os.path.expanduser(self.ssl_keyfile)

    @property
    def socket_path(self) -> str | None:
        """The path of the Unix socket to listen on instead of an address, if there is one."""
        return None if self.uds is None else os.path.expanduser(self.uds)

    @property
    def needs_key(self) -> bool:
        """Whether a client must send the token or a key."""
        return self.worker_token is not None or self.api_key_file is not None

    @property
    def command(self) -> str:
        return f"llorch-{self.backend}"

    @property
    def cache_path(self) -> Path:
        """The cache folder in use; it may not exist yet."""
        return Path(os.path.expanduser(self.cache_dir or default_cache_dir())).absolute()

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of `lora`, in order; their sizes are not known yet."""
        return tuple(map(parse_adapter, self.lora))

    @cached_property
    def media_hosts(self) -> tuple[tuple[str, int | None], ...]:
        """`allow_media_host` as hosts and ports; without a port, any."""
        return tuple(map(_media_host, self.allow_media_host))

    @field_validator("*", mode="before")
    @classmethod
    def _in_any_case(cls, value: Any, info: ValidationInfo) -> Any:
        """Words are read in any case: types of weights are usually written like Q4_K_M."""
        is_word = isinstance(value, str) and words_of(cls.model_fields[info.field_name or ""])
        return value.lower() if is_word else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field, why in self._conflicts():
            value = getattr(self, field)
            shown = without_secrets(value) if field.endswith("_url") else value
            raise wrong_value(field, shown, f"but {why}")
        return self

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Each setting whose value conflicts with others, and the reason."""
        engine = self.engine
        possible = ("all", "-1") if engine.on_gpu else ("0",)
        if self.n_gpu_layers not in (None, *possible):
            why = f"{self.command} keeps the whole model on its device"
            yield "n_gpu_layers", f"{why}: only {possible[0]!r} is possible"
        if len(set(engine.device_indices)) < len(engine.device_indices):
            yield BACKENDS[self.backend].fields[0], "it names a device twice"
        if self.backend == "metal" and len(engine.device_indices) > 1:
            yield "metal_device", "a Mac has one GPU: only one can be named"
        for adapter in self.adapters:
            if adapter.name in self.served_model_name:
                yield "lora", f"{adapter.name!r} is a name of the model itself"
        if engine.kv_store is not None and not engine.prefix_cache:
            yield "kv_store", "it stores the prefix cache, which --no-prefix-cache turns off"
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given = "ssl_certfile" if self.ssl_keyfile is None else "ssl_keyfile"
            yield given, "--ssl-certfile and --ssl-keyfile go together"
        if self.uds is not None and (self.callback_url or self.heartbeat_url):
            yield "uds", "a pool manager cannot reach a worker on a Unix socket"
        for name in ("callback_url", "heartbeat_url"):
            if self.callback_token and "@" in urlsplit(getattr(self, name) or "").netloc:
                yield name, "its user and password would be sent instead of LLORCH_CALLBACK_TOKEN"
        if engine.rope_scale is not None and engine.rope_freq_scale is not None:
            yield "rope_scale", "--rope-freq-scale, its reciprocal, is given as well: give only one"
        for name in ("rope_scale", "rope_freq_scale"):
            if engine.rope_scaling == "none" and getattr(self, name) is not None:
                yield name, "it has no effect with --rope-scaling none"
        if (layers := engine.control_vector_layer_range) is not None:
            if not engine.control_vector:
                yield "control_vector_layer_range", "there is no --control-vector"
            if layers[0] > layers[1]:
                yield "control_vector_layer_range", "its first layer comes after its last"
        if engine.speculate == "draft" and self.draft is None:
            yield "speculate", "there is no --draft model"
        if self.draft is not None and engine.speculate not in ("auto", "draft"):
            yield "draft", f"--speculate is {engine.speculate!r}: nothing would use it"
        for name in ("micro_batch", "slots"):
            if getattr(self, name) > engine.batch:
                yield name, f"it must not be larger than --batch, which is {engine.batch}"

    def check_machine(self) -> None:
        """Raises `ConfigError` for a setting that this machine cannot meet. It is separate because
        a fleet's settings are read on another machine."""
        n_cpus = os.cpu_count() or 1
        if (self.engine.threads or 0) > n_cpus:
            why = f"but this machine has {n_cpus} CPUs: every computation would wait for its slowest thread"
            raise wrong_value("threads", self.engine.threads, why)
        _, n_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        if n_files <= OTHER_FILES and n_files != resource.RLIM_INFINITY:
            raise ConfigError(
                f"A process can have only {n_files} files open here (ulimit -n); a worker needs "
                f"{OTHER_FILES}, and one more for each connection."
            )

    def file_checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """The name and check of each file, apart from models, that the settings require. A check
        returns a description of what it found, or raises `ConfigError`."""
        if self.certificate is not None:
            yield "certificate", partial(check_certificate, self.certificate)
        if self.engine.chat_template is not None:
            yield "chat template", partial(check_chat_template, self.engine.chat_template)
        if self.engine.kv_store is not None:
            folder = Path(os.path.expanduser(self.engine.kv_store))
            yield "kv store", partial(check_store, folder)
        if self.api_key_file is not None:
            yield "keys", partial(check_keys, self.api_key_file)

    def check_files(self) -> None:
        """Raises `ConfigError` for the first file that would make the start fail."""
        for _, check in self.file_checks():
            check()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        flags = init_settings()
        file = _config_file(flags)
        backend = flags.get("backend", "cpu")
        return (
            init_settings,
            env_settings,
            InitSettingsSource(cls, _aliases(backend)),
            InitSettingsSource(cls, _file(Path(file), backend) if file else {}),
        )

    @classmethod
    def load(cls, backend: BackendName, flags: Mapping[str, Any]) -> Settings:
        """Load the settings; `flags` holds only the flags that were given. Raises `ConfigError`."""
        _refuse_unknown_environment(backend)
        try:
            return cls(**{**flags, "backend": backend})
        except ValidationError as error:
            file = _config_file(flags)
            others = {name: f"{name} in {file}" for name in FIELDS} if file else {}
            others |= {name: each for name, each in ALIASES.items() if os.environ.get(each)}
            raise explain(error, flags, list(FIELDS), others) from None


FIELDS: Mapping[str, FieldInfo] = {
    name: info
    for is_engines in (False, True)
    for name, info in Settings.model_fields.items()
    if (name in _ENGINE_FIELDS) is is_engines and name != "backend"
}
"""Every setting that a user can give, by name; the engine's come last."""


def group_of(info: FieldInfo) -> str:
    """The group of `--help` that lists the setting: a key of `flags.GROUPS`."""
    assert isinstance(info.json_schema_extra, dict)
    return str(info.json_schema_extra["group"])


def _aliases(backend: BackendName) -> dict[str, Any]:
    """The settings that the variables of `ALIASES` give."""
    values: dict[str, Any] = {}
    if model := os.environ.get("MODEL_PATH"):
        values["model"] = model
    if address := os.environ.get("BIND_ADDR"):
        match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>\d+)", address)
        if match is None or int(match["port"]) > 65535:
            raise ConfigError(
                f"BIND_ADDR is {address!r}; it must be host:port, such as 127.0.0.1:8080.",
                field="host",
            )
        values["host"] = match["v6"] or match["host"]
        values["port"] = match["port"]
    if backend == "cuda" and (device := os.environ.get("CUDA_DEVICE")):
        values["cuda_device"] = device
    return values


def _config_file(flags: Mapping[str, Any]) -> str | None:
    """The config file that the flag names, or else the variable."""
    given: str | None = flags.get("config")
    return given or next((os.environ[each] for each in set_variables("config")), None)


def _file(path: Path, backend: BackendName) -> dict[str, Any]:
    """The settings in the config file. Its keys are spelled as fields or as flags."""
    table = read_toml(Path(os.path.expanduser(path)), "config file", "config")
    known = [name for name in FIELDS if name not in ENV_ONLY and name != "config"]
    names = [key.replace("-", "_") for key in table]
    if twice := [name for name in names if names.count(name) > 1]:
        message = f"{twice[0]} in {path} is given twice, with - and with _"
        raise ConfigError(message, field=twice[0])
    values = dict(zip(names, table.values(), strict=True))
    for name in values:
        if name in ENV_ONLY:
            raise ConfigError(
                f"{name} in {path} is a secret; set the environment variable "
                f"{variable_of(name)} instead.",
                field=name,
            )
        if name not in known:
            hint = closest(name, known) or _listed(backend)
            raise ConfigError(f"{name} in {path} is not a setting{hint}", field=name)
        refuse_by_form(name, values[name], f"{name} in {path}", backend)
    return values


def refuse_by_form(name: str, value: Any, origin: str, backend: BackendName) -> None:
    """Raises `ConfigError` for a value in a file that no flag of the backend's command could have."""
    _refuse_other_backend(name, origin, backend)
    given = value if isinstance(value, list) else [value]
    if any(isinstance(each, str) and "\0" in each for each in given):
        # Flags, variables and file names cannot have it.
        raise ConfigError(f"{origin} has the character U+0000.", field=name)
    if isinstance(value, bool) and not is_switch(FIELDS[name]):
        raise ConfigError(f"{origin} is {str(value).lower()}; it is not a switch.", field=name)


def words_of(info: FieldInfo) -> list[str]:
    """The words that a setting can have; empty if it is not limited to some."""
    kinds = get_args(info.annotation)
    words = [word for kind in kinds for word in get_args(kind) or (kind,)]  # of `Literal | None`
    return [word for word in words if isinstance(word, str)]


def is_switch(info: FieldInfo) -> bool:
    return bool in (info.annotation, *get_args(info.annotation))


def flags_for(field: str, value: Any) -> list[str]:
    """The flags that set a field of `Settings` to this value."""
    name, info = flag(field), FIELDS[field]
    if is_switch(info):
        return [name if value else flag(f"no_{field}")]
    if isinstance(value, tuple) and get_origin(info.annotation) is not tuple:
        value = (";" if field == "samplers" else ",").join(map(str, value))
    texts = value if isinstance(value, tuple) else (value,)
    return [f"{name}={json.dumps(each) if isinstance(each, dict) else each}" for each in texts]


def _refuse_unknown_environment(backend: BackendName) -> None:
    spelled: dict[str, str] = {}
    for variable, value in os.environ.items():
        if not variable.upper().startswith(ENV_PREFIX):  # case is ignored
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name in FIELDS:
            if value:
                _refuse_other_backend(name, variable, backend)
                if (other := spelled.setdefault(name, variable)) != variable:
                    message = f"{other} and {variable} set the same setting; unset one"
                    raise ConfigError(f"{message}.", field=name)
        elif not _SERVICE_LINK.search(variable):
            known = [each.upper() for each in FIELDS]
            hint = closest(name.upper(), known, ENV_PREFIX) or _listed(backend)
            raise ConfigError(
                f"The environment variable {variable} is not a setting{hint}", field=name
            )


def _listed(backend: BackendName) -> str:
    """The end of the message for an unknown setting."""
    return f"; llorch-{backend} --help lists them."


def _refuse_other_backend(name: str, origin: str, backend: BackendName) -> None:
    owner = BACKEND_FIELDS.get(name)
    if owner is not None and owner != backend:
        raise ConfigError(
            f"{origin} is set, but {name} applies to llorch-{owner} only, not to llorch-{backend}.",
            field=name,
        )
