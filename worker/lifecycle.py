"""One worker from its settings to its exit: listen, load, announce, serve, drain.

Runs on the main thread, on the event loop that `run` starts. The contract fixes the order: the port
answers first, and nothing is announced before a token has been decoded. Once a stop has begun, the
process exits within the drain timeout plus five seconds, whatever hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from worker.api.app import build_schemas, create_app
from worker.api.http.gate import is_loopback
from worker.api.http.page import CHAT, NO_CHAT, has_chat
from worker.api.http.server import Server, server_for
from worker.api.http.state import AppState
from worker.background import in_daemon_thread
from worker.cli import discard_output, stop_signals
from worker.confinement.walls import forbid_core_dumps
from worker.errors import WorkerError, system_failure
from worker.installation import own_version
from worker.models.load_command import load_command
from worker.models.resolve import BUNDLED, resolve
from worker.models.stored import hold
from worker.observability.logs import get_logger, is_for_people
from worker.observability.metrics import Metrics
from worker.observability.terminal import LiveLine, first_request, ready_text
from worker.pool.client import PoolClient
from worker.pool.heartbeat import Heartbeats
from worker.settings import Settings
from worker.sockets import is_local, is_wildcard, listen_at, listen_on, uri_of
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.supervisor import Supervisor
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import Progress

EXIT_MARGIN_SECONDS = 4.5
"""Time for the exit after the drain timeout; then the process ends itself by force."""
_LLAMA_SERVER_PREFIXES = ("LLAMA_ARG_", "LLAMA_API_KEY")
"""Prefixes of llama-server's own environment variables."""


def run(settings: Settings, engine: EngineProcess, memory_limit: Callable[[], int]) -> None:
    """Serve until stopped; raises the `WorkerError` that stopped the worker, if there was one.

    `engine` does the first load; it may be spawned already. `memory_limit` returns the bytes of
    memory that a model can count on; it is called only if they decide which file is downloaded.
    """
    settings.check_files()
    path = settings.socket_path
    listeners = listen_on(settings.host, settings.port) if path is None else [listen_at(path)]
    own = None if path is None else os.stat(path)
    if settings.engine.confine:
        with contextlib.suppress(OSError):  # the engine tries too, and reports the failure
            forbid_core_dumps()
    # With Python's 5 ms, /health would wait several intervals while threads handle JSON.
    sys.setswitchinterval(0.0005)
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    runner = asyncio.Runner(loop_factory=loop_factory)
    try:
        _resolve_in_daemon_threads(runner.get_loop())
        error = runner.run(Lifecycle(settings, listeners, engine, memory_limit).serve())
    finally:
        if path is not None and own is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), own):  # not a successor's
                    os.unlink(path)
        with contextlib.suppress(RuntimeError):  # it needs a thread, which the system may refuse
            runner.close()
    if error is not None:
        raise error


