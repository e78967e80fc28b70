"""The native library as this room opens it: one registry, a whole log, clear refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.bundled import bundled_gguf
from tests.support.worker import environment as worker_environment
from worker.errors import ModelError
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context, ContextOptions
from worker.llama.model import LoadOptions, Model


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(str(bundled_gguf("f32")))


def test_the_registry_lists_the_processor() -> None:
    (cpu,) = [device for device in library.devices() if device.kind == "cpu"]
    assert cpu.name == "CPU"
    found = library.properties_of(cpu)
    assert 0 < found.free_bytes <= found.total_bytes


BOUND = """
import os
from worker.devices.cpu.budget import cpu_budget
before = os.sched_getaffinity(0), cpu_budget(None).threads
from worker.llama import library
library.load()
assert (os.sched_getaffinity(0), cpu_budget(None).threads) == before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems bind no threads")
def test_binding_threads_of_openmp_keeps_the_cpus_of_the_process(tmp_path: Path) -> None:
    environment = {**worker_environment(tmp_path), "OMP_PROC_BIND": "true"}
    subprocess.run([sys.executable, "-c", BOUND], env=environment, check=True)


def test_a_folder_of_libraries_that_is_set_and_wrong_is_named(tmp_path: Path) -> None:
    environment = {**worker_environment(tmp_path), "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    line = [sys.executable, "-c", "from worker.llama import library; library.load()"]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert f"LLAMA_CPP_LIB_PATH is '{tmp_path}': unset it" in ended.stderr


def test_a_sandbox_that_hides_the_cpus_does_not_keep_the_library_from_loading(
    tmp_path: Path,
) -> None:
    refusing = (
        "import os\n"
        "def refuse(_): raise PermissionError(1, 'Operation not permitted')\n"
        "os.sched_getaffinity = refuse\n"
        "from worker.llama import library; library.load()"
    )
    environment = worker_environment(tmp_path)
    subprocess.run([sys.executable, "-c", refusing], env=environment, check=True)


@pytest.mark.skipif(sys.platform == "darwin", reason="all names are UTF-8 there")
@pytest.mark.parametrize(
    "act",
    [
        "from worker.llama.model import Model; Model(path).close()",
        "from worker.llama import quantize as q; "
        "q._quantize(q.Path(path), q.Path(path + '.q'), 2, 1, '')",
    ],
)
def test_a_file_is_found_by_its_bytes_in_a_locale_without_its_letters(
    act: str, tmp_path: Path
) -> None:
    path = tmp_path / "modèle.gguf"
    path.symlink_to(bundled_gguf("f32"))
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = [sys.executable, "-c", f"import sys; path = sys.argv[1]; {act}", str(path)]
    subprocess.run(line, env=worker_environment(tmp_path, old), check=True)


def test_log_lines_are_whole_however_they_come() -> None:
    with library.log.capture() as lines:
        library.log.write(2, "one ")
        library.log.write(5, "line\nand ")
        library.log.write(5, "another\n")
    library.log.write(2, "not captured\n")
    assert lines == ["one line", "and another"]


def test_a_file_that_is_not_a_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("just a text")
    with pytest.raises(ModelError, match=r"cannot load .*notes\.gguf: .+"):
        Model(str(path))


def test_end_of_generation_tokens_equal_llama_cpps(model: Model) -> None:
    is_eog = library.load().llama_vocab_is_eog
    assert model.eog == {t for t in range(model.n_vocab) if is_eog(model.vocab, t)} != set()
    assert any("EOG token" in line for line in model.load_log), "else each token has to be asked"


def test_texts_are_tokenized_with_and_without_control_tokens(model: Model) -> None:
    tokens = model.tokenize("Hello <|im_end|> 🦊", add_special=False, parse_special=True)
    pieces = [model.piece(token, special=True) for token in tokens]
    assert b"".join(pieces).decode() == "Hello <|im_end|> 🦊"
    (end,) = model.eog & set(tokens)
    assert model.token_text(end) == "<|im_end|>"
    assert model.piece(end) == b"", "a control token stands for no text"
    plain = model.tokenize("<|im_end|>", add_special=False, parse_special=False)
    assert len(plain) > 1, "without parsing it is text like any other"
    assert model.metadata("general.architecture") == "llama"
    assert model.metadata("no.such.key") is None


def test_long_metadata_and_texts_need_no_fixed_buffer(model: Model) -> None:
    template = model.metadata("tokenizer.chat_template")
    assert template is not None and len(template) == 198
    assert template == model.chat_template()
    assert model.metadata("general.name"), "and short ones"
    text = "word " * 5000
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(model.piece(token) for token in tokens).decode() == text


@pytest.mark.parametrize("kv_unified", [False, True])
def test_copied_cells_continue_as_the_original_does(model: Model, kv_unified: bool) -> None:
    options = ContextOptions(n_ctx=1024, n_seq_max=3, threads=1, kv_unified=kv_unified)
    context, batch = Context(model, options), Batch(64)
    tokens = model.tokenize(
        "Once upon a time, there was a fox", add_special=True, parse_special=True
    )
    batch.add(0, 0, tokens, logits=True)
    assert context.decode(batch) == "ok"
    context.copy(0, 2, len(tokens) - 2)
    assert context.last_position(2) == len(tokens) - 3
    assert context.last_position(0) == len(tokens) - 1, "the source keeps its own"
    batch.clear()
    row = batch.add(2, len(tokens) - 2, tokens[-2:], logits=True)
    other = batch.add(1, 0, tokens, logits=True)
    assert context.decode(batch) == "ok"
    assert context.logits(row).argmax() == context.logits(other).argmax()
    assert abs(context.logits(row) - context.logits(other)).max() < 0.5
    context.close()


def test_an_abort_ends_a_decode(model: Model) -> None:
    context, batch = Context(model, ContextOptions(n_ctx=512, threads=1)), Batch(256)
    batch.add(0, 0, [5] * 256, logits=True)
    context.abort()
    assert context.decode(batch) == "aborted"
    context.truncate(0, 0)
    assert context.decode(batch) == "ok"
    context.close()


def test_an_abort_while_a_device_computes_does_not_abort_the_next_batch(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU work is awaited after it has been submitted."""
    context, batch = Context(model, ContextOptions(n_ctx=512, threads=1)), Batch(512)
    batch.add(0, 0, [5] * 64, logits=True)
    wait = context._flat.llama_synchronize

    def cancelled_meanwhile(pointer: object) -> None:
        context.abort()
        wait(pointer)

    with monkeypatch.context() as patch:
        patch.setattr(context._flat, "llama_synchronize", cancelled_meanwhile)
        assert context.decode(batch) == "ok"
    context.truncate(0, 0)
    assert context.decode(batch) == "ok"
    context.close()


@pytest.mark.skipif(sys.platform == "darwin", reason="no semaphores in memory")
def test_another_thread_sees_that_a_decode_moves(model: Model) -> None:
    pulse = memoryview(bytearray(64))
    context, batch = Context(model, ContextOptions(n_ctx=2048, threads=1), pulse), Batch(2048)
    batch.add(0, 0, [5] * 2048, logits=True)
    seen, is_over = set(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.add(bytes(pulse[:8]))

    watching = threading.Thread(target=watch)
    watching.start()
    assert context.decode(batch) == "ok"
    is_over.set()
    watching.join()
    assert len(seen) > 5
    context.close()


def test_a_vocabulary_alone_loads_no_weights() -> None:
    vocabulary = Model(str(bundled_gguf("f32")), LoadOptions(vocab_only=True))
    assert vocabulary.n_vocab == 1024
    assert vocabulary.tokenize("Hello", add_special=True, parse_special=False)[0] == vocabulary.bos
    vocabulary.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_states_are_restored_in_another_layout_of_the_cells(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:  # like states of large models
        monkeypatch.setattr("worker.llama.context._MAPPED_BYTES", 0)
    layouts = [(4, False), (4, True), (8, False), (2, False), (1, False)]
    tokens = [3 + n % 200 for n in range(90)]
    batch = Batch(128)

    def options(slots: int, kv_unified: bool) -> ContextOptions:
        return ContextOptions(n_ctx=2048, n_seq_max=slots, threads=1, kv_unified=kv_unified)

    def next_logits(context: Context, slot: int, position: int) -> npt.NDArray[np.float32]:
        batch.clear()
        row = batch.add(slot, position, [7], logits=True)
        assert context.decode(batch) == "ok"
        return context.logits(row).copy()

    with closing(Context(model, options(4, kv_unified=False))) as context:
        assert context.memory_kind.moves_states
        batch.add(2, 0, tokens, logits=False)
        assert context.decode(batch) == "ok"
        state = context.state(2, context.state_bytes(2))
        expected = next_logits(context, 2, len(tokens))
        for slots, kv_unified in layouts:
            context.divide(2048, slots, kv_unified)
            slot = slots - 1
            assert state is not None and context.restore(slot, state)
            assert context.last_position(slot) == len(tokens) - 1
            state = context.state(slot, context.state_bytes(slot))
            assert np.array_equal(next_logits(context, slot, len(tokens)), expected)


def _mapped_bytes(path: Path) -> int:
    """Return how much of a file is mapped into this process's memory."""
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    sizes = [each.split("Rss:")[1].split()[0] for each in mappings if f"{path.resolve()}\n" in each]
    return 1024 * sum(map(int, sizes))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what is in memory")
def test_released_pages_of_the_file_are_read_again(model: Model) -> None:
    path = bundled_gguf("f32")

    def logits() -> npt.NDArray[np.float32]:
        with closing(Context(model, ContextOptions(n_ctx=64))) as context:
            batch = Batch(64)
            row = batch.add(0, 0, [5, 6, 7], logits=True)
            context.decode(batch)
            return context.logits(row).copy()

    before = logits()
    assert _mapped_bytes(path) > path.stat().st_size / 2
    library.release_pages()
    assert _mapped_bytes(path) == 0
    assert np.array_equal(logits(), before)


def test_pages_that_no_file_lists_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox without /proc: releasing them only saves memory."""

    def missing(path: Path, *_: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    library.release_pages()
