"""Lighthouse, which judges the worker's pages in `make page-test`.

npm installs it into the cache, by the hashes of its lock; none of the packages' install scripts
runs. The lock names no registry, because the machine's own is used.
"""

import json
import shutil
import tempfile
from pathlib import Path

from builds import pins as pinned
from builds import store, toolchain

LOCKS = pinned.FOLDER / "locks" / "lighthouse"
LOCK = LOCKS / "package-lock.json"
_QUIET = ("--ignore-scripts", "--no-audit", "--no-fund")


def command() -> list[str]:
    """What runs it; installed at the first use."""
    node = toolchain.node()
    home = store.folder("toolchain") / f"lighthouse-{store.sha256(LOCK)[:16]}"
    with store.lock("toolchain-lighthouse"):
        if not home.exists():
            store.say("installing Lighthouse")
            with store.replacing(home) as partial:
                shutil.copytree(LOCKS, partial, dirs_exist_ok=True)
                toolchain.npm(node, partial, "ci", *_QUIET)
    return [str(node), str(home / "node_modules" / "lighthouse" / "cli" / "index.js")]


def lock(*, upgrade: bool) -> None:
    """Write the lock of the version in `package.json`; with `upgrade`, with its newest packages."""
    with tempfile.TemporaryDirectory(prefix="llorch-lock-") as scratch:
        work = Path(scratch)
        shutil.copytree(LOCKS, work, dirs_exist_ok=True)
        if upgrade:
            (work / LOCK.name).unlink(missing_ok=True)
        bare = ("--package-lock-only", "--omit-lockfile-registry-resolved")
        toolchain.npm(toolchain.node(), work, "install", *bare, *_QUIET)
        found = json.loads((work / LOCK.name).read_text("utf-8"))
    for package in found["packages"].values():
        package.pop("funding", None)  # addresses that nothing needs
    LOCK.write_text(json.dumps(found, indent=1) + "\n")
    store.say(f"{LOCK.name} of Lighthouse: {len(found['packages'])} packages")
