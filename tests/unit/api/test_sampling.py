"""A request's sampling fields reach the sampler in every dialect, through one table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.scripted_api import ScriptedWorker
from worker.api.chat.sampling import LLAMA_CPP_WINDOW, is_token_id
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.anthropic.schema import read as read_messages
from worker.api.dialects.llama_server.completion import read_completion as read_llama_server
from worker.api.dialects.llama_server.schema import CompletionBody as LlamaServerBody
from worker.api.dialects.native.schema import InferenceBody, read_inference
from worker.api.dialects.ollama.schema import GenerateBody, read_generate
from worker.api.dialects.openai.schema import ChatBody, CompletionBody, read_chat, read_completion
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.dialects.responses.schema import read as read_responses
from worker.api.http.body import _extras
from worker.api.http.faults import faults_of
from worker.api.http.state import sampling_defaults
from worker.errors import InvalidRequest
from worker.flags import parse_flags
from worker.settings import Settings
from worker.wire.sampling import (
    LETTERS,
    MAX_SAMPLERS,
    ORDER,
    OTHERS,
    PARAMETERS,
    SAMPLERS,
    Parameter,
    Sampling,
    order_of,
)

STATE = ScriptedWorker(Settings(), None).state
USER = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Dialect:
    name: str
    model: Any
    read: Callable[[Any, Any], Any]
    fields: dict[str, Any]
    inside: str = ""
    """The field that contains the sampling fields."""

    def body(self, **fields: Any) -> Any:
        placed = {self.inside: fields} if self.inside else fields
        return self.model.model_validate({**self.fields, **placed})

    def sampling(self, **fields: Any) -> Sampling:
        sampling: Sampling = self.read(self.body(**fields), STATE).sampling
        return sampling

    def faults(self, **fields: Any) -> dict[str, str]:
        with pytest.raises(ValidationError) as caught:
            self.body(**fields)
        return {each["field"]: each["message"] for each in faults_of(caught.value, self.model)}


OPEN = [
    Dialect("chat", ChatBody, read_chat, {"messages": USER}),
    Dialect("completions", CompletionBody, read_completion, {"prompt": "a"}),
    Dialect("responses", ResponsesBody, read_responses, {"input": "a"}),
    Dialect("messages", MessagesBody, read_messages, {"messages": USER, "max_tokens": 1}),
    Dialect("llama-server", LlamaServerBody, read_llama_server, {"prompt": "a"}),
    Dialect(
        "ollama", GenerateBody, read_generate, {"model": "m", "prompt": "a", "raw": True},
        "options",
    ),
]  # fmt: skip
NATIVE = Dialect("native", InferenceBody, read_inference, {"prompt": "a"})
ALL = [*OPEN, NATIVE]
dialects = pytest.mark.parametrize("dialect", ALL, ids=lambda each: each.name)
open_ones = pytest.mark.parametrize("dialect", OPEN, ids=lambda each: each.name)
NUMBERS = tuple(PARAMETERS.values())


def some_value(known: Parameter) -> float:
    """Return a value in every dialect's range that is no default."""
    low, high = known.low, min(known.high, 2)
    return 2 if known.is_integer else round(low + 0.37 * (high - low), 3)


@dialects
def test_each_number_reaches_the_sampler(dialect: Dialect) -> None:
    silent = dialect.sampling()
    for known in NUMBERS:
        value = 3 if known.name == "dry_allowed_length" else some_value(known)
        for name in known.names if dialect is not NATIVE else [known.name]:
            sampling = dialect.sampling(**{name: value})
            assert getattr(sampling, known.name) == value != getattr(silent, known.name), name


@dialects
def test_a_number_beyond_its_range_is_refused_by_name(dialect: Dialect) -> None:
    is_theirs = dialect.model is LlamaServerBody
    for known in NUMBERS:
        low, high = known.range if dialect is not NATIVE else (known.low, known.high)
        if is_theirs and known.name in ("frequency_penalty", "presence_penalty"):
            low, high = -1000, 1000
        for wrong in (low - 1, high + 1, "much"):
            taken = known.nearest(wrong) if is_theirs and not isinstance(wrong, str) else wrong
            if taken != wrong:
                sampling = dialect.sampling(**{known.name: wrong})
                assert getattr(sampling, known.name) == taken, known.name
            else:
                assert known.name in next(iter(dialect.faults(**{known.name: wrong})))


