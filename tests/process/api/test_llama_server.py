"""llama-server's own paths: completions, the text in a gap, tokens with their texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_with
from tests.support.worker import WorkerProcess

PROMPT = "Once upon a time"


def completed(worker: WorkerProcess, path: str = "/completion", **fields: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, **fields}
    return worker.answer(path, body)


def streamed(worker: WorkerProcess, path: str = "/completion", **fields: Any) -> list[Any]:
    """Return the values of a stream's events."""
    answer = worker.post(path, {"prompt": PROMPT, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(each) for each in re.findall(r"^data: ({.*)", answer.text, re.MULTILINE)]


def test_a_completion_has_the_text_of_openais_path(worker: WorkerProcess) -> None:
    answer = completed(worker, return_tokens=True, n_probs=2)
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    expected = worker.post("/v1/completions", body).json()["choices"][0]["text"]
    assert answer["content"] == expected and len(answer["tokens"]) == 8
    assert answer["stop"] is True and answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 8 and answer["tokens_evaluated"] == 5
    probabilities = answer["completion_probabilities"]
    assert [entry["id"] for entry in probabilities] == answer["tokens"]
    assert all(entry["top_logprobs"][0]["id"] == entry["id"] for entry in probabilities)
    assert answer["timings"]["prompt_ms"] > 0


def test_probabilities_are_before_or_after_the_samplers_and_of_all_tokens_on_request(
    worker: WorkerProcess,
) -> None:
    fields: dict[str, Any] = {"n_probs": 10, "post_sampling_probs": True, "top_k": 2}
    for entry in completed(worker, **fields)["completion_probabilities"]:
        assert "logprob" not in entry and "top_logprobs" not in entry
        assert len(entry["top_probs"]) <= 2 and 0 < entry["prob"] <= 1
        assert sum(each["prob"] for each in entry["top_probs"]) == pytest.approx(1)
    (entry,) = completed(worker, n_predict=1, n_probs=10**6)["completion_probabilities"]
    assert len(entry["top_logprobs"]) == 1024


def test_with_n_predict_0_the_probabilities_are_those_of_the_next_token(
    worker: WorkerProcess,
) -> None:
    (entry,) = completed(worker, n_predict=0, n_probs=5)["completion_probabilities"]
    assert len(entry["top_logprobs"]) == 5
    assert completed(worker, n_predict=0)["content"] == ""


def test_a_token_that_n_indent_cuts_off_has_no_probabilities(worker: WorkerProcess) -> None:
    lines: dict[str, Any] = {"grammar": 'root ::= "a\\n" [a-z]+', "n_indent": 2}
    answer = completed(worker, return_tokens=True, n_probs=1, **lines)
    assert (answer["content"], answer["stop_type"]) == ("a\n", "limit")
    ids = [entry["id"] for entry in answer["completion_probabilities"]]
    assert ids == answer["tokens"][:-1] and len(ids) < answer["tokens_predicted"]


def test_tokens_include_the_end_of_generation_and_those_of_a_stop(worker: WorkerProcess) -> None:
    """Including the end-of-generation token and those of a stop, as in llama-server."""
    ended = completed(worker, return_tokens=True, grammar='root ::= "a"')
    assert (ended["content"], ended["stop_type"]) == ("a", "eos")
    assert len(ended["tokens"]) == ended["tokens_predicted"] == 2
    assert ended["tokens_cached"] == ended["tokens_evaluated"] + 1
    parts = streamed(worker, grammar='root ::= "a"')
    assert [id for each in parts for id in each["tokens"]] == ended["tokens"]
    assert [each["tokens_predicted"] for each in parts] == [1, 2, 2]
    word = completed(worker)["content"].split()[0]
    cut = completed(worker, return_tokens=True, stop=[word])
    assert len(cut["tokens"]) == cut["tokens_predicted"]


@pytest.mark.parametrize("is_after", [False, True])
def test_each_token_of_a_completion_has_its_probabilities(
    worker: WorkerProcess, is_after: bool
) -> None:
    """Including the one that ends it on llama-server's own paths; on OpenAI's that has none."""
    fields: dict[str, Any] = {"grammar": 'root ::= "ab"', "post_sampling_probs": is_after}
    answer = completed(worker, return_tokens=True, n_probs=1, **fields)
    ids = [entry["id"] for entry in answer["completion_probabilities"]]
    assert ids == answer["tokens"] and len(ids) == answer["tokens_predicted"]
    parts = streamed(worker, n_probs=1, **fields)
    scored = [each for part in parts for each in part.get("completion_probabilities", ())]
    assert [each["id"] for each in scored] == ids
    body = {"prompt": PROMPT, "logprobs": 1, "grammar": fields["grammar"]}
    (choice,) = worker.post("/v1/completions", body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(ids) - 1


def test_every_dialect_counts_the_token_that_ends_an_answer(worker: WorkerProcess) -> None:
    """Like llama-server, vLLM and Ollama."""
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    text = "3 plus 4 is 7."
    body = {"model": "m", "temperature": 0, "messages": messages}
    n_tokens = len(worker.post("/tokenize", {"content": text}).json()["tokens"]) + 1
    before = worker.metric("worker_tokens_generated_total")
    chat = worker.post("/v1/chat/completions", body).json()
    assert chat["choices"][0]["message"]["content"] == text
    message = worker.post("/v1/messages", {**body, "max_tokens": 30}).json()
    response = worker.post("/v1/responses", {"temperature": 0, "input": messages}).json()
    ollamas = {"model": "m", "messages": messages, "options": {"temperature": 0}, "stream": False}
    line = worker.post("/api/chat", ollamas)
    counts = [
        chat["usage"]["completion_tokens"],
        chat["timings"]["predicted_n"],
        message["usage"]["output_tokens"],
        response["usage"]["output_tokens"],
        line.json()["eval_count"],
    ]
    assert counts == [n_tokens] * 5
    assert worker.metric("worker_tokens_generated_total") == before + 4 * n_tokens


def test_a_completion_names_the_stop_that_matched(worker: WorkerProcess) -> None:
    word = completed(worker, stop=[" upon", ","])
    assert (word["stop_type"], word["stopping_word"]) == ("word", ",")
    assert "," not in word["content"]
    assert completed(worker, prompt=[PROMPT, "The fox"])[1]["index"] == 1


@pytest.fixture(scope="module")
def small(share_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> WorkerProcess:
    """A worker of 64 tokens; three tokens of its model are declared as fill-in-the-middle
    tokens."""
    marks = {"fim_pre": 90, "fim_suf": 91, "fim_mid": 92}
    changes = {f"tokenizer.ggml.{name}_token_id": token for name, token in marks.items()}
    model = bundled_with(tmp_path_factory.mktemp("infill") / "infill.gguf", changes)
    return share_worker("--model", str(model), "--context-length", "64")


def test_an_answer_that_the_context_ended_is_truncated(small: WorkerProcess) -> None:
    def whole(**fields: Any) -> Any:
        return small.post("/completion", {"prompt": PROMPT, **fields}).json()

    def last(**fields: Any) -> Any:
        return streamed(small, **fields)[-1]

    for ended in (whole, last):
        full, limited = ended(ignore_eos=True), ended(ignore_eos=True, n_predict=8)
        assert full["tokens_evaluated"] + full["tokens_predicted"] == 65
        assert (full["truncated"], limited["truncated"]) == (True, False)
        assert (full["stop_type"], limited["stop_type"]) == ("limit", "limit")


def test_an_answer_has_its_generation_settings_and_only_the_requested_fields(
    worker: WorkerProcess,
) -> None:
    grammar = 'root ::= "a\\n" "b"'
    sampling: dict[str, Any] = {
        "seed": 7,
        "temperature": 0.5,
        "repeat_penalty": 1.5,
        "stop": ["!"],
        "n_probs": 1,
    }
    answer = completed(worker, grammar=grammar, **sampling)
    settings = answer["generation_settings"]
    assert settings.items() >= (sampling | {"n_predict": 8, "stream": False, "top_k": 40}).items()
    assert answer["has_new_line"] is True and answer["prompt"] == PROMPT
    assert completed(worker, grammar='root ::= "a"')["has_new_line"] is False

    fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
    some = completed(worker, response_fields=fields)
    assert some == {"content": some["content"], fields[1]: 8, "prompt": PROMPT}
    last = streamed(worker, grammar=grammar, response_fields=fields[1:2])[-1]
    assert list(last) == fields[1:2]
    assert streamed(worker, grammar=grammar)[-1]["has_new_line"] is True


def test_the_defaults_of_props_are_those_of_a_request_without_settings(
    worker: WorkerProcess,
) -> None:
    defaults = worker.get("/props").json()["default_generation_settings"]["params"]
    answer = worker.post("/completion", {"prompt": PROMPT, "stop": "a", "n_predict": 1}).json()
    used = answer["generation_settings"]
    own = {"seed": 2**32 - 1, "max_tokens": -1, "n_predict": -1, "stop": []}
    ignored = {"n_keep": 0, "n_discard": 0, "backend_sampling": False}
    assert defaults == used | own | ignored
    assert defaults["lora"] == [] and defaults["ignore_eos"] is False and defaults["n_probs"] == 0


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_the_defaults_of_props_contain_no_fixed_seed(worker: WorkerProcess, path: str) -> None:
    defaults = worker.get("/props").json()["default_generation_settings"]["params"]
    body = defaults | {"prompt": PROMPT, "temperature": 1.5, "max_tokens": 16, "n_predict": 16}
    found = [worker.post(path, body).json() for _ in range(4)]
    texts = {str(answer.get("content") or answer.get("choices")) for answer in found}
    assert len(texts) > 1


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_long_prompt_reports_its_progress(worker: WorkerProcess, path: str) -> None:
    text = path + "".join(f"The fox met bird number {n} by the river. " for n in range(40))
    chat = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"max_tokens": 4, "timings_per_token": True}
    body |= {"messages": chat} if "chat" in path else {"prompt": text}
    chunks = streamed(worker, path, **body, return_progress=True)
    reports = [chunk for chunk in chunks if "prompt_progress" in chunk]
    progress = [chunk["prompt_progress"] for chunk in reports]
    assert progress[0]["processed"] == progress[0]["cache"] and len(progress) > 2
    computed = [each["processed"] for each in progress]
    assert computed == sorted(set(computed)) and computed[-1] == progress[-1]["total"]
    assert [each["time_ms"] for each in progress] == sorted(each["time_ms"] for each in progress)
    for chunk, each in zip(reports, progress, strict=True):
        assert chunk["timings"]["prompt_n"] == each["processed"] - each["cache"]
        assert chunk["timings"]["prompt_ms"] == each["time_ms"]
    assert chunks[-1] is not reports[-1]
    plain = streamed(worker, path, **body, return_progress=False)
    assert not any("prompt_progress" in chunk for chunk in plain)


def test_the_pieces_of_tokens_join_to_the_text(worker: WorkerProcess) -> None:
    body = {"content": "A 媽 and 🤗 <|im_end|>", "with_pieces": True}
    tokens = worker.post("/tokenize", body).json()["tokens"]
    raw = b"".join(
        piece.encode() if isinstance(piece := token["piece"], str) else bytes(piece)
        for token in tokens
    )
    assert raw.decode() == body["content"]
    plain = worker.post("/tokenize", {"content": body["content"]}).json()["tokens"]
    assert [token["id"] for token in tokens] == plain
    tokenized = worker.post(
        "/tokenize", {"prompt": "A and <|im_end|>", "return_token_strs": True}
    ).json()
    assert "".join(tokenized["token_strs"]) == "A and <|im_end|>"
    assert len(tokenized["token_strs"]) == tokenized["count"] == len(tokenized["tokens"])
    assert all(isinstance(token, int) for token in tokenized["tokens"])


def test_an_empty_text_has_no_tokens(worker: WorkerProcess) -> None:
    """A missing text is an empty one, without a BOS before it."""
    texts: list[Any] = [{}, {"add_special": True}, {"content": ""}, {"with_pieces": True}]
    for body in texts:
        assert worker.post("/tokenize", body).json()["tokens"] == []
    ids: list[Any] = [{}, {"tokens": []}]
    for body in ids:
        assert worker.post("/detokenize", body).json() == {"content": ""}


def test_min_tokens_delays_the_end_stops_and_stop_token_ids(worker: WorkerProcess) -> None:
    """`min_tokens` delays the end, stops and `stop_token_ids`; later they count."""
    first = completed(worker, return_tokens=True)
    ids, text = first["tokens"], first["content"]
    stopped = completed(worker, stop_token_ids=[ids[2]], return_tokens=True)
    assert stopped["tokens"] == ids[:3] and stopped["stop_type"] == "eos"
    later = completed(worker, stop_token_ids=[ids[2]], min_tokens=5, return_tokens=True)
    assert later["tokens"][:2] == ids[:2] and later["tokens"][2] != ids[2]
    assert later["tokens_predicted"] >= 5
    word = text.split()[0]
    assert completed(worker, stop=[word])["content"].strip() == ""
    assert word in completed(worker, stop=[word], min_tokens=8)["content"]
    end: Any = {"logit_bias": {"2": 100}}
    assert completed(worker, **end)["tokens_predicted"] == 1
    assert completed(worker, **end, min_tokens=3)["tokens_predicted"] == 4


# --- a gap in a text -----------------------------------------------------------------------


def test_a_suffix_and_infill_make_the_same_fill_in_the_middle_prompt(small: WorkerProcess) -> None:
    """A suffix and `/infill` make the same prompt: prefix, suffix and middle, each after its
    token."""
    worker = small

    def ids(text: str) -> list[int]:
        found: list[int] = worker.post("/tokenize", {"content": text}).json()["tokens"]
        return found

    before, after = "Once upon a", " there was a fox."
    greedy = {"temperature": 0, "max_tokens": 8}
    marked = [0, 90, *ids(before), 91, *ids(after), 92]
    expected = worker.post("/v1/completions", {"prompt": marked, **greedy}).json()
    body = {"prompt": before, "suffix": after, **greedy}
    answer = worker.post("/v1/completions", body).json()
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["prompt_tokens"] == len(marked)
    body = {"input_prefix": "Once", "prompt": " upon a", "input_suffix": after, **greedy}
    infill = worker.post("/infill", body).json()
    assert infill["content"] == expected["choices"][0]["text"]
    extra = {"input_extra": [{"filename": "a.py", "text": "def f(): pass"}]}
    assert worker.post("/infill", body | extra).json()["tokens_evaluated"] > len(marked)


LONG = "word " * 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt[1]"),
        ("/completion", {"prompt": [[1], [1, 99999]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1, 99999]}, "prompt"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": LONG}, "suffix"),
        ("/v1/completions", {"prompt": LONG, "suffix": "a"}, "prompt"),
        ("/infill", {"input_prefix": LONG, "input_suffix": "a"}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "prompt": LONG, "input_suffix": "b"}, "prompt"),
        ("/infill", {"input_prefix": "a", "input_suffix": LONG}, "input_suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": LONG}]},
         "input_extra"),
    ],
)  # fmt: skip
def test_the_invalid_part_of_a_prompt_is_named(
    small: WorkerProcess, path: str, body: Any, param: str
) -> None:
    answer = small.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_model_without_fill_in_the_middle_tokens_says_what_to_send(worker: WorkerProcess) -> None:
    """`/infill` itself requires a gap."""
    gap = {"input_prefix": "a", "input_suffix": "b"}
    for path, body in (("/infill", gap), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        error = worker.post(path, body).json()["error"]["message"]
        assert error.endswith("send what comes before the gap alone, as the prompt of a completion")


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_the_tokens_of_a_prompt_are_counted(worker: WorkerProcess, prefix: str) -> None:
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = worker.post("/v1/chat/completions", chat | {"max_tokens": 1}).json()
    for path, body in (
        ("/chat/completions", chat),
        ("/responses", {"input": "What is the capital of France?"}),
    ):
        counted = worker.post(f"{prefix}{path}/input_tokens", body).json()
        assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_timings_come_with_every_token_only_on_request(worker: WorkerProcess) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    chat |= {"stream_options": {"include_usage": True}}
    for per_token in (False, True):
        chunks = streamed(worker, "/v1/chat/completions", **chat, timings_per_token=per_token)
        first, *middle, last, usage = chunks
        assert "timings" not in first and last["timings"] == usage["timings"]
        assert [("timings" in chunk) for chunk in middle] == [per_token] * len(middle)


@pytest.mark.parametrize(
    ("n_predicted", "fields"), [(0, {"n_predict": 0}), (1, {"grammar": 'root ::= ""'})]
)
def test_timings_of_an_empty_answer_have_its_prompt(
    worker: WorkerProcess, n_predicted: int, fields: dict[str, Any]
) -> None:
    answer = completed(worker, cache_prompt=False, **fields)
    found = answer["timings"]
    assert (found["predicted_n"], found["prompt_n"]) == (n_predicted, answer["tokens_evaluated"])
    assert found["prompt_per_second"] > 0


def test_timings_of_each_token_have_the_prompts_time(worker: WorkerProcess) -> None:
    chunks = streamed(worker, n_predict=3, ignore_eos=True, timings_per_token=True)
    assert not any("prompt_progress" in chunk for chunk in chunks)
    assert all(chunk["timings"]["prompt_ms"] > 0 for chunk in chunks)


def test_the_first_token_is_not_counted_in_the_generation_speed(worker: WorkerProcess) -> None:
    """As in llama-server: of two tokens, only one took the time of the answer."""
    two, one = (completed(worker, n_predict=n, ignore_eos=True)["timings"] for n in (2, 1))
    assert two["predicted_per_token_ms"] == two["predicted_ms"] > 0
    assert two["predicted_per_second"] == pytest.approx(1000 / two["predicted_ms"], rel=0.01)
    assert (one["predicted_per_token_ms"], one["predicted_per_second"]) == (0, 0)
    assert one["predicted_ms"] > 0, "clients divide by it"


def test_a_chat_is_tokenised_as_the_template_writes_it(worker: WorkerProcess) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = worker.post("/tokenize", {"model": "m", "messages": messages}).json()
    counted = worker.post("/v1/chat/completions/input_tokens", {"messages": messages}).json()
    assert answer["count"] == len(answer["tokens"]) == counted["input_tokens"]
    assert answer["max_model_len"] == worker.get("/health").json()["context_length"]
    refused = worker.post("/tokenize", {"content": "a", "messages": messages})
    assert refused.status_code == 400 and "content must not be combined" in refused.text


def test_a_prompt_that_is_too_long_is_refused_in_each_dialects_words(worker: WorkerProcess) -> None:
    text = "word " * 3000
    chat: Any = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    n_ctx = worker.get("/health").json()["context_length"]

    def refused(path: str, body: Any) -> Any:
        answer = worker.post(path, body)
        assert answer.status_code == 400, answer.text
        return answer.json().get("error", answer.json())

    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "m", "prompt": text}),
        ("/v1/responses", {"model": "m", "input": text}),
    ):
        error = refused(path, body)
        n_tokens = error["prompt_tokens"]
        assert error["code"] == "context_length_exceeded" and n_tokens > n_ctx
        begin = f"This model's maximum context length is {n_ctx} tokens. However, you requested "
        assert error["message"].startswith(f"{begin}{n_tokens} tokens")
    anthropics = refused("/v1/messages", chat)
    assert anthropics["message"].startswith("prompt is too long: ")
    llamas = refused("/completion", {"prompt": text})
    assert llamas["type"] == "exceed_context_size_error"
    n_tokens = llamas["n_prompt_tokens"]
    assert n_tokens > llamas["n_ctx"] == n_ctx
    own = refused("/v1/inference", {"prompt": text})
    assert (own["code"], own["prompt_tokens"]) == ("CONTEXT_LENGTH_EXCEEDED", n_tokens)
    assert own["context_length"] == n_ctx
    assert f"{n_tokens}" in own["message"] and f"{n_ctx}" in own["message"]


