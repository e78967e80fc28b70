"""Lets llama.cpp load the model before its weights are written, and compares token ids with those
of the source's own tokenizer.

`TokenCheck` runs in the converter and starts this module as a child process, so an abort of
llama.cpp there does not end the converter. The file that it loads has all metadata and all tensors,
with holes for values, so llama.cpp refuses now what it would refuse later.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import Keys

from worker.child_processes import inherited
from worker.convert.family.rules import Metadata
from worker.convert.output import write_layout
from worker.convert.tensor_plan import OutputTensor
from worker.convert.tokenizer import corpus
from worker.convert.tokenizer.reference import reference
from worker.convert.tokenizer.vocabulary import SPACE
from worker.errors import ModelError, WorkerError, of_file
from worker.models.gguf.header import read_header
from worker.models.scratch import Scratch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TIMEOUT_SECONDS = 600
_NORMALISERS = {
    "t5": "at combining marks that its normaliser composes",
    "bert": "at combining marks and symbols outside ASCII",
}


@dataclass(frozen=True, slots=True)
class CheckedTokens:
    n_texts: int
    differing: Sequence[str]
    """Texts for which llama.cpp's ids differ."""
    reason: str
    """Where llama.cpp is known to split differently."""


class TokenCheck:
    """A context manager. Its child process reads the source's tokenizer while the caller still
    plans, then waits for the file that `check` names to it."""

    def __init__(self, folder: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited(),
        )

    def __enter__(self) -> TokenCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()  # This has no effect on a process that has ended.
        self._child.communicate()

    def check(
        self, architecture: str, metadata: Metadata, tensors: Sequence[OutputTensor] = ()
    ) -> CheckedTokens:
        """Let llama.cpp load a file with these tensors, whose values are holes, and compare the
        token ids of the texts of `corpus`. Call it only once.

        Raises:
            ModelError: ids of a text differ for no known reason, or llama.cpp refuses a setting,
                the shape of a tensor or the vocabulary.
        """
        with Scratch(None) as temporary:
            file = temporary / "model.gguf"
            with of_file(file):
                write_layout(file, architecture, metadata, tensors=tensors)
            try:
                stdout, stderr = self._child.communicate(f"{file}\n", TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise ModelError(
                    f"llama.cpp did not split the test texts in {TIMEOUT_SECONDS} s"
                ) from None
        try:
            answer = json.loads(stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            last = stderr.strip().splitlines()[-1:] or ["no reason was given"]
            raise ModelError(f"llama.cpp cannot load the model: {last[0]}") from None
        if "error" in answer:
            raise ModelError(str(answer["error"]), **answer.get("details", {}))
        return CheckedTokens(**answer)


def main() -> None:
    answer: dict[str, Any]
    try:
        from worker.llama import library

        library.load()
        what = "llama.cpp cannot load {}"
        library.on_abort(lambda why: _answer({"error": library.sentence_of_abort(what, why)}))
        tokenizer = reference(Path(sys.argv[1]))
        file = sys.stdin.readline().strip()
        if not file:
            return  # The caller stopped at another fault and does not wait for an answer.
        answer = asdict(_compare(Path(file), tokenizer))
    except WorkerError as error:
        answer = {"error": error.message, "details": error.details}
    _answer(answer)


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _compare(file: Path, tokenizer: Tokenizer) -> CheckedTokens:
    from worker.llama.model import LoadOptions, Model

    is_vocabulary = not read_header(file).tensors
    options = LoadOptions(vocab_only=is_vocabulary, no_alloc=not is_vocabulary, mmap=False)
    try:
        model = Model(str(file), options)
    except ModelError as error:  # The file is temporary: its path says nothing.
        raise ModelError(error.message.replace(str(file), "the model")) from None
    reason = _NORMALISERS.get(model.metadata(Keys.Tokenizer.MODEL) or "", "")
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    # llama.cpp treats U+2581 as a space; `Vocabulary.add` notes it.
    special = [
        t.content for i, t in added if i < model.n_vocab and (t.special or SPACE not in t.content)
    ]
    texts = corpus.texts(special)
    differing = []
    for text in texts:
        got = model.tokenize(text, add_special=False, parse_special=True)
        try:
            expected = tokenizer.encode(text, add_special_tokens=False).ids
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # including the library's panics
            why = f"the source's own tokenizer cannot split {text!r}: {error}"
            raise ModelError(why, text=text) from None
        if got == expected:
            continue
        if not reason or text.isascii():
            raise ModelError(
                f"the converted tokenizer differs from its source: {text!r} becomes {got} "
                f"instead of {expected}",
                text=text,
            )
        differing.append(text)
    model.close()
    return CheckedTokens(len(texts), differing, reason)


if __name__ == "__main__":
    main()
