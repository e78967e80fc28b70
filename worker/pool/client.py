"""Sends messages to the pool manager: the ready callback, and the heartbeats' HTTP requests.

Runs on the API process's event loop without delaying requests: a manager that is away, slow or
faulty costs a log line and a later attempt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from worker.errors import CallbackFailed, http_words
from worker.expectations import counted
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.setting_faults import variable_of, without_secrets
from worker.settings import Settings

if TYPE_CHECKING:
    import httpx

ATTEMPT_SECONDS = 10.0
"""Time limit of a whole exchange, even if the answer arrives byte by byte."""
LEAST_ATTEMPT_SECONDS = 1.0
"""The shortest time limit, for an attempt that begins when the time is nearly over."""
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 10.0
_RETRIED_4XX = frozenset({408, 425, 429})
_log = get_logger()


class PoolClient:
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._http: httpx.AsyncClient | None = None

    async def announce(
        self, payload: Callable[[], Awaitable[Mapping[str, Any]]], has_served: Callable[[], bool]
    ) -> None:
        """Send the ready callback until the manager accepts it, or raise `CallbackFailed`.

        `payload` is awaited before each attempt; it waits while the worker loads or recovers. With
        `--callback-optional`, or if the worker `has_served`, a final failure is merely logged:
        clients have found the worker without the manager.
        """
        url = self._settings.callback_url
        if url is None:
            return
        try:
            attempts = await self._post_until_accepted(url, payload)
        except CallbackFailed as error:
            if not (self._settings.callback_optional or has_served()):
                raise
            _log.warning("callback.given_up", message=error.message, **error.details)
        else:
            _log.info("callback.accepted", url=without_secrets(url), attempts=attempts)

    async def _post_until_accepted(
        self, url: str, payload: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> int:
        """Post until accepted; returns the number of attempts. Raises `CallbackFailed`."""
        # It does not shrink while `payload` waits, nor while the process is paused.
        remaining = self._settings.callback_timeout
        manager = f"The pool manager at {without_secrets(url)}"
        attempt = 0
        while True:
            attempt += 1
            patience = max(LEAST_ATTEMPT_SECONDS, min(ATTEMPT_SECONDS, remaining))
            content = await payload()
            asked_at = time.monotonic()
            status, reason = await self.post(url, content, patience)
            if not reason:
                return attempt
            self._metrics.callback_failures.inc()
            remaining -= min(time.monotonic() - asked_at, patience)
            failure = None
            if status is not None and 400 <= status < 500 and status not in _RETRIED_4XX:
                failure = f"refused the ready callback: {reason}"
            elif remaining < FIRST_DELAY_SECONDS:
                failure = (
                    f"did not accept the ready callback within {self._settings.callback_timeout:g} "
                    f"s ({counted(attempt, 'attempt')}); last: {reason}"
                )
            if failure is not None:
                raise CallbackFailed(f"{manager} {failure}.", status=status, attempts=attempt)
            # Full jitter: up to a bound that doubles, and shrinks towards the end of the time.
            longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**attempt)
            delay = min(random.uniform(0, longest), remaining / 2)
            _log.warning("callback.retry", attempt=attempt, reason=reason, delay=delay)
            await asyncio.sleep(delay)
            remaining -= delay

    async def post(
        self, url: str, payload: Mapping[str, Any], timeout_seconds: float
    ) -> tuple[int | None, str]:
        """Post JSON once and read no body; returns the status, `None` without an answer, and why
        the manager did not accept it, empty if it did."""
        try:
            client = self._client()
        except Exception as error:
            return None, http_words(error)
        try:
            async with asyncio.timeout(timeout_seconds):
                async with client.stream(
                    "POST", url, json=payload, timeout=timeout_seconds
                ) as response:
                    status = response.status_code
                    reason = "" if response.is_success else f"it answered {status}"
                    if status == 401:
                        is_set = self._settings.callback_token is not None
                        fault = "has another value" if is_set else "is not set"
                        reason += f"; {variable_of('callback_token')} {fault}"
                    return status, reason
        except TimeoutError:
            return None, f"no answer within {timeout_seconds:.1f} s"
        except Exception as error:  # whatever the manager does costs one attempt
            return None, http_words(error).replace(url, without_secrets(url))

    def _client(self) -> httpx.AsyncClient:
        """The HTTP client, created for the first message. Raises if the environment names an
        unsupported proxy, or certificates that do not exist."""
        # Imported only by workers with a pool.
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        import httpx

        if self._http is None:
            token = self._settings.callback_token
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # Cookies that a proxy sets on each answer would pile up until messages are rejected.
            no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
            # httpx's defaults verify TLS and use the environment's proxies.
            self._http = httpx.AsyncClient(headers=headers, cookies=no_cookies)
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None
