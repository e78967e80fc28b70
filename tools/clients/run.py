"""Runs the actions of one model, in the clients' environment: `python -m tools.clients.run`.

Prints one JSON line per action: client, name, and the first line of the error, if any.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import time
import warnings
from types import FrameType

import httpx

from tools.clients.actions import ACTIONS, Action, Server

ACTION_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="instruct, bundled or exact")
    parser.add_argument(
        "--modules", required=True, nargs="+", help="modules of this package with actions"
    )
    parser.add_argument("--only", default="", help="clients or action names that contain this")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for module in given.modules:
        importlib.import_module(f"tools.clients.{module}")
    signal.signal(signal.SIGALRM, _too_long)
    listed = httpx.get(f"{given.url}/v1/models", timeout=10).json()
    server = Server(given.url, listed["data"][0]["id"])
    for action in ACTIONS:
        if action.model == given.model and given.only in f"{action.client}: {action.name}":
            began = time.monotonic()
            fault = outcome(action, server)
            seconds = round(time.monotonic() - began, 2)
            line = {"client": action.client, "name": action.name, "seconds": seconds}
            print(json.dumps(line | {"fault": fault}), flush=True)


def outcome(action: Action, server: Server) -> str | None:
    """Return the error in one line, or `None`."""
    signal.alarm(ACTION_SECONDS)
    try:
        action.run(server)
    except Exception as error:  # whatever a client raises is a failure of this action
        text = f"{type(error).__name__}: {error}"
        return " ".join(text.split())[:300]
    finally:
        signal.alarm(0)
    return None


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no end within {ACTION_SECONDS} s")


if __name__ == "__main__":
    main()