def _resolve_in_daemon_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Make the loop resolve names in daemon threads, which do not delay the exit. A resolver can
    hang for minutes, and a loop waits for its own threads when it closes; uvloop has four, so four
    such names would also block all other lookups."""
    pending: dict[tuple[Any, ...], Future[Any]] = {}

    async def getaddrinfo(host: Any, port: Any, **hints: int) -> Any:
        place = (host, port, *sorted(hints.items()))
        found = pending.get(place)  # joins an earlier lookup, which may hang
        if found is None:
            found = in_daemon_thread(partial(socket.getaddrinfo, host, port, **hints))
            pending[place] = found
            found.add_done_callback(lambda _: pending.pop(place))
        return await asyncio.wrap_future(found)

    loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # the reader has left, or a disk is full; serving goes on
        discard_output()


class Lifecycle:
    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        engine: EngineProcess,
        memory_limit: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._memory_limit = memory_limit
        self._listeners = list(listeners)
        self._log = get_logger()
        self._started_at = time.monotonic()
        self._incarnation = str(uuid.uuid4())
        self._port: int | None = None
        self._uri = f"unix:{settings.socket_path}"
        if settings.socket_path is None:
            self._port = int(listeners[0].getsockname()[1])
            host = settings.advertise_host or settings.host[0]
            self._uri = uri_of(host, self._port, is_secure=settings.certificate is not None)
            self._uri += settings.api_prefix
        self._stop = asyncio.Event()
        self._must_leave: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._was_signalled = self._stops_now = False
        self._heartbeats: Heartbeats | None = None

    async def serve(self) -> WorkerError | None:
        """Run until the worker stops; returns the error that stopped it, or `None`."""
        settings = self._settings
        in_daemon_thread(self._leave_by_force)
        self._metrics = Metrics(settings.worker_id, len(settings.adapters))
        self._supervisor = Supervisor(settings, self._metrics, self._engine)
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
            # In addition: Python runs this handler even while the loop is blocked.
            signal.signal(number, lambda *_: self._must_leave.put(None))
        server = self._http_server()
        self._pool = PoolClient(settings, self._metrics)
        serving = asyncio.create_task(server.serve(sockets=self._listeners))
        self._log_listening()
        if settings.heartbeat_url is not None:
            self._heartbeats = Heartbeats(
                self._pool,
                self._metrics,
                settings.heartbeat_url,
                settings.heartbeat_interval,
                self._beat,
                lambda: self._supervisor.changed,
            )
        self._starting = asyncio.create_task(self._start())
        keeping = asyncio.create_task(self._state.history.keep(self._supervisor.status))
        showing = asyncio.create_task(self._show_start())
        try:
            await self._until_stop(serving)
        finally:
            self._starting.cancel()
            keeping.cancel()
            showing.cancel()
        await self._shut_down(server, serving)
        error = self._error
        self._log.info("worker.stopped", code=error.code if error else None)
        return error

    # --- start ---------------------------------------------------------------------------

    def _http_server(self) -> Server:
        state = AppState(
            settings=self._settings,
            supervisor=self._supervisor,
            metrics=self._metrics,
            worker_id=self._settings.worker_id,
            model_ref=self._settings.model or BUNDLED,
            incarnation=self._incarnation,
            request_shutdown=self._request_stop,
        )
        self._state = state
        patience, on_cut = self._settings.slow_reader_timeout, self._metrics.connection_cut
        return server_for(create_app(state), patience, on_cut, self._settings.certificate)

    async def _start(self) -> None:
        """Bring the worker up; a failure stops it."""
        try:
            await self._bring_up()
        except WorkerError as error:
            self._supervisor.fail(error)
        except Exception as error:
            failure = system_failure(error)
            if failure is None:
                self._log.error("worker.start_failed", exc_info=error)
                failure = WorkerError(f"The start failed unexpectedly: {error!r}.")
            self._supervisor.fail(failure)

    async def _bring_up(self) -> None:
        """Resolve, load and announce; raises an error that must stop the worker."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        set_progress = self._supervisor.set_progress

        def on_progress(progress: Progress) -> None:  # helper threads call it, too
            loop.call_soon_threadsafe(set_progress, progress)

        resolved = await resolve(settings, settings.model, on_progress, self._memory_limit)
        self._log.info("model.resolved", model_ref=resolved.model_ref, kind=resolved.kind)
        command = await load_command(settings, resolved, on_progress, self._memory_limit)
        # Held until this process ends: a later engine loads the same files.
        self._held = [hold(path) for path in command.paths]
        starting = self._supervisor.start(command)
        info, _ = await asyncio.gather(starting, build_schemas(self._state))
        self._log.info(
            "worker.ready",
            uri=self._uri,
            model_ref=resolved.model_ref,
            device=info.device,
            vram_bytes=info.residency.device_bytes,
            seconds=round(time.monotonic() - self._started_at, 3),
        )
        if resolved.kind == "bundled" and not info.model.pooling:
            key = "LLORCH_WORKER_TOKEN" if settings.worker_token else "KEY"
            line = first_request(
                self._uri, key if settings.needs_key else None, settings.api_prefix
            )
            # In its own thread: this blocks if nobody reads stdout, and serving must not.
            in_daemon_thread(partial(_print, line))
        await self._pool.announce(self._ready_callback, lambda: self._supervisor.has_served)

    async def _show_start(self) -> None:
        """For a person at a terminal: a live line during the load, then what is served."""
        if not is_for_people(self._settings.log_level, self._settings.log_format):
            return
        line = LiveLine(sys.stderr)
        try:
            async for progress in self._supervisor.watch_progress():
                line.show(progress)
        finally:
            line.clear()
        if (info := self._supervisor.info) is not None:
            text = ready_text(self._uri, self._state.model_ref, info, where=self._where())
            print(text, end="", file=sys.stderr, flush=True)

    def _where(self) -> str:
        """Where a person finds the worker's pages, or the API's description if it serves none."""
        if not self._settings.page:
            return f"Described in {self._uri}/openapi.json"
        chat = f"Chat at {self._uri}{CHAT}/" if has_chat() else NO_CHAT
        return f"Page at {self._uri}/\n{chat}"

    async def _ready_callback(self) -> dict[str, Any]:
        """The callback's body, once an engine serves; the first may crash before it is sent."""
        async for _ in self._supervisor.watch_progress():
            pass
        return self._callback()

    def _callback(self) -> dict[str, Any]:
        """The body of the ready callback."""
        settings, status = self._settings, self._supervisor.status()
        info, engine = status.info, settings.engine
        return {
            "worker_id": settings.worker_id,
            "incarnation": self._incarnation,
            "uri": self._uri,
            "protocol": "sse",
            "version": own_version(),
            "model_ref": self._state.model_ref,
            "backend": settings.backend,
            "device": info.device if info else None,
            "capabilities": self._capabilities(info) if info else [],
            "slots": info.slots if info else engine.slots,
            "context_length": status.context_length or engine.context_length,
            "vram_bytes": status.vram_bytes,
        }

    def _beat(self) -> dict[str, Any]:
        """The body of a heartbeat: the callback's fields, and the worker's current state."""
        status = self._supervisor.status()
        return self._callback() | {
            "status": status.pool_status,
            "state": status.state,
            "phase": status.progress.phase,
            "percent": status.progress.percent,
            "running": status.running,
            "queued": status.queued,
            "queued_prompt_tokens": status.queued_prompt_tokens,
            "kv_cells_used": status.stats.kv_cells_used,
            "kv_cells_total": status.stats.kv_cells_total,
            "resident": status.resident,
            "residency_lost": status.residency_lost,
            "last_progress_ms": round(status.last_progress_ms, 1),
            "uptime_seconds": round(status.uptime_seconds, 3),
            "interval_seconds": self._settings.heartbeat_interval,
        }

    def _capabilities(self, info: EngineInfo) -> list[str]:
        if info.model.pooling:
            return ["rerank" if info.model.pooling == "rank" else "embedding"]
        return [
            "text-gen",
            *(n for n, is_taken in self._state.served.modalities.items() if is_taken),
        ]

    def _log_listening(self) -> None:
        settings = self._settings
        self._log.info(
            "worker.listening",
            host=settings.socket_path or ",".join(settings.host),
            port=self._port,
            pid=os.getpid(),
            backend=settings.backend,
            version=own_version(),
        )
        if not settings.needs_key and not all(map(is_local, self._listeners)):
            self._log.warning(
                "worker.unprotected",
                message=f"Listening on {', '.join(settings.host)} without LLORCH_WORKER_TOKEN "
                "or --api-key-file: anyone who reaches the port can use the model.",
            )
        if unread := sorted(name for name in os.environ if name.startswith(_LLAMA_SERVER_PREFIXES)):
            self._log.warning(
                "worker.variables_unread",
                message=f"{', '.join(unread)}: llama-server's variables, which the worker does "
                "not read. Its own begin with LLORCH_; see --help.",
            )
        managers = [url for url in (settings.callback_url, settings.heartbeat_url) if url]
        announced = self._listeners[0]
        is_far = any(not is_loopback(urlsplit(url).hostname or "") for url in managers)
        is_unreachable = (managers and is_wildcard(announced)) or (is_far and is_local(announced))
        if is_unreachable and settings.advertise_host is None:
            remedy = "another --host" if is_local(announced) else "--advertise-host"
            self._log.warning(
                "worker.unreachable_uri",
                message=f"The worker announces itself to the pool manager as {self._uri}, which "
                f"no other machine can reach; set {remedy}.",
            )

    # --- stop ----------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        self._log.info("worker.signal", signal=signal.Signals(number).name)
        # The first signal never cuts a drain short: an orchestrator also sends one after
        # `/shutdown`. Nor does SIGHUP: a closing terminal and its shell send one each.
        if self._was_signalled and number != signal.SIGHUP:
            self._stops_now = True
            self._supervisor.cut_drain()
            self._starting.cancel()  # a second time: ends a conversion at once, too
        self._was_signalled = True
        self._request_stop()

    def _request_stop(self) -> None:
        """Refuse new work from now on; `serve` does the rest of the stop."""
        if self._supervisor.draining:
            return
        self._supervisor.begin_draining()
        self._log.info("worker.draining", running=self._supervisor.status().running)
        self._must_leave.put(None)
        self._stop.set()

    def _leave_by_force(self) -> None:
        """End the process once the time for a stop is over, whatever the event loop does.

        Its thread starts with the worker: later, the system may refuse one.
        """
        self._must_leave.get()
        time.sleep(self._settings.drain_timeout + EXIT_MARGIN_SECONDS)
        os._exit(0 if self._error is None else self._error.exit_code)

    @property
    def _error(self) -> WorkerError | None:
        """The error that stops the worker, even if it occurs in the drain; `None` without one."""
        fatal = self._supervisor.fatal
        return fatal.result() if fatal.done() else None

    async def _until_stop(self, serving: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        watched: set[asyncio.Future[Any]] = {stop, serving, self._supervisor.fatal}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            self._supervisor.fail(WorkerError(f"The HTTP server ended: {serving.exception()!r}."))
        stop.cancel()

    async def _shut_down(self, server: Server, serving: asyncio.Task[None]) -> None:
        self._request_stop()
        await self._supervisor.drain(self._settings.drain_timeout)
        server.end(now=self._stops_now)
        # A cancelled conversion still ends its process and removes what that has half written.
        start_ended = asyncio.wait({self._starting})
        parts = self._supervisor.stop(), self._leave_pool(), serving, start_ended
        results = await asyncio.gather(*parts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                self._log.error("worker.stop_trouble", exc_info=result)

    async def _leave_pool(self) -> None:
        if self._heartbeats is not None:
            await self._heartbeats.end(now=self._stops_now)
        await self._pool.close()
