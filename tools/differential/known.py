"""The known differences from llama-server, with their reasons; any other difference is a fault.

A field is named by its path in the answer, with `*` for any part of it; items of a list have the
list's name. In a stream, fields are those of the sum of its events of each kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    from tools.differential.asking import Asked
    from tools.differential.compare import Difference

Has = Literal["both", "theirs", "ours"]
ABSENT = "(absent)"


def always(asked: Asked, found: Difference) -> bool:
    return True


class Known(NamedTuple):
    why: str
    fields: tuple[str, ...]
    has: Has | None = None
    """Which server has the field."""
    paths: tuple[str, ...] = ("*",)
    when: Callable[[Asked, Difference], bool] = always


def _has_two_formats(asked: Asked, found: Difference) -> bool:
    """Whether the request has two of: a grammar, a schema, a forced call."""
    forms = ("grammar", "json_schema", "response_format", "tools")
    return len({*forms} & set(asked.body or ())) > 1


def _typical_beside_zeros(asked: Asked, found: Difference) -> bool:
    """Whether typical_p is applied while some tokens already have probability 0."""
    body = asked.body or {}
    forbids = body.get("ignore_eos") or "false" in json.dumps(body.get("logit_bias"))
    return body.get("typical_p", 1) < 1 and bool(body.get("top_n_sigma", 0) > 0 or forbids)


def _is_drawn(asked: Asked, found: Difference) -> bool:
    return asked.body.get("temperature", 1) > 0 and asked.body.get("post_sampling_probs") is True


def _keeps_a_stop_beginning(asked: Asked, found: Difference) -> bool:
    """Whether there are stops, and the worker's text is llama-server's plus a little more."""
    stops = asked.body.get("stop") or asked.body.get("stop_sequences")
    texts = isinstance(found.theirs, str) and isinstance(found.ours, str)
    return bool(stops) and texts and found.ours.startswith(found.theirs)


def _equal_documents(asked: Asked, found: Difference) -> bool:
    documents = asked.body.get("documents") or asked.body.get("texts") or ()
    return bool(documents) and documents[found.theirs] == documents[found.ours]


_BEGINNINGS = ("content_block_start*", "*.added", "response.created", "response.in_progress")
"""Events that have no text or call yet."""
_CUTS = ("length", "incomplete", "limit", "max_tokens")
"""The dialects' names for the end of such an answer."""
_ECHOES = ("generation_settings", "tools", "prompt")


def _texts(answer: Any, name: str = "") -> Iterator[str]:
    """Yield the texts of an answer, without its calls."""
    if isinstance(answer, str) and answer and name in ("content", "text"):
        yield answer
    for key, value in _parts(answer):
        yield from _texts(value, key or name)


def _calls(answer: Any) -> Iterator[tuple[str | None, str]]:
    """Yield the calls of an answer: the arguments, and the name if it is beside them."""
    if isinstance(answer, dict):
        for field in "arguments", "partial_json", "input":
            if isinstance(given := answer.get(field), str | dict) and given:
                text = given if isinstance(given, str) else json.dumps(given)
                yield answer.get("name"), text
    for _, value in _parts(answer):
        yield from _calls(value)