@pytest.mark.parametrize(
    ("given_numbers", "meant"),
    [
        ({"temperature": -1}, {"temperature": 0}),
        ({"top_p": 1.5, "min_p": -1, "temperature": 0}, {"top_p": 1, "min_p": 0}),
        ({"xtc_probability": -1, "xtc_threshold": 2}, {"xtc_probability": 0, "xtc_threshold": 1}),
        ({"mirostat": -1, "adaptive_target": 2}, {"mirostat": 0, "adaptive_target": 1}),
        ({"frequency_penalty": -2.5, "presence_penalty": 3}, {}),
    ],
)
def test_llama_server_s_numbers_beyond_their_range_are_clamped(
    given_numbers: dict[str, Any], meant: dict[str, Any]
) -> None:
    sampling = OPEN[4].sampling(**given_numbers)
    for name, value in (given_numbers | meant).items():
        assert getattr(sampling, name) == value


@open_ones
def test_numbers_below_their_lowest_value_mean_off(dialect: Dialect) -> None:
    below = [known for known in NUMBERS if known.range[0] < known.low]
    sampling = dialect.sampling(**{known.name: known.range[0] for known in below})
    assert below and all(getattr(sampling, known.name) == known.default for known in below)


@dialects
def test_the_order_is_names_or_letters(dialect: Dialect) -> None:
    names = ["min_p", "temperature", "top_k", "adaptive_p", "xtc"]
    assert dialect.sampling(samplers=names).samplers == tuple(names)
    assert dialect.sampling(samplers=[]).samplers == ()
    assert dialect.sampling().samplers == ORDER
    if dialect is not NATIVE:
        assert dialect.sampling(samplers="mtkax").samplers == tuple(names)
        for order in ("min-p;temp;topk;xtc", "min-p, temp,topk,xtc"):
            assert dialect.sampling(samplers=order).samplers == (*names[:3], "xtc")
    for wrong in (["top_k", "mystery"], ["mystery"], ["mystery" * 10_000]):
        (message,) = dialect.faults(samplers=wrong).values()
        assert "top_n_sigma" in message and len(message) < 2000


@given(st.lists(st.sampled_from(sorted(LETTERS))))
def test_letters_and_names_are_equivalent(letters: list[str]) -> None:
    names = tuple(LETTERS[letter] for letter in letters)
    assert order_of("".join(letters)) == order_of(names) == names


@open_ones
def test_an_order_is_bounded(dialect: Dialect) -> None:
    assert len(dialect.sampling(samplers="y" * 64).samplers) == 64
    for many in ("y" * 65, ["typ_p"] * 65, "typ_p;" * 65):
        (message,) = dialect.faults(samplers=many).values()
        assert "samplers names 65 samplers" in message


def test_an_unknown_letter_is_named() -> None:
    with pytest.raises(ValueError, match="'z', which is not a sampler's letter"):
        order_of("kpz")


@open_ones
def test_unsupported_samplers_may_only_be_off(dialect: Dialect) -> None:
    assert dialect.sampling(**OTHERS).samplers == ORDER
    found = dialect.faults(**{name: off + 0.5 for name, off in OTHERS.items()})
    for (name, off), message in zip(OTHERS.items(), found.values(), strict=True):
        assert name in message and f"off with {off}" in message


def test_the_native_dialect_refuses_unknown_fields() -> None:
    for name in ("tfs_z", "repeat_penalty", "sampler_priority"):
        assert "is not a field here" in NATIVE.faults(**{name: 1})[name]


@dialects
def test_a_window_of_penalties_is_the_dialects_own(dialect: Dialect) -> None:
    """For llama.cpp's clients the last 64 tokens; for OpenAI's the answer."""
    expected = LLAMA_CPP_WINDOW if dialect.name in ("llama-server", "ollama") else None
    assert dialect.sampling().repeat_last_n == expected
    assert dialect.sampling(repeat_last_n=-1).repeat_last_n == -1


@open_ones
def test_biases_in_all_their_forms(dialect: Dialect) -> None:
    forms: list[tuple[Any, Any]] = [
        ({"5": 1.5, "6": False}, ((5, 1.5), (6, -math.inf))),
        ({" word": -3}, ((" word", -3),)),
        ([[5, 1], [6, False]], ((5, 1), (6, -math.inf))),
        ([[" word", 2.5]], ((" word", 2.5),)),
        ([["12", 2.5]], (("12", 2.5),)),
        ([], ()),
        ({}, ()),
    ]
    for given_bias, expected in forms:
        assert dialect.sampling(logit_bias=given_bias).logit_bias == expected
    for wrong in (
        "5",
        [5],
        [[5]],
        {"5": True},
        {"5": 101 if dialect.model is not LlamaServerBody else 10**6 + 1},
        {"5": "much"},
        [[1.5, 2]],
        7,
        {"x" * 20_000: 1},
    ):
        (message,) = dialect.faults(logit_bias=wrong).values()
        assert "logit_bias must" in message


