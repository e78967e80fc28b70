"""The fleet's TOML file: the address for clients, and the groups of workers behind it.

`llorch-ray up` reads and checks it before it starts anything: a setting that a worker would refuse
is refused here, in the worker's own words.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from worker.errors import ConfigError, WorkerError
from worker.expectations import closest
from worker.models.reference import parse
from worker.setting_faults import ENV_ONLY, first_fault, read_toml
from worker.settings import FIELDS, Settings, check_host, flags_for, refuse_by_form
from worker.sockets import uri_of
from worker.wire.adapters import (
    Adapter,
    ControlVector,
    parse_adapter,
    parse_control_vector,
    with_path,
)
from worker.wire.backends import BACKENDS, BackendName

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
MAX_REPLICAS = 1000
GATEWAY_DRAIN_SECONDS = 600
"""How long a stopping gateway waits for its open streams to end."""
Seconds = Annotated[float, Field(ge=0, le=86_400)]
Text = Annotated[str, Field(min_length=1)]

FLEET_OWNED = frozenset(
    (
        "host",
        "port",
        "uds",
        "ssl_certfile",
        "ssl_keyfile",
        "api_prefix",
        "advertise_host",
        "worker_id",
        "config",
        "model",
        "log_format",
        "api_key_file",
    )
    + tuple(name for name in FIELDS if name.startswith(("callback_", "heartbeat_")))
)
"""Settings of a worker that the fleet chooses; `settings` in the file cannot set them."""
_UNSET = {n: FIELDS[n].get_default(call_default_factory=True) for n in FLEET_OWNED - {"config"}}
"""Their defaults, which hide the environment's variables."""
# Fields and settings that are paths, which can be relative to the folder of the fleet's file.
_REFERENCES = ("model", "draft")
KEY_FILES = ("token_file", "api_key_file")
_READ = ("chat_template", "models_file", "ssl_certfile", "ssl_keyfile", *KEY_FILES)
_WRITTEN = ("kv_store", "cache_dir")
_SCALED: Mapping[str, Callable[[str], Adapter | ControlVector]] = {
    "lora": parse_adapter,
    "control_vector": parse_control_vector,
}


def settings_of(backend: BackendName, given: Mapping[str, Any]) -> Settings:
    """The settings of a worker in a fleet. The environment's variables for settings that the fleet
    chooses are ignored. Raises `ConfigError`."""
    return Settings.load(backend, {**_UNSET, **given})


class Table(BaseModel):
    """A table of the file: it has no other fields, and values must already have the right type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Scaling(Table):
    """How the load decides a group's number of workers, between its minimum and maximum."""

    target: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Requests, waiting and running, that each worker should have; default: 0.8 of its slots."""
    up_delay: Seconds = 10.0
    """Seconds of too many requests after which workers are added."""
    down_delay: Seconds = 300.0
    """Seconds of too few requests after which workers are drained."""


class WorkerGroup(Table):
    """Identical workers: one model on one kind of device, `replicas` times."""

    name: Name
    """Clients use it as `model`, unless `settings` has a `served_model_name`."""
    backend: BackendName = "cpu"
    model: Text | None = None
    """A value of `llorch-<backend> --model`; default: the bundled tiny model."""
    replicas: int | tuple[int, int] = 1
    """The number of workers, or a minimum and maximum between which the load decides."""
    scaling: Scaling | None = None
    surge: bool = False
    """Whether a roll starts a new worker, once a device is free, before it stops an old one."""
    device: str | None = Field(None, min_length=1, max_length=100)
    """The Ray resource of which each replica takes one; default for CUDA and Vulkan: one `GPU` for
    each device that `settings` names."""
    settings: dict[str, Any] = {}
    """Any other setting of the worker."""

    @field_validator("replicas", mode="plain")
    @classmethod
    def _is_a_number_or_two(cls, given: object) -> int | tuple[int, int]:
        match given:
            case int() if type(given) is int and 1 <= given <= MAX_REPLICAS:
                return given
            case [least, most] if type(least) is type(most) is int and (
                1 <= least < most <= MAX_REPLICAS
            ):
                return least, most
        raise ValueError(
            f"it must be a whole number from 1 to {MAX_REPLICAS}, or a minimum and maximum: [1, 3]"
        )

    @field_validator("settings")
    @classmethod
    def _are_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        known = [name for name in FIELDS if name not in ENV_ONLY and name not in FLEET_OWNED]
        for name in given:
            if name in FLEET_OWNED and name in (*Fleet.model_fields, *cls.model_fields):
                raise ValueError(f"{name} is not a worker's setting here; put it above `settings`")
            if name in FLEET_OWNED:
                raise ValueError(f"{name} cannot be set in the file: the fleet chooses it")
            if name in ENV_ONLY:
                raise ValueError(f"{name} is a secret: set it in the environment of `up`")
            if name not in known:
                hint = closest(name, known) or "; llorch-cpu --help lists them"
                raise ValueError(f"{name} is not a setting of a worker{hint}")
        return given

    @model_validator(mode="after")
    def _suits_a_worker(self) -> Self:
        try:
            for name, value in self.settings.items():
                refuse_by_form(name, value, name, self.backend)
            settings_of(self.backend, self.settings)
        except WorkerError as error:
            raise ValueError(error.message) from None
        return self

    @model_validator(mode="after")
    def _scales_if_it_may(self) -> Self:
        if isinstance(self.replicas, int) and self.scaling is not None:
            raise ValueError("scaling needs replicas with a minimum and maximum, such as [1, 3]")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The model names that select this group: its model's and its adapters'."""
        adapters = (adapter.name for adapter in self.worker.adapters)
        return (*self._model_names, *adapters)

    @property
    def _model_names(self) -> tuple[str, ...]:
        return self.worker.served_model_name or (self.name,)

    @property
    def max_workers(self) -> int:
        return (self.replicas if isinstance(self.replicas, int) else self.replicas[1]) + self.surge

    @property
    def resources(self) -> dict[str, Any]:
        """Ray's resource options for the actor that owns a worker of this group."""
        device = self.device or BACKENDS[self.backend].ray_resource
        if device is None:
            return {"num_cpus": 0}
        if device == "GPU":
            n_devices = len(self.worker.engine.device_indices)
            return {"num_cpus": 0, "num_gpus": n_devices or 1}
        if device == "CPU":
            return {"num_cpus": 1}
        return {"num_cpus": 0, "resources": {device: 1}}

    @property
    def worker(self) -> Settings:
        """The settings of each of its workers."""
        return settings_of(self.backend, self.settings)

    def arguments(self, reserved: Sequence[str] = ()) -> list[str]:
        """The command-line flags of a worker for which Ray has reserved the GPUs `reserved`."""
        given = {name: getattr(self.worker, name) for name in self.settings}
        given |= {"served_model_name": self._model_names, **self._among(reserved)}
        if self.model is not None:
            given["model"] = self.model
        return [each for name, value in given.items() for each in flags_for(name, value)]

    def _among(self, reserved: Sequence[str]) -> dict[str, Any]:
        """The setting of the worker's devices, whose indices count among the reserved ones. With
        CUDA none is needed, since Ray hides all other devices; Vulkan shows them all."""
        backend, indices = BACKENDS[self.backend], self.worker.engine.device_indices
        if backend.shown_by in (None, "CUDA_VISIBLE_DEVICES") or max(indices) >= len(reserved):
            return {}
        return {backend.fields[0]: ",".join(reserved[index] for index in indices)}


