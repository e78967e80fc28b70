"""A child process that speaks the engine's protocol and misbehaves on demand.

For states that the real engine cannot be brought into at will: dying between two frames, never
answering, failing its second start. It reads its orders from the prompt of a request, or from a
chat's last message:

    say WORD*      one token per word, then EOS
    tell WORD*     only the next word, then nothing; after the last one, EOS
    hold           accept and start, then nothing until it is cancelled
    queue          accept, never start
    ignore         not even accept
    abort          accept, start, then die of SIGABRT
    abort-unread   die of SIGABRT before accepting
    nonsense       accept, then send an invalid message
    refuse         reject with CONTEXT_LENGTH_EXCEEDED
and from the file `--script`, one line per incarnation:
    ok | fail | die | kill | hang
A file of that name with ".gone" appended means that the device has vanished.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from array import array
from pathlib import Path

from worker.errors import (
    Cancelled,
    ContextLengthExceeded,
    InferenceFailed,
    ModelError,
    ResidencyViolation,
)
from worker.wire.black_box import SMALL_INTAKE, BlackBox
from worker.wire.engine_info import EngineInfo, ModelInfo, Residency
from worker.wire.messages import (
    Accepted,
    Answered,
    Cancel,
    Command,
    EngineFailed,
    Event,
    Failed,
    Finished,
    LoadModel,
    Progress,
    Ready,
    Started,
    Stats,
    Stop,
    Submit,
    Token,
)
from worker.wire.transport import SyncChannel
from worker.wire.work import ChatPrompt, InferenceRequest, ProveResidency, Tokenize, Tokenized


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--black-box", type=int, required=True)
    parser.add_argument("--script", type=Path, required=True)
    options = parser.parse_args()
    script: Path = options.script
    black_box = BlackBox(options.black_box)
    channel = SyncChannel(socket.socket(fileno=options.fd))
    config = channel.recv()
    assert isinstance(config, LoadModel)
    channel.send([Progress("load", 50.0, 1e6)])
    match next_start(script):
        case "fail":
            channel.send([EngineFailed(ModelError("The file is gone.", path=config.model_path))])
            os._exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGABRT)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
    channel.send([Ready(info(config))])
    while (command := channel.recv()) is not None and not isinstance(command, Stop):
        channel.send(answer(command, script, black_box))
    os._exit(0)


def next_start(script: Path) -> str:
    """Take the first line off the script."""
    first, _, rest = script.read_text().partition("\n")
    script.write_text(rest)
    return first or "ok"


def answer(command: Command, script: Path, black_box: BlackBox) -> list[Event]:
    match command:
        case Submit(request_id, InferenceRequest(prompt=prompt, produced=produced)):
            if isinstance(prompt, ChatPrompt):
                text = prompt.messages[-1]["content"]
            else:
                parts = prompt if isinstance(prompt, tuple) else (str(prompt),)
                text = "".join(part if isinstance(part, str) else chr(part) for part in parts)
            black_box.in_hand[SMALL_INTAKE] = 0 if text == "abort-unnoted" else request_id
            events = play(request_id, text, len(produced))
            black_box.in_hand[SMALL_INTAKE] = 0
            return [*events, stats()]
        case Cancel(request_id):
            return [Failed(request_id, Cancelled("Cancelled.")), stats()]
        case Submit(request_id, Tokenize(text=str(text))):
            if text == "silence":
                return []
            if text == "trouble":
                return [Failed(request_id, InferenceFailed("No."))]
            return [Answered(request_id, Tokenized(text.encode()))]
        case Submit(request_id, ProveResidency()):
            if script.with_suffix(".gone").exists():
                return [Failed(request_id, ResidencyViolation("CUDA0 is gone."))]
            return [Answered(request_id, None)]
        case _:
            return []


def play(request_id: int, text: str, n_produced: int) -> list[Event]:
    order, *words = text.split()
    # A prompt's token ids are its characters, so that the order survives a crash.
    accepted: list[Event] = [Accepted(request_id, 3, array("i", map(ord, text)).tobytes())]
    started: list[Event] = [*accepted, Started(request_id, 0)]
    match order:
        case "say" | "tell":
            all_tokens = [Token(request_id, word, (index,)) for index, word in enumerate(words)]
            tokens = all_tokens[n_produced:]
            if order == "tell" and len(tokens) > 1:
                return [*started, *tokens[:1]]
            return [*started, *tokens, Finished(request_id, "EOS", len(words), 1.0)]
        case "hold" | "abort":
            if order == "abort":
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGABRT))
            return started
        case "queue":
            return accepted
        case "nonsense":
            return [*accepted, Started(request_id, -1)]
        case "abort-unread" | "abort-unnoted":
            os.kill(os.getpid(), signal.SIGABRT)
        case "refuse":
            error = ContextLengthExceeded("Too long.", prompt_tokens=9, context_length=8)
            return [Failed(request_id, error)]
    return []


def stats() -> Stats:
    return Stats(kv_cells_total=64, steps=1)


def info(config: LoadModel) -> EngineInfo:
    model = ModelInfo(
        name="scripted",
        architecture="llama",
        quant_kind="F32",
        size_bytes=1,
        n_params=1,
        vocab_size=256,
        tokenizer_kind="gguf-bpe",
        context_length=64,
        trained_context_length=64,
        embedding_length=1,
        bos_token_id=None,
        bos_token="",
        eos_token="",
        eog_token_ids=(0,),
        has_chat_template=True,
        template_takes_tools=False,
        pooling=None,
        metadata={},
    )
    return EngineInfo(
        model=model,
        residency=Residency(True, "CPU", (), 1, 1),
        backend=config.engine.backend,
        device="CPU",
        slots=config.engine.slots,
        batch=config.engine.batch,
        micro_batch=config.engine.micro_batch,
        prefill_budget=config.engine.micro_batch,
        threads=1,
        threads_derivation="scripted",
        cpu_variant=None,
        versions={},
        build={},
        plan={},
        load_seconds=0.0,
        pid=os.getpid(),
    )


if __name__ == "__main__":
    main()