def test_an_unknown_server_tool_is_refused_with_a_short_message(worker: WorkerProcess) -> None:
    """Its page calls one at its start."""
    error = worker.post("/tools", {"tool": "a" * 70_000}).json()["error"]
    assert "no tool 'aaa" in error and "nor any other" in error and len(error) < 2000


def test_the_probes_of_vllms_routers_are_answered(worker: WorkerProcess) -> None:
    assert worker.get("/ping").status_code == 200
    assert worker.get("/load").json() == {"server_load": 0}
    assert worker.get("/version").json()["version"]


def test_the_system_fingerprint_begins_with_llama_cpps_build(worker: WorkerProcess) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = worker.post("/v1/chat/completions", body).json()
    assert re.match(r"b\d+-[0-9a-z]+-", answer["system_fingerprint"])
    assert worker.get("/props").json()["build_info"] == answer["system_fingerprint"]


def test_a_prompt_mixes_tokens_and_texts(worker: WorkerProcess) -> None:
    """A leading text gets a BOS; a list that contains a number is one prompt."""

    def tokens(content: Any, **fields: Any) -> list[int]:
        found: list[int] = worker.post("/tokenize", {"content": content, **fields}).json()["tokens"]
        return found

    once, fox = tokens("Once"), tokens(" fox")
    assert tokens(["Once", 100, " fox"]) == [*once, 100, *fox]
    mixed = completed(worker, prompt=["Once", 100, " fox"])
    plain = completed(worker, prompt=[0, *once, 100, *fox])
    assert mixed["content"] == plain["content"]
    assert mixed["tokens_evaluated"] == plain["tokens_evaluated"]
    several = completed(worker, prompt=["Once", [100, " fox"], {"prompt_string": "Once"}])
    assert [each["tokens_evaluated"] for each in several] == [2, 2, 2]
    echoed = worker.post(
        "/v1/completions", {"prompt": ["Once", 16, " fox"], "echo": True, "max_tokens": 1}
    ).json()
    assert echoed["choices"][0]["text"].startswith("Once. fox")
    spelt = tokens("<|im_start|>", parse_special=False)
    assert len(spelt) > len(tokens("<|im_start|>")) == 1
    assert tokens(["<|im_start|>", 100], parse_special=False) == [*spelt, 100]
    refused = worker.post("/completion", {"prompt": [1.5, "a"]})
    assert refused.status_code == 400 and "prompt" in refused.text