class Fleet(Table):
    """The whole file."""

    host: Text = "127.0.0.1"
    """The address that clients connect to."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    ssl_certfile: Text | None = None
    ssl_keyfile: Text | None = None
    """The gateway's certificate and key in PEM format; with them it serves HTTPS."""
    token_file: Text | None = None
    """A file on the head node with the token that clients must send."""
    api_key_file: Text | None = None
    """A file on the head node with further keys, one NAME:KEY per line. Logs and metrics show the
    name."""
    gateways: Annotated[int, Field(ge=1, le=100)] = 1
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 16 * 2**20
    workers: list[WorkerGroup] = Field(min_length=1)

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, given: str) -> str:
        try:
            check_host(given)
        except ValueError as error:
            raise ValueError(f"it {error}") from None
        return given

    @model_validator(mode="after")
    def _has_both_for_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together")
        return self

    @property
    def is_open(self) -> bool:
        """Whether clients need neither a token nor a key."""
        return self.token_file is None and self.api_key_file is None

    @property
    def uri(self) -> str:
        return uri_of(self.host, self.port, is_secure=self.ssl_certfile is not None)


def load(path: Path) -> Fleet:
    """Read the fleet's file; a relative path in it is relative to the file's folder.

    Raises `ConfigError` if it cannot be read, is not TOML, or has an invalid field, which it names.
    """
    table = read_toml(path, "fleet file", "file")
    folder = path.parent.absolute()
    try:
        _make_absolute(table, folder, "")
        groups = table.get("workers")
        for n, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, dict):
                _make_absolute(group, folder, f"workers[{n}].")
                if isinstance(group.get("settings"), dict):
                    _make_absolute(group["settings"], folder, f"workers[{n}].settings.")
        fleet = Fleet.model_validate(table)
        _refuse_equal_names(fleet)
        return fleet
    except ValidationError as error:
        raise ConfigError(f"The fleet file {path}: {first_fault(error, Fleet)}") from None
    except ConfigError as error:
        raise ConfigError(f"The fleet file {path}: {error.message}") from None


def _refuse_equal_names(fleet: Fleet) -> None:
    """Raises `ConfigError` if two groups or their models share a name. Only a gateway may have
    that, while one group replaces another."""
    groups = [group.name for group in fleet.workers]
    for names in (groups, [name for group in fleet.workers for name in group.names]):
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"workers.name: {name!r} is given twice; each needs its own")
    if "gateway" in groups:
        raise ConfigError("workers.name: 'gateway' is reserved; choose another")


def _make_absolute(table: dict[str, Any], folder: Path, place: str) -> None:
    """Make the paths in a table absolute. A relative path to read must exist; an absolute one may
    be on another machine.

    Raises `ConfigError` if it does not exist, or is not a file where one is needed.
    """

    def absolute(given: str, name: str) -> str:
        local = Path(os.path.abspath(folder / os.path.expanduser(given)))
        is_there = os.path.exists(local)
        if name in _REFERENCES and not is_there and not isinstance(parse(given), Path):
            return given  # an alias, or a model on the hub
        if name not in _WRITTEN and not is_there and not os.path.isabs(os.path.expanduser(given)):
            raise ConfigError(f"{place}{name}: there is no file {local}")
        if name in _READ and is_there and not os.path.isfile(local):  # reading a pipe would block
            what = "a folder" if os.path.isdir(local) else "a device or a pipe"
            raise ConfigError(f"{place}{name}: {local} is {what}, but a file is needed")
        return str(local)

    for name in (*_REFERENCES, *_READ, *_WRITTEN):
        if isinstance(given := table.get(name), str) and given:
            table[name] = absolute(given, name)
    for name, parsed in _SCALED.items():
        given = table.get(name, [])
        files = given.split(",") if isinstance(given, str) else given
        if files and isinstance(files, list) and all(isinstance(each, str) for each in files):
            with contextlib.suppress(ValueError):  # `settings` reports what is wrong with it
                made = partial(absolute, name=name)
                table[name] = [with_path(parsed(each), made) for each in files]