@open_ones
@pytest.mark.parametrize(
    "given_breakers",
    [["\n", ":"], '["\\n", ":"]', '"\\n", ":"'],
    ids=["a list", "JSON", "its items"],
)
def test_breakers_in_all_their_forms(dialect: Dialect, given_breakers: Any) -> None:
    sampling = dialect.sampling(dry_sequence_breakers=given_breakers)
    assert sampling.dry_sequence_breakers == ("\n", ":")


def test_too_many_log_probabilities_are_refused() -> None:
    server = OPEN[4]
    assert server.sampling(n_predict=8, n_probs=100_000).logprobs == 100_000
    assert server.sampling(n_predict=100_000, n_probs=20).logprobs == 20
    assert server.sampling(n_probs=-1).logprobs is None
    with pytest.raises(InvalidRequest, match="n_probs must be at most 1024 for 1024 tokens"):
        server.sampling(n_predict=1024, n_probs=1025)


# --- defaults -----------------------------------------------------------------------------


@pytest.mark.parametrize("known", NUMBERS, ids=lambda each: each.name)
def test_a_flag_wins_over_the_file_and_the_file_over_llama_cpp(known: Parameter) -> None:
    flag = "--" + known.name.replace("_", "-")
    value, key = some_value(known), known.key
    settings = Settings.load("cpu", parse_flags("cpu", [flag, str(value)]))
    in_file = 1
    metadata = {f"general.sampling.{key}": in_file} if key else {}
    assert sampling_defaults(metadata, dict(settings.sampling))[known.name] == value
    found = sampling_defaults(metadata, {}).get(known.name)
    assert found == (in_file if key else known.usual)
    assert sampling_defaults({}, {}).get(known.name) == known.usual


def test_the_order_by_flag_and_by_file() -> None:
    flags = parse_flags("cpu", ["--samplers", "top_k;min_p"])
    settings = Settings.load("cpu", flags)
    metadata = {"general.sampling.sequence": "temperature;unheard-of;top_p"}
    assert sampling_defaults(metadata, dict(settings.sampling))["samplers"] == ("top_k", "min_p")
    assert sampling_defaults(metadata, {})["samplers"] == ("temperature", "top_p")
    assert STATE.served.sampling["samplers"] == ORDER
    metadata = {"general.sampling.sequence": "top_k;" * 2**20}
    assert sampling_defaults(metadata, {})["samplers"] == ("top_k",) * MAX_SAMPLERS


def test_a_request_wins_over_every_default() -> None:
    flags = parse_flags("cpu", ["--top-k", "7", "--temperature", "0.3"])
    state = ScriptedWorker(Settings.load("cpu", flags), None).state
    read = read_completion(CompletionBody.model_validate({"prompt": "a", "top_k": 0}), state)
    assert (read.sampling.top_k, read.sampling.temperature) == (0, 0.3)
    native = read_inference(InferenceBody.model_validate({"prompt": "a"}), state)
    assert (native.sampling.top_k, native.sampling.temperature) == (0, 1.0), "the contract's"


# --- whole bodies ---------------------------------------------------------------------------

HARMLESS = {
    "model", "skew", "length_penalty", "early_stopping", "add_bos_token", "smoothing_curve",
    "max_tokens_second", "truncation_length", "skip_special_tokens", "include_reasoning",
    "api_type", "api_server", "legacy_api", "num_predict", "num_ctx", "rep_pen_slope",
    "cache_prompt", "negative_prompt", "preset", "prompt_lookup_num_tokens",
    "auto_max_new_tokens", "static_cache", "best_of", "minimum_message_content_tokens",
    "n_keep", "min_keep", "mode", "continue_", "repetition_decay",
}  # fmt: skip
"""Other fields of these bodies: of loaders and transports, of beam search without beams, of
smoothing curves without smoothing."""

