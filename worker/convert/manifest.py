"""The origin of a GGUF, written into its metadata as `llorch.convert.*`.

The digest of the source is the SHA-256 of the list that `sha256sum` prints for its files, sorted by
name, so anybody can compute it. Hashing runs on a thread of its own while weights are converted and
verified (hashlib releases the GIL); the digest is written into the header last.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from worker.convert.family.rules import Metadata
from worker.installation import own_version
from worker.models.checkpoint_files import checkpoint_files
from worker.models.checksum import sha256_of_file
from worker.models.reference import name_of, snapshot_of

SOURCE = "llorch.convert.source"
REVISION = "llorch.convert.revision"
VERSION = "llorch.convert.version"
OUTTYPE = "llorch.convert.outtype"
DIFFERENCE = "llorch.convert.difference"
"""A sentence; present only if llama.cpp's token ids for some texts differ from the source's."""
DIGEST = "llorch.convert.source_sha256"
SCRIPT = "llorch.convert.script"
"""Present only if llama.cpp's own converter read the weights."""
IMATRIX = "llorch.convert.imatrix_sha256"
"""SHA-256 of the importance matrix that the weights were quantised with."""

PLACEHOLDER = "?" * 64


def provenance(folder: Path, outtype: str, name: str | None = None) -> Metadata:
    """The metadata keys that are known before the weights are read."""
    found: Metadata = {
        SOURCE: name or name_of(folder),
        VERSION: own_version(),
        OUTTYPE: outtype,
        DIGEST: PLACEHOLDER,
    }
    snapshot = snapshot_of(folder)
    if snapshot is not None and snapshot.revision is not None:
        found |= {SOURCE: snapshot.repo, REVISION: snapshot.revision}
    return found


def digest(folder: Path) -> str:
    """SHA-256 over the contents of a checkpoint's files and their paths inside the folder."""
    files = checkpoint_files(folder)
    lines = (f"{sha256_of_file(path)}  {path.relative_to(folder)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