def _parts(answer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(answer, list):
        yield from (("", each) for each in answer)
    elif isinstance(answer, dict):
        for key, value in answer.items():
            begins = any(fnmatchcase(key, pattern) for pattern in _BEGINNINGS)
            if not begins and key not in _ECHOES:
                yield key, value


def _is_cut(answer: Any) -> bool:
    """Whether the token limit of the request has ended the answer."""
    return any(f'"{word}"' in json.dumps(answer) for word in _CUTS)


def _is_of(schema: Any, text: str, *, is_cut: bool = False) -> bool:
    if is_cut:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        tokens = list(text.encode())
        return LLMatcher(LLTokenizer("byte"), grammar).validate_tokens(tokens) == len(tokens)
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def _fits(asked: Asked, found: Difference) -> bool:
    """Whether the request has a constraint that the worker's texts and calls fully match; of two
    constraints, one must match."""
    body = asked.body or {}
    texts, calls = list(_texts(found.answer)), list(_calls(found.answer))
    fits = []
    if body.get("grammar"):
        expression = re.compile(body["grammar"].removesuffix("\n").rpartition("\n# ")[2])
        fits.append(bool(texts) and all(map(expression.fullmatch, texts)))
    given = [body.get("response_format"), (body.get("text") or {}).get("format")]
    for form in [each for each in given if each and each["type"] != "text"]:
        schema = (form.get("json_schema") or form).get("schema", {"type": "object"})
        is_cut = _is_cut(found.answer)
        fits.append(bool(texts) and all(_is_of(schema, text, is_cut=is_cut) for text in texts))
    if "json_schema" in body:
        fits.append(bool(texts) and all(_is_of(body["json_schema"], text) for text in texts))
    if tools := [each.get("function", each) for each in body.get("tools") or ()]:
        schemas = {each["name"]: each.get("parameters", each.get("input_schema")) for each in tools}
        are_of = all(
            any(_is_of(of, text) for called, of in schemas.items() if name in (None, called))
            for name, text in calls
        )
        # Without a forced call another text is right: the prompt describes tools in other words.
        fits.append(are_of and (body.get("tool_choice") == "auto" or bool(calls) and not texts))
    return any(fits)


def _is_empty_event(asked: Asked, found: Difference) -> bool:
    """Whether llama-server's event has no text, even if its last one has other fields."""
    if isinstance(found.theirs, dict):
        return not found.theirs.get("content")
    return (
        found.path == "stream.None"
        or "response_fields" in asked.body
        and not list(_texts(found.answer))
    )


def _is_half(found: Difference) -> bool:
    return isinstance(found.ours, str) and found.ours.rstrip("\ufffd") == found.theirs


def _numbers(asked: Asked, found: Difference) -> bool:
    return all(isinstance(each, int | float) for each in (found.theirs, found.ours))


def _mentions(*names: str) -> Callable[[Asked, Difference], bool]:
    """Whether the request has one of these fields, or contains such a text."""

    def check(asked: Asked, found: Difference) -> bool:
        text = json.dumps(asked.body, ensure_ascii=False)
        return any(name in (asked.body or ()) or name in text for name in names)

    return check


def _has_several(*names: str) -> Callable[[Asked, Difference], bool]:
    """Whether the request has several texts to embed, prompts or choices."""

    def check(asked: Asked, found: Difference) -> bool:
        given = [asked.body.get(name) for name in names]
        return any(
            each > 1 if isinstance(each, int) else isinstance(each, list) and len(each) > 1
            for each in given
        )

    return check


def _has_null(asked: Asked, found: Difference) -> bool:
    return isinstance(asked.body, dict) and None in asked.body.values()


CHATS = ("*/chat/completions*", "*/responses*", "/v1/messages*", "/apply-template")
OPENAI = ("*/chat/completions", "/v1/completions")
OWN = ("/completion", "/infill")
_OF_TEXT = (
    "*.content*", "*.text", "*.tokens*", "*.delta*", "*finish_reason", "*.usage.*", "*.stop_type",
    "*.timings.*", "*completion_probabilities*", "*.tokens_*", "*.has_new_line", "*.message*",
)  # fmt: skip
"""Fields that differ if the text differs."""
CONTROL = "<|im_start|>"

KNOWN = (
    # --- each server's own values ---
    Known(
        "new for each answer",
        ("*.id", "*.created", "*.created_at", "*.item_id", "*.call_id", "*.correlation_id"),
    ),
    Known("times are measured", ("*.timings.*_ms", "*.timings.*_per_second"), when=_numbers),
    Known(
        "the model is named after its file, never by a path",
        ("*.model", "*.model_alias", "*.model_path", "*.data.aliases"),
    ),
    Known("llama.cpp's build, followed by this worker's name", ("*.system_fingerprint",
          "*.build_info"), "both"),
    Known("llama-server draws a new one at each start", ("*.media_marker",), "both"),
    Known(
        "cached tokens depend on earlier requests and on where they are kept",
        ("*.cached_tokens", "*.cache_n", "*.prompt_n", "*.cache_read_input_tokens",
         "*.usage.input_tokens", "*.prompt_progress.*"),
        "both",
        when=_numbers,
    ),
    Known("progress is reported once per computed step", ("*.prompt_progress",)),
    Known(
        "llama-server sends a token 0 with each progress event",
        ("stream.event*.tokens",),
        "both",
        when=_mentions('"return_progress": true'),
    ),
    Known("slots are not named, because requests do not own them", ("*.id_slot",), "both"),
    Known("a drawn seed is returned, not -1", ("*.generation_settings.seed",), "both"),
    Known("the name of this project", ("*.owned_by",), "both"),
    # --- states: each server's own words ---
    Known("a worker's health has its own format", ("answer.*",), paths=("/health", "/v1/health")),
    Known(
        "a request's settings are only in its answer",
        ("*.default_generation_settings.params.*",),
        "theirs",
    ),
    Known(
        "all default settings are returned, like those of an answer",
        ("*.default_generation_settings.params.*",),
        "ours",
    ),
    Known("/api/tags lists it for Ollama's clients", ("answer.models",), "theirs"),
    Known("fields for routers and endpoint pickers", ("answer.data.root", "answer.data.parent",
          "answer.data.architecture", "answer.data.status"), "ours"),
    Known("fields for Anthropic's clients", ("answer.data.type", "answer.data.display_name",
          "answer.data.created_at", "answer.data.lifecycle", "answer.data.max_input_tokens",
          "answer.data.max_tokens", "answer.has_more", "answer.first_id",
          "answer.last_id"), "ours"),
    Known("named as everywhere in this project", ("*.ftype", "*.model_ftype"), "both"),
    Known("llama.cpp's number of the tokenizer's kind; /info has its name", ("*.vocab_type",)),
    Known("this worker always has them", ("answer.endpoint_metrics", "answer.ui"), "both"),
    Known("settings of a page or proxy that do not exist here", ("answer.ui_settings",
          "answer.cors_proxy_enabled"), "theirs"),
    Known("messages are adapted to the template's capabilities", ("*.chat_template_caps",)),
    # --- structured output ---
    Known(
        "/completions is OpenAI's, as with /v1, for clients whose base URL lacks it",
        ("answer*", "stream*"),
        paths=("/completions",),
    ),
    Known(
        "/embeddings is OpenAI's, as with /v1; /embedding has llama-server's format",
        ("answer*",),
        paths=("/embeddings",),
    ),
    Known("OpenAI's own format of log-probabilities", ("*.choices.logprobs*",), paths=OPENAI),
    Known("OpenAI's SDK has the field", ("*.refusal", "*.cache_write_tokens",
          "*.output_tokens_details",
          "*.completion_tokens_details", "*.cache_creation_input_tokens"), "ours"),
    Known("a response has all of OpenAI's fields", ("*",), "ours", ("*/responses",)),
    Known("a stream has usage only on request, as at OpenAI", ("*.usage",), "theirs",
          OPENAI),
    Known("the end of a message has all of its usage", ("stream.message_delta.usage.*",), "ours"),
    Known("a vector has the requested format", ("*.encoding_format",), "theirs"),
    Known("vLLM's, beside llama-server's", ("answer.count", "answer.max_model_len"), "ours"),
    Known("internals of llama-server's grammar, parser or draft", (
        *(f"*.generation_settings.{name}" for name in (
            "n_keep", "n_discard", "grammar_lazy", "grammar_triggers", "preserved_tokens",
            "chat_format", "reasoning_format", "reasoning_in_content", "generation_prompt",
            "speculative.types", "backend_sampling", "lora",
        )),
    ), "theirs"),
    Known("the prompt is returned as it was sent", ("*.prompt",), paths=OWN),
    Known("tokens are guessed here by default", ("answer.speculative",), "both"),
    Known(
        "ignore_eos forbids the ends of generation without a list of them",
        ("*.logit_bias",),
        "both",
        when=_mentions("ignore_eos"),
    ),
    # --- counts ---
    Known(
        "all prompts and choices of an answer are counted together",
        ("*.usage.*", "*.timings.*"),
        "both",
        when=_has_several("n", "n_cmpl", "prompt"),
    ),
    Known(
        "a control token spelled out in a message, document or file is text, so that nobody "
        "can forge turns",
        ("*",),
        "both",
        (*CHATS, "*rerank*", "/infill"),
        when=_mentions(CONTROL),
    ),
    Known(
        "empty instructions count as missing, and so does null",
        ("*",),
        paths=("*/responses*",),
        when=_mentions('"instructions": ""', '"instructions": null'),
    ),
    Known(
        "a control token among the likely ones is spelled out, not left empty; half a character "
        "is a replacement character",
        ("*probs.token", "*probs.bytes", "*_probabilities.token", "*_probabilities.bytes"),
        "both",
        when=lambda asked, found: not found.theirs or _is_half(found),
    ),
    Known(
        "empty events are not sent",
        ("stream.None", "stream.event*"),
        "theirs",
        when=_is_empty_event,
    ),
    Known(
        "the bias of a text is returned as it was sent",
        ("*.generation_settings.logit_bias*",),
        "both",
        when=_mentions("logit_bias"),
    ),
    Known(
        "an empty text is a string, as at OpenAI, and not null",
        ("stream.*.delta.content",),
        when=lambda asked, found: (found.theirs, found.ours) == (None, ""),
    ),
    # --- computed values ---
    Known(
        "another text that the constraint allows: forced text is in the tokenizer's own tokens, "
        "JSON may have whitespace, and Responses and Messages force calls",
        (*_OF_TEXT, "*.output*", "*.stop_reason"),
        when=_fits,
    ),
    Known(
        "a template without tools gets them described in words",
        ("*.input_tokens", "*.prompt"),
        paths=CHATS,
        when=_mentions('"tools": [{'),
    ),
    Known(
        "llama.cpp's typical_p computes NaN for tokens with probability 0, such as those that "
        "top_n_sigma drops",
        _OF_TEXT,
        when=_typical_beside_zeros,
    ),
    Known(
        "each server has its own random numbers",
        tuple(f"*_probabilities.{name}" for name in ("token", "bytes", "prob")),
        "both",
        when=_is_drawn,
    ),
    Known(
        "half a character at the end has no probability in llama-server's answer",
        ("*.completion_probabilities",),
        "ours",
        when=_is_drawn,
    ),
    Known(
        "a possible beginning of a stop is sent when the answer ends; llama-server drops it",
        _OF_TEXT,
        when=_keeps_a_stop_beginning,
    ),
    Known(
        "an empty stop never matches",
        (*_OF_TEXT, "*.generation_settings.stop"),
        when=_mentions('"stop": [""]'),
    ),
    Known(
        "a schema is not converted to a grammar of llama.cpp",
        ("*.generation_settings.grammar",),
        when=_mentions("json_schema", '"schema"', "json_object"),
    ),
    Known(
        "several texts have the same vectors as each alone, unlike in llama-server",
        ("*.embedding*",),
        "both",
        when=_has_several("input", "content"),
    ),
    Known(
        "an error names the wrong field, in the worker's words",
        ("answer.error.*",),
        paths=("/v1/embeddings",),
    ),
    Known(
        "content is llama-server's own field, with a different format on each path",
        ("status",),
        paths=("/v1/embeddings",),
        when=_mentions("content"),
    ),
    Known(
        "other files of a project are used whole or refused as too long; llama-server cuts them",
        ("*",),
        "both",
        ("/infill",),
        when=_mentions("filename", "input_extra"),
    ),
    Known("equal documents may be in any order", ("*.index",), when=_equal_documents),
    Known(
        "a stop that ended a message is its stop reason, as at Anthropic",
        ("*.stop_reason",),
        paths=("/v1/messages",),
        when=lambda asked, found: (found.theirs, found.ours) == ("end_turn", "stop_sequence"),
    ),
    # --- what is accepted ---
    Known(
        "of two formats for an answer one counts: a forced call, else the first",
        ("status",),
        paths=CHATS,
        when=_has_two_formats,
    ),
    Known(
        "llama-server has an internal error, as with a grammar that ends where no end is allowed",
        ("status", "stream.*"),
        when=lambda asked, found: (
            found.theirs == 500
            or found.theirs == ABSENT
            and asked.body.get("ignore_eos") is True
            and _fits(asked, found)
        ),
    ),
    Known("null counts as absent everywhere", ("status",), when=_has_null),
    Known(
        "an answer that max_output_tokens ended is incomplete",
        ("*.status", "*.completed_at", "stream.response.completed", "stream.response.incomplete"),
        paths=("*/responses",),
    ),
)  # fmt: skip


def reason_of(asked: Asked, found: Difference) -> str | None:
    """Return why it differs; `None` for a fault."""
    path = found.path.replace("[]", "")
    has = "theirs" if found.ours == ABSENT else "ours" if found.theirs == ABSENT else "both"
    return next(
        (
            each.why
            for each in KNOWN
            if each.has in (None, has)
            and any(fnmatchcase(asked.path, pattern) for pattern in each.paths)
            and any(fnmatchcase(path, pattern) for pattern in each.fields)
            and each.when(asked, found)
        ),
        None,
    )
