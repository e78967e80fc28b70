"""A child that speaks the engine's protocol and misbehaves on demand.

For states that the real engine cannot be brought into at will: dying between two frames, never
answering, failing its second start. It reads its orders from the prompt of a request:

    say WORD*      one token per word, then EOS
    hold           accept and start, then nothing until it is cancelled
    queue          accept, never start
    ignore         not even accept
    abort          accept, start, then die of SIGABRT
    abort-unread   die of SIGABRT before accepting
    refuse         reject with CONTEXT_LENGTH_EXCEEDED
and from the file that SCRIPTED_ENGINE names, one line per incarnation:
    ok | fail | die | kill | hang
A file of that name with ".gone" behind it says that the device has vanished.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from pathlib import Path

from worker.engine.transport import SyncChannel
from worker.errors import (
    Cancelled,
    ContextLengthExceeded,
    InferenceFailed,
    ModelError,
    ResidencyViolation,
)
from worker.messages import (
    Accepted,
    Cancel,
    Command,
    EngineConfig,
    EngineInfo,
    Event,
    Failed,
    Finished,
    ModelInfo,
    Progress,
    ProveResidency,
    Ready,
    Rejected,
    Reply,
    Residency,
    Started,
    StartFailed,
    Stats,
    Stop,
    Submit,
    Token,
    Tokenize,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    channel = SyncChannel(socket.socket(fileno=parser.parse_args().fd))
    config = channel.recv()
    assert isinstance(config, EngineConfig)
    channel.send([Progress("load", 50.0, 1e6)])
    match next_start():
        case "fail":
            channel.send([StartFailed(ModelError("The file is gone.", path=config.model_path))])
            os._exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGABRT)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
    channel.send([Ready(info(config))])
    while (command := channel.recv()) is not None and not isinstance(command, Stop):
        channel.send(answer(command))
    os._exit(0)


def next_start() -> str:
    """Take the first line off the script."""
    name = os.environ.get("SCRIPTED_ENGINE")
    if name is None:
        return "ok"
    first, _, rest = Path(name).read_text().partition("\n")
    Path(name).write_text(rest)
    return first or "ok"


def answer(command: Command) -> list[Event]:
    match command:
        case Submit(request_id, request):
            order, *words = str(request.prompt).split()
            return [*play(request_id, order, words), stats()]
        case Cancel(request_id):
            return [Failed(request_id, Cancelled("Cancelled.")), stats()]
        case Tokenize(call_id, text=text):
            if text == "silence":
                return []
            if text == "trouble":
                return [Reply(call_id, error=InferenceFailed("No."))]
            return [Reply(call_id, tuple(text.encode()))]
        case ProveResidency(call_id):
            if Path(os.environ.get("SCRIPTED_ENGINE", "") + ".gone").exists():
                return [Reply(call_id, error=ResidencyViolation("CUDA0 is gone."))]
            return [Reply(call_id, None)]
        case _:
            return []


def play(request_id: int, order: str, words: list[str]) -> list[Event]:
    accepted: list[Event] = [Accepted(request_id, 3)]
    started: list[Event] = [*accepted, Started(request_id, 0)]
    match order:
        case "say":
            tokens: list[Event] = [
                Token(request_id, word, (index,)) for index, word in enumerate(words)
            ]
            return [*started, *tokens, Finished(request_id, "EOS", len(words), 1.0)]
        case "hold" | "abort":
            if order == "abort":
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGABRT))
            return started
        case "queue":
            return accepted
        case "abort-unread":
            os.kill(os.getpid(), signal.SIGABRT)
        case "refuse":
            error = ContextLengthExceeded("Too long.", prompt_tokens=9, context_length=8)
            return [Rejected(request_id, error)]
    return []


def stats() -> Stats:
    return Stats(0, 0, 0, 0, 64, 0, 1, 0.0, 0.0, 0.0)


def info(config: EngineConfig) -> EngineInfo:
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
        eog_token_ids=(0,),
        has_chat_template=False,
        template_takes_tools=False,
        pooling=None,
        metadata={},
    )
    return EngineInfo(
        model=model,
        residency=Residency(True, "CPU", (), 1, 1),
        backend=config.backend,
        device="CPU",
        slots=config.slots,
        batch=config.batch,
        micro_batch=config.micro_batch,
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
