"""Several Ray nodes on this machine: `python -m tests.system.fleet.nodes`, until stdin ends.

A separate process, so that the test's process need not load Ray. Starts a head with the dashboard,
whose address it prints as one line of JSON, and three nodes with one `llorch_device` each. Each
line on stdin adds another node.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.ports import free_port

NODES = 3
STORE_BYTES = 80 * 1024 * 1024
ATTEMPTS = 3


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node; retry if its agents took more than Ray's limit of 15 seconds."""
    for _ in range(ATTEMPTS - 1):
        try:
            return start()
        except Exception:  # Ray has no specific error type
            traceback.print_exc()
    return start()


def main() -> None:
    from ray.cluster_utils import Cluster

    answers, sys.stdout = sys.stdout, sys.stderr
    store = {"object_store_memory": STORE_BYTES}

    def start_head() -> tuple[Any, int]:
        port = free_port()  # a new one each time: a failed start may keep the previous port
        head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": port, **store}
        return Cluster(initialize_head=True, head_node_args=head), port

    cluster, port = patiently(start_head)

    def add_node() -> None:
        patiently(lambda: cluster.add_node(num_cpus=1, resources={"llorch_device": 1}, **store))

    def reap() -> None:
        """A node's actors exit when its raylet is gone, but do not notice while it is a zombie."""
        while True:
            for node in list(cluster.worker_nodes):
                node.live_processes()
            time.sleep(0.2)

    for _ in range(NODES):
        add_node()
    threading.Thread(target=reap, daemon=True).start()
    print(json.dumps({"dashboard": f"http://127.0.0.1:{port}"}), file=answers, flush=True)
    for _ in sys.stdin:
        add_node()
    cluster.shutdown()


if __name__ == "__main__":
    main()