SILLY_TAVERN = {
    "prompt": "Once", "max_new_tokens": 12, "max_tokens": 12, "temperature": 2.5, "top_p": 0.9,
    "typical_p": 0.95, "typical": 0.95, "sampler_seed": 5, "seed": 5, "min_p": 0.02,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2, "top_k": 50,
    "skew": 0, "min_tokens": 0, "add_bos_token": True, "dynamic_temperature": True,
    "dynatemp_low": 2, "dynatemp_high": 3, "dynatemp_range": 0.5, "dynatemp_exponent": 1.2,
    "smoothing_factor": 0, "smoothing_curve": 1, "dry_allowed_length": 3, "dry_multiplier": 0.8,
    "dry_base": 1.8, "dry_sequence_breakers": ["\n", ":"], "dry_penalty_last_n": 512,
    "max_tokens_second": 0, "stopping_strings": ["\nYou:"], "stop": ["\nYou:"],
    "truncation_length": 4096, "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0,
    "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "llamacpp", "api_server": "http://x/", "legacy_api": False,
    "xtc_threshold": 0.1, "xtc_probability": 0.5, "rep_pen": 1.1, "rep_pen_range": 256,
    "repetition_penalty_range": 256, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "repeat_penalty": 1.1, "tfs_z": 1, "repeat_last_n": 256, "n_predict": 12,
    "num_predict": 12, "num_ctx": 4096, "mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1,
    "logit_bias": [[7, -2.5], [9, False]], "grammar": "", "cache_prompt": True, "nsigma": 1.5,
    "samplers": ["penalties", "dry", "top_k", "tfs_z", "typical_p", "top_p", "min_p", "xtc",
                 "temperature"],
}  # fmt: skip
"""SillyTavern's text completions for llama.cpp; `/completion`."""

WEB_UI = {
    "prompt": "Once", "max_tokens": 12, "temperature": 1.5, "top_p": 0.9, "n": 1, "stream": False,
    "frequency_penalty": 0.1, "presence_penalty": 0.2, "logit_bias": {"7": -2.5}, "echo": False,
    "dynatemp_low": 1, "dynatemp_high": 1, "dynatemp_exponent": 1.2, "smoothing_factor": 0,
    "smoothing_curve": 1, "min_p": 0.02, "top_k": 50, "typical_p": 0.95, "xtc_threshold": 0.1,
    "xtc_probability": 0.5, "epsilon_cutoff": 0, "eta_cutoff": 0, "tfs": 1, "top_a": 0,
    "top_n_sigma": 1.5, "dry_multiplier": 0.8, "dry_allowed_length": 3, "dry_base": 1.8,
    "repetition_penalty": 1.1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "repetition_penalty_range": 256, "penalty_alpha": 0, "guidance_scale": 1, "mirostat_mode": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "prompt_lookup_num_tokens": 0, "max_tokens_second": 0,
    "do_sample": True, "dynamic_temperature": False, "temperature_last": True,
    "auto_max_new_tokens": False, "ban_eos_token": False, "add_bos_token": True,
    "skip_special_tokens": True, "static_cache": False, "truncation_length": 0, "seed": 5,
    "sampler_priority": ["repetition_penalty", "presence_penalty", "frequency_penalty", "dry",
                         "temperature", "dynamic_temperature", "quadratic_sampling", "top_k",
                         "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "tfs", "top_a",
                         "min_p", "mirostat", "xtc", "encoder_repetition_penalty",
                         "no_repeat_ngram"],
    "custom_token_bans": "9", "negative_prompt": "", "grammar_string": "",
    "dry_sequence_breakers": '"\\n", ":"',
}  # fmt: skip
"""text-generation-webui's own completions; `/v1/completions`."""

EXPECTED = Sampling(
    seed=5, temperature=2.5, top_k=50, top_p=0.9, min_p=0.02, typical_p=0.95, top_n_sigma=1.5,
    xtc_probability=0.5, xtc_threshold=0.1,
    repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.2, repeat_last_n=256,
    dry_multiplier=0.8, dry_base=1.8, dry_allowed_length=3, dry_sequence_breakers=("\n", ":"),
    dynatemp_exponent=1.2, logit_bias=((7, -2.5), (9, -math.inf)), is_seeded=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "fields", "differs"),
    [
        (OPEN[4], SILLY_TAVERN, {
            "dynatemp_range": 0.5, "dry_penalty_last_n": 512,
            "samplers": tuple(name for name in ORDER if name != "top_n_sigma"),
        }),
        (OPEN[1], WEB_UI, {
            "temperature": 1.5,
            "samplers": ("penalties", "dry", "top_k", "top_p", "typ_p", "min_p", "xtc",
                         "top_n_sigma", "temperature"),
        }),
    ],
    ids=["SillyTavern", "text-generation-webui"],
)  # fmt: skip
def test_a_front_ends_whole_body_is_honoured(
    dialect: Dialect, fields: dict[str, Any], differs: dict[str, Any]
) -> None:
    fields = {name: value for name, value in fields.items() if name not in dialect.fields}
    body = dialect.body(**fields)
    sampling = dialect.read(body, STATE).sampling
    for name in Sampling.__struct_fields__:
        expected = differs.get(name, getattr(EXPECTED, name))
        assert getattr(sampling, name) == expected, name
    assert set(_extras(body, "")) - HARMLESS == set(), "a field that changes the answer is ignored"


