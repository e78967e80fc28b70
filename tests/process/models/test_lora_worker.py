"""`--lora` on the real process: another text, named in /info; what is no adapter is refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.worker import run_to_exit, shown
from worker.models.adapter import resolve_adapter
from worker.models.resolve import resolve

ADAPTER = Path(__file__).parents[2] / "data/adapter"
PROMPT = "Once upon a time"


def text(start_worker: StartWorker, *flags: str) -> tuple[str, dict[str, object] | None, int]:
    """A greedy text, what /info says of the adapter, and the bytes planned for weights."""
    worker = start_worker(*flags, wait_ready=True)
    info = worker.get("/info").json()
    said = worker.execute(PROMPT, max_tokens=24, temperature=0.0)
    assert worker.stop() == 0
    return said.text, info["model"]["adapter"], info["engine"]["plan"]["weights"]


def test_an_adapter_changes_the_text_and_is_named(
    start_worker: StartWorker, warm_cache: Path
) -> None:
    """A folder of PEFT's is converted for the model that is served; at scale 0 nothing changes."""
    plain, no_adapter, weights = text(start_worker)
    assert no_adapter is None
    adapted, adapter, more_weights = text(start_worker, "--lora", str(ADAPTER))
    assert adapted != plain
    assert adapter is not None and (adapter["name"], adapter["scale"]) == ("adapter", 1.0)
    assert "path" not in adapter
    size = adapter["size_bytes"]
    assert isinstance(size, int) and more_weights == weights + size
    assert shown("plan", warm_cache, "--lora", str(ADAPTER))["parts"]["weights"] == more_weights
    report = shown("doctor", warm_cache, "--lora", str(ADAPTER))
    assert report["plan"]["parts"]["weights"] == more_weights
    assert ("adapter", "ok") in [(check["name"], check["status"]) for check in report["checks"]]
    (converted,) = warm_cache.glob("converted/*/adapter.gguf")
    off, adapter, _ = text(start_worker, "--lora", f"{converted}=0")
    assert off == plain
    assert adapter is not None and adapter["scale"] == 0.0


def test_the_doctor_tells_an_adapter_that_a_start_would_refuse(warm_cache: Path) -> None:
    report = shown("doctor", warm_cache, "--lora", str(warm_cache / "nowhere.gguf"), code=3)
    (check,) = [each for each in report["checks"] if each["name"] == "adapter"]
    assert check["status"] == "failed" and "does not exist" in check["text"]


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("nowhere.gguf", 3, "does not exist"),
        ("x.gguf=1e9", 2, "FILE=SCALE"),
        ("empty", 3, "no adapter_config.json"),
        ("broken", 3, "lora_alpha above 0"),
    ],
)
def test_what_is_no_adapter_ends_with_a_sentence(
    tmp_path: Path, warm_cache: Path, value: str, code: int, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(ADAPTER, tmp_path / "broken")
    (tmp_path / "broken/adapter_config.json").write_text('{"peft_type": "LORA"}')
    lora = str(tmp_path / value)
    ended = run_to_exit("--port", "0", "--lora", lora, cache_dir=warm_cache)
    assert ended.code == code
    assert words in ended.sentence
    assert "Traceback" not in ended.stderr


def test_a_folder_is_converted_once_and_again_when_its_file_is_damaged(
    tmp_path: Path, warm_cache: Path
) -> None:
    """As a checkpoint is: by one of the workers that start at once, and never half."""

    async def resolved() -> tuple[set[str], set[str]]:
        base = (await resolve(None, cache_dir=warm_cache)).gguf_path
        phases: set[str] = set()
        found = await asyncio.gather(
            *(
                resolve_adapter(str(ADAPTER), base, tmp_path, lambda told: phases.add(told.phase))
                for _ in range(2)
            )
        )
        return {each.path for each in found if each is not None}, phases

    (path,), phases = asyncio.run(resolved())
    assert "waiting for another worker's conversion" in phases
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    assert asyncio.run(resolved())[0] == {path}
    assert Path(path).read_bytes() == whole