def test_what_the_web_uis_switches_mean() -> None:
    read = OPEN[1].sampling
    assert read(do_sample=False, temperature=1.3).temperature == 0
    dynamic = read(dynamic_temperature=True, dynatemp_low=0.5, dynatemp_high=1.5, temperature=1.9)
    assert (dynamic.temperature, dynamic.dynatemp_range) == (1.0, 0.5)
    to_zero = read(dynamic_temperature=True, dynatemp_low=1, dynatemp_high=0)
    assert (to_zero.temperature, to_zero.dynatemp_range) == (0.5, 0.5)
    assert read(samplers="tk", temperature_last=True).samplers == ("top_k", "temperature")
    assert read(custom_token_bans="1, 2").logit_bias == ((1, -math.inf), (2, -math.inf))
    assert set(read(sampler_priority=["min_p"]).samplers) == set(ORDER) <= set(SAMPLERS)
    assert read(mirostat_mode=2).learns and not read().learns


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("banned_strings", ["word"], []),
        ("bad_words", ["word"], []),
        ("allowed_token_ids", [1], []),
        ("use_beam_search", True, False),
        ("include_stop_str_in_output", True, False),
        ("repetition_detection", {"max_pattern_size": 4}, {}),
        ("watermarking", True, False),
        ("logits_processors", ["a"], []),
        ("num_beams", 2, 1),
    ],
)
def test_what_would_change_the_answer_is_refused_unless_it_is_off(
    name: str, value: Any, off: Any
) -> None:
    for dialect in OPEN:
        (message,) = dialect.faults(**{name: value}).values()
        assert f"{name} is not supported" in message
        assert message.endswith(f"turn it off with {json.dumps(off)}")
        dialect.body(**{name: off})


FORMS = [
    {"grammar": 'root ::= "a"'},
    {"json_schema": {"type": "object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_choice": ["a"]},
]


@pytest.mark.parametrize("fields", FORMS)
def test_a_response_has_the_forms_and_the_budget_of_a_chat(fields: dict[str, Any]) -> None:
    fields = fields | {"reasoning_budget": 5, "reasoning_budget_message": "So:"}
    chat, response = (dialect.read(dialect.body(**fields), STATE) for dialect in (OPEN[0], OPEN[2]))
    assert len(response.formats) == 1 and response.formats == chat.formats
    assert response.input.reasoning == chat.input.reasoning
    assert (chat.input.reasoning.budget, chat.input.reasoning.message) == (5, "So:")


def test_an_item_updates_the_settings_of_a_response() -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    updates: list[Any] = [
        {"reasoning": {"effort": "low"}, "text": {"format": schema, "verbosity": "low"}},
        {"reasoning": {"effort": "high"}},
    ]
    items = [{"type": "configuration_update", **update} for update in updates]
    settings = {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "medium"}}
    found = OPEN[2].read(OPEN[2].body(input=[*USER, *items], **settings), STATE)
    assert found.input.reasoning.effort == "high" and len(found.input.messages) == 1
    assert found.input.template_variables == {"verbosity": "low"}
    assert [form.path for form in found.formats] == ["input[1].text.format.schema"]


IDS = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.integers().map(str),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=200, deadline=None)  # other processes may use the machine
@given(
    dialect=st.sampled_from(OPEN),
    given_ids=st.one_of(st.lists(IDS, max_size=3), st.lists(IDS, max_size=3).map(repr), IDS),
)
def test_any_value_for_banned_tokens_is_accepted_or_refused_by_name(
    dialect: Dialect, given_ids: Any
) -> None:
    pairs = [[each, 1] for each in given_ids] if isinstance(given_ids, list) else given_ids
    for field, value in (("custom_token_bans", given_ids), ("logit_bias", pairs)):
        try:
            sampling = dialect.sampling(**{field: value})
        except ValidationError as error:
            assert all(field in each["field"] for each in faults_of(error, dialect.model))
        else:
            ids = [token for token, _ in sampling.logit_bias if not isinstance(token, str)]
            assert all(is_token_id(each) for each in ids), ids


@open_ones
def test_invalid_breakers_are_refused_by_name(dialect: Dialect) -> None:
    for wrong in ("[" * 100_000, '"\\ud800"', "[1]", '"a', '[["a"]]'):
        (fault,) = dialect.faults(dry_sequence_breakers=wrong)
        assert "dry_sequence_breakers" in fault
