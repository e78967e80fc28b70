"""Small tokenizers of every kind, trained here, against the libraries that made them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from gguf.constants import TokenType
from tokenizers import decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from tests.support import clock
from tests.unit.convert.check_here import CheckHere
from tests.unit.convert.files import edit, rewritten
from worker.convert.checkpoint import Checkpoint
from worker.convert.output import write_layout
from worker.convert.tokenizer import pre_tokenizers, reference
from worker.convert.tokenizer.chat_templates import chat_templates, template_metadata
from worker.convert.tokenizer.check import TokenCheck
from worker.convert.tokenizer.corpus import TEXTS
from worker.convert.tokenizer.read import read_vocabulary
from worker.convert.tokenizer.special_tokens import special_tokens
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.engine.text.prompt import PromptBuilder
from worker.errors import ModelError
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.layout import read_layout


def load(
    folder: Path,
    config: dict[str, Any] | None = None,
    size: int = 1400,
    check: type[TokenCheck] = CheckHere,
) -> Model:
    """Return the folder's tokenizer in llama.cpp after our conversion."""
    checkpoint = Checkpoint(folder, config or {}, {})
    vocabulary = read_vocabulary(checkpoint, size)
    metadata = vocabulary.metadata() | special_tokens(checkpoint, vocabulary)
    with check(folder) as tokens:
        assert tokens.check("llama", metadata).n_texts >= 45
    target = folder / "vocabulary.gguf"
    metadata |= template_metadata(chat_templates(checkpoint))
    write_layout(target, "llama", metadata)
    return Model(str(target), LoadOptions(vocab_only=True))


def ids(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=True)


def compare(model: Model, source: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    for text in texts:
        assert ids(model, text) == source.encode(text, add_special_tokens=False).ids, text


def vocabulary_of(folder: Path, size: int = 600, pre: str | None = None) -> Vocabulary:
    return read_vocabulary(Checkpoint(folder, {}, {}), size, pre)


def train_sentencepiece(
    folder: Path, kind: str, **options: Any
) -> sentencepiece.SentencePieceProcessor:
    text = folder / "text.txt"
    text.write_text("\n".join(t for t in TEXTS if t.strip()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=1300,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"character_coverage": 0.98, "normalization_rule_name": "identity"}
    if kind == "bpe":
        options |= {
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "user_defined_symbols": ["<call>"],
        }
    else:
        options["normalization_rule_name"] = "nmt_nfkc"
    source = train_sentencepiece(tmp_path, kind, **options)
    model = load(tmp_path, check=TokenCheck)
    for text in TEXTS:
        if kind == "bpe":
            assert ids(model, text) == source.encode(text), text
        elif text.strip():  # Pieces with equal scores may be in either order.
            assert sorted(ids(model, text)) == sorted(source.encode(text)), text
    if kind == "bpe":
        assert source.piece_to_id("<call>") in ids(model, "before<call>")
    assert model.bos == source.bos_id() and source.eos_id() in model.eog
    model.close()


def byte_level(folder: Path, steps: list[pre.PreTokenizer], **model: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def steps_of(known: pre_tokenizers.PreTokenizer) -> list[pre.PreTokenizer]:
    """Return the library's own pre-tokenizer for a known definition."""
    steps: list[pre.PreTokenizer] = []
    for step in known.steps:
        if step == pre_tokenizers.split(pre_tokenizers.GPT2_REGEX):
            steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=True))
        elif step == pre_tokenizers.DIGITS:
            steps.append(pre.Digits(individual_digits=True))
        elif step == pre_tokenizers.DIGIT_RUNS:
            steps.append(pre.Digits(individual_digits=False))
        elif step == pre_tokenizers.PUNCTUATION_RUNS:
            steps.append(pre.Punctuation("contiguous"))
        else:
            pattern = tokenizers.Regex(step.removeprefix("split "))
            steps.append(pre.Split(pattern, "isolated"))
    if pre_tokenizers.split(pre_tokenizers.GPT2_REGEX) not in known.steps:
        steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=False))
    return steps


@pytest.mark.parametrize("known", pre_tokenizers.KNOWN, ids=lambda known: known.name)
def test_every_known_pre_tokenizer(tmp_path: Path, known: pre_tokenizers.PreTokenizer) -> None:
    source = byte_level(tmp_path, steps_of(known), ignore_merges=known.ignore_merges)
    model = load(tmp_path)
    assert model.metadata("tokenizer.ggml.pre") == known.name
    compare(model, source, (*TEXTS, "a<tool>b<|turn|>c"))
    model.close()


def cut(pattern: str, behavior: str = "isolated") -> pre.PreTokenizer:
    return pre.Split(tokenizers.Regex(pattern), behavior)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([cut(r"\p{N}{1,2}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+")], id="two digits"),
        pytest.param(
            [
                cut(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"),
                cut(r"\p{N}| ?\p{L}+|\s+(?!\S)|\s+| ?[^\s\p{L}\p{N}]+"),
            ],
            id="lines",
        ),
        pytest.param([pre.Split(" ", "merged_with_previous"), cut(r"\p{N}")], id="a text's end"),
        pytest.param([cut(r"[\r\n]", "contiguous"), pre.Digits(True)], id="contiguous"),
        pytest.param([pre.Punctuation("isolated"), cut(r"\p{N}{3}"), cut(r"\p{N}")], id="signs"),
    ],
)
def test_a_worker_splits_by_a_definition_that_llama_cpp_does_not_have(
    tmp_path: Path, steps: list[pre.PreTokenizer]
) -> None:
    source = byte_level(tmp_path, [*steps, pre.ByteLevel(False, use_regex=False)])
    model = load(tmp_path)
    compare(model, source, (*TEXTS, "a<tool>b<|turn|>c"))
    model.close()
    vocabulary = vocabulary_of(tmp_path)
    (note,) = (note for note in vocabulary.notes if "pre-tokenizer" in note)
    assert note.endswith(f"other programs as {vocabulary.pre} does")


@pytest.mark.parametrize("name", ["qwen2", "smollm", "deepseek-v3", "llama-bpe", "gpt-4o"])
def test_a_word_that_no_merge_makes_is_taken_whole(tmp_path: Path, name: str) -> None:
    byte_level(tmp_path, steps_of(pre_tokenizers.named(name)))
    with rewritten(tmp_path / "tokenizer.json") as definition:
        unmerged(definition)
        vocab = definition["model"]["vocab"]
    model = load(tmp_path, {"eos_token_id": 1})
    compare(model, reference.reference(tmp_path), ("Zyxwvut", "a Zyxwvut<tool>Zyxwvut"))
    assert ids(model, "Zyxwvut") == [vocab["Zyxwvut"]]
    model.close()


def single_word(definition: dict[str, Any]) -> None:
    definition["added_tokens"][-1]["single_word"] = True


def replacing(definition: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "Zyxwvut"}, "content": "X"}
    definition["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, step]}


def dropping(definition: dict[str, Any]) -> None:
    definition["model"]["dropout"] = 1e-6


def unmerged(definition: dict[str, Any]) -> None:
    model = definition["model"]
    definition["added_tokens"][-1]["id"] = len(model["vocab"]) + 1
    model["ignore_merges"], model["vocab"]["Zyxwvut"] = True, len(model["vocab"])


@pytest.mark.parametrize("name", ["gpt-2", "falcon"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (single_word, "'<tool>' .*single_word"),
        (replacing, "replaces .*Zyxwvut.* by 'X'"),
        (dropping, "at random .dropout is 1e-06."),
        (unmerged, "ignore_merges takes words such as 'Zyxwvut' whole"),
    ],
)
def test_settings_that_the_check_may_miss_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str, name: str
) -> None:
    byte_level(tmp_path, steps_of(pre_tokenizers.named(name)))
    with rewritten(tmp_path / "tokenizer.json") as definition:
        change(definition)
    with pytest.raises(ModelError, match=words):
        vocabulary_of(tmp_path)


def test_a_sentencepiece_bpe_that_takes_words_whole_is_refused_for_one_that_no_merge_makes(
    tmp_path: Path,
) -> None:
    train_sentencepiece(tmp_path, "bpe", byte_fallback=True, remove_extra_whitespaces=False)
    definition = json.loads(reference.reference(tmp_path).to_str())
    (tmp_path / "tokenizer.model").unlink()
    definition["model"]["ignore_merges"] = True
    definition["added_tokens"] = [
        {"id": 1, "content": "<s>", "special": True},
        {"id": 2, "content": "</s>", "special": True},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert vocabulary_of(tmp_path, 1400).model == "llama"
    definition["model"]["vocab"]["\u2581Zyxwvut"] = len(definition["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelError, match="words such as '\u2581Zyxwvut' whole"):
        vocabulary_of(tmp_path, 1400)


@pytest.mark.parametrize("setting", [{"byte_fallback": True}, {"ignore_merges": True}])
def test_settings_without_effect_on_byte_words_are_accepted(
    tmp_path: Path, setting: dict[str, bool]
) -> None:
    """All words have tokens, and merges that form them."""
    byte_level(tmp_path, [pre.ByteLevel(False)])
    with rewritten(tmp_path / "tokenizer.json") as definition:
        definition["model"] |= setting
    model = load(tmp_path)
    compare(model, reference.reference(tmp_path), TEXTS)
    model.close()


def test_an_unknown_pre_tokenizer_is_refused_at_once_naming_the_nearest(tmp_path: Path) -> None:
    pattern = tokenizers.Regex(r"\p{N}{1,4}|\p{L}+|[^\p{L}\p{N}]+")
    byte_level(tmp_path, [pre.Split(pattern, "isolated"), pre.ByteLevel(False, use_regex=False)])
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"nearest is (\S+)") as caught:
        vocabulary_of(tmp_path)
    assert clock.in_time(began, 60)
    assert caught.value.details["nearest"] in {known.name for known in pre_tokenizers.KNOWN}
    chosen = vocabulary_of(tmp_path, pre="gpt-2")
    assert chosen.pre == "gpt-2"


def test_a_tokenizer_that_would_differ_is_refused_with_the_text(tmp_path: Path) -> None:
    byte_level(tmp_path, [pre.Digits(individual_digits=True), pre.ByteLevel(False)])
    vocabulary = vocabulary_of(tmp_path, pre="gpt-2")
    with (
        TokenCheck(tmp_path) as tokens,
        pytest.raises(ModelError, match="differs from its source") as caught,
    ):
        tokens.check("llama", vocabulary.metadata())
    assert any(c.isdigit() for c in caught.value.details["text"])


def test_unigram_from_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>"
    )
    plain = [t for t in TEXTS if t.isascii() and t.isprintable()]
    tokenizer.train_from_iterator(plain * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabulary_of(tmp_path)
    assert vocabulary.model == "t5" and vocabulary.scores is not None
    assert vocabulary.types[vocabulary.special_ids["unk"]] == TokenType.UNKNOWN
    target = tmp_path / "vocabulary.gguf"
    write_layout(target, "llama", vocabulary.metadata())
    model = Model(str(target), LoadOptions(vocab_only=True))
    compare(model, tokenizer, ("Hello, world!", "the sum of a and b", "CamelCase snake_case"))
    model.close()


def test_special_tokens_templates_and_all_ends_are_converted(tmp_path: Path) -> None:
    byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    settings["chat_template"] = [{"name": "default", "template": "old"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 500]}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    model = load(tmp_path)
    assert {1, 2, 500} <= model.eog
    assert model.adds_bos and model.bos == 0
    assert model.chat_template() == "{{ messages }}"
    assert model.chat_template("tool_use") == "{{ tools }}"
    model.close()


def test_of_several_templates_of_a_name_the_latest_form_counts(tmp_path: Path) -> None:
    named = {name: name or "none" for name in ("default", "tool-use é", "")}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    templates: list[tuple[str, str]] = [
        ("tokenizer_config.json", json.dumps({"chat_template": listed})),
        ("tokenizer_config.json", json.dumps({"chat_template": {**named, "default": "named"}})),
        ("chat_template.json", json.dumps({"chat_template": "in JSON"})),
        ("chat_template.jinja", "in a file"),
    ]
    byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    defaults = ("default", "named", "in JSON", "in a file")
    for (file, text), default in zip(templates, defaults, strict=True):
        (tmp_path / file).write_text(text)
        load(tmp_path, {"eos_token_id": 1}).close()
        layout = read_layout(tmp_path / "vocabulary.gguf")
        assert layout.metadata["tokenizer.chat_template"] == default
        assert layout.metadata["tokenizer.chat_template.tool_use__"] == "tool-use é"
        assert layout.arrays["tokenizer.chat_templates"].read() == ["tool_use__"]


def test_named_templates_are_listed_in_one_order(tmp_path: Path) -> None:
    """Otherwise a second process, such as that of `verify`, would see a different file."""
    byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    names = [f"purpose_{i}" for i in range(8)]
    (tmp_path / "additional_chat_templates").mkdir()
    for name in names:
        (tmp_path / f"additional_chat_templates/{name}.jinja").write_text(name)
    load(tmp_path, {"eos_token_id": 1}).close()
    listed = read_layout(tmp_path / "vocabulary.gguf").arrays["tokenizer.chat_templates"]
    assert listed.read() == names


@pytest.mark.parametrize(
    "post_processor",
    [
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
        processors.BertProcessing(("</s>", 1), ("<s>", 0)),
    ],
    ids=lambda post_processor: type(post_processor).__name__,
)
def test_a_post_processor_decides_what_is_around_a_text(
    tmp_path: Path, post_processor: processors.PostProcessor
) -> None:
    tokenizer = byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    tokenizer.post_processor = post_processor
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, {"bos_token_id": 0, "eos_token_id": 1})
    got = model.tokenize("Hello", add_special=True, parse_special=True)
    assert got == tokenizer.encode("Hello").ids
    model.close()


def test_what_llama_cpp_cannot_put_around_a_text_is_noted(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <|turn|> $A <|turn|>", special_tokens=[("<s>", 0), ("<|turn|>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = Checkpoint(tmp_path, {"bos_token_id": 0, "eos_token_id": 1}, {})
    vocabulary = read_vocabulary(checkpoint, 600)
    special_tokens(checkpoint, vocabulary)
    assert vocabulary.notes == [
        "the tokenizer puts <s> <|turn|> before a text, llama.cpp puts <s> there",
        "the tokenizer puts <|turn|> after a text, llama.cpp puts nothing there",
    ]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_wordpiece(tmp_path: Path, lowercase: bool, named: bool) -> None:
    source = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    source.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    source.pre_tokenizer = pre.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    source.train_from_iterator(TEXTS, trainer)
    source.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    source.enable_truncation(4)
    source.save(str(tmp_path / "tokenizer.json"))
    source.no_truncation()
    names = {f"{text[1:-1].lower()}_token": text for text in special if named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    model = load(tmp_path)
    for text in ("Hello, world!", "CamelCase  twice", "天地玄黃", "Straße naïve"):
        assert model.tokenize(text, add_special=True, parse_special=True) == source.encode(text).ids
    pair = PromptBuilder(model, None, 100).pair("Hello, world!", "CamelCase", "documents[0]")
    assert pair == source.encode("Hello, world!", "CamelCase").ids
    word = "a" * 101  # which the conversion reports
    assert ids(model, word) != source.encode(word, add_special_tokens=False).ids == [1]
    model.close()
    notes = vocabulary_of(tmp_path, 900).notes
    assert any("more than 100 characters becomes one [UNK]" in note for note in notes)


def test_a_source_that_cannot_split_a_text_is_reported(tmp_path: Path) -> None:
    vocab = {"a": 0, "[CLS]": 1, "[SEP]": 2}
    source = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    source.pre_tokenizer = pre.BertPreTokenizer()
    source.save(str(tmp_path / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(ModelError, match="own tokenizer cannot split .*Missing .UNK."):
        load(tmp_path, {"eos_token_id": 2}, check=TokenCheck)


def test_a_panic_of_the_tokenizers_library_is_reported_as_its_own(tmp_path: Path) -> None:
    source = byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    charsmap = {"type": "Precompiled", "precompiled_charsmap": ""}
    edit(tmp_path / "tokenizer.json", normalizer=charsmap)
    assert source.get_vocab_size() < 1400
    with pytest.raises(ModelError, match="refused by the tokenizers library: Precompiled"):
        load(tmp_path, check=TokenCheck)


@pytest.mark.parametrize("lacked", [range(256), [7]])
def test_a_sentencepiece_bpe_without_a_token_for_each_byte_is_refused(
    tmp_path: Path, lacked: Sequence[int]
) -> None:
    train_sentencepiece(tmp_path, "bpe", byte_fallback=True, remove_extra_whitespaces=False)
    source = reference.reference(tmp_path)
    source.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").unlink()
    text = (tmp_path / "tokenizer.json").read_text("utf-8")
    for byte in lacked:
        text = text.replace(f"<0x{byte:02X}>", f"<lacked {byte}>")
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(ModelError, match=f"has no token <0x{min(lacked):02X}>"):
        load(tmp_path)


@pytest.mark.parametrize("scheme", ["first", "always", "never", "prepend"])
def test_spaces_in_front_and_behind_special_tokens(tmp_path: Path, scheme: str) -> None:
    """In a SentencePiece BPE, with each way to prepend a space to a word."""
    train_sentencepiece(tmp_path, "bpe", byte_fallback=True, remove_extra_whitespaces=False)
    source = reference.reference(tmp_path)
    if scheme == "prepend":
        source.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        source.normalizer = normalizers.Sequence([])
        source.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme, split=False)
    source.add_special_tokens(
        [
            *map(tokenizers.AddedToken, ("<unk>", "<s>")),
            tokenizers.AddedToken("<|x|>", lstrip=True, rstrip=True),
        ]
    )
    (tmp_path / "tokenizer.model").unlink()
    source.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path)
    texts = ("word", " word", "  two", "<s>word", "<s> word", "a  <|x|>  b<s><s>c", "a <unk>b")
    compare(model, source, (*texts, "\u2581word", "<s>\u2581\u2581", "a \x1f<|x|>\x1cb", ""))
    model.close()
    # Other programs do not know our keys; there llama.cpp follows the file.
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(file.read_bytes().replace(b"llorch.tokenizer.", b"others.tokenizer."))
    other = Model(str(file), LoadOptions(vocab_only=True))
    compare(other, source, ("word", "two words", "CamelCase  twice"))
    other.close()


def sentencepiece_json(folder: Path, definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """Write a changed `tokenizer.json` of a SentencePiece BPE beside its `tokenizer.model`."""
    options: dict[str, Any] = {"byte_fallback": True, "remove_extra_whitespaces": False}
    train_sentencepiece(folder, "bpe", normalization_rule_name="identity", **options)
    whole = json.loads(reference.reference(folder).to_str())
    roles = ("<unk>", "<s>", "</s>")
    whole["added_tokens"] = [added(i, text) for i, text in enumerate(roles)]
    model = whole["model"]
    for merge in definition.pop("merges", []):
        model["vocab"].setdefault("".join(merge), len(model["vocab"]))
        model["merges"].insert(0, merge)
    whole["added_tokens"] += [
        added(model["vocab"][text], text, special=False) for text in definition.pop("added", [])
    ]
    (folder / "tokenizer.json").write_text(json.dumps(whole | definition))
    return reference.reference(folder)


def added(i: int, text: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, "special": special, **flags}


SPACE = "\u2581"
RUNS = [[SPACE * left, SPACE * (n - left)] for n in range(31, 1, -1) for left in range(1, n)]


def test_runs_of_spaces_are_merged_where_the_library_merges_them(tmp_path: Path) -> None:
    """Like Gemma's, where spaces do not become the added tokens of U+2581."""
    runs = [SPACE * n for n in range(2, 32)]
    source = sentencepiece_json(tmp_path, {"merges": RUNS, "added": runs})
    model = load(tmp_path, size=1500, check=TokenCheck)
    compare(model, source, ("  a", *(f"x{' ' * n}y" for n in range(1, 130))))
    model.close()
    assert "U+2581" in " ".join(vocabulary_of(tmp_path, 1500).notes)


def test_a_sentencepiece_bpe_is_normalised_by_its_definition(tmp_path: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "NFKC"}, {"type": "Prepend", "prepend": SPACE}, replace]
    normalizer = {"type": "Sequence", "normalizers": steps}
    source = sentencepiece_json(tmp_path, {"normalizer": normalizer})
    model = load(tmp_path)
    compare(model, source, (*TEXTS, "\u3000\uff21<s>\ufb01 e\u0301"))
    model.close()


METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [({"legacy": False}, "first"), ({"legacy": False, "add_prefix_space": False}, "never")],
)
def test_the_spaces_of_a_lone_tokenizer_model_follow_its_settings(
    tmp_path: Path, settings: dict[str, bool], scheme: str
) -> None:
    """As transformers builds the missing definition."""
    cuts = {**METASPACE, "prepend_scheme": scheme}
    source = sentencepiece_json(tmp_path, {"normalizer": None, "pre_tokenizer": cuts})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load(tmp_path, check=TokenCheck)
    compare(model, source, ("word", " word", "a</s>b", "</s>word", "</s> word", "two words"))
    model.close()


def test_of_added_tokens_json_those_with_a_role_are_control_tokens(tmp_path: Path) -> None:
    """Others are shown in answers, like in transformers and llama.cpp's own script."""
    train_sentencepiece(tmp_path, "bpe", byte_fallback=True)
    n = len(vocabulary_of(tmp_path, 1400).tokens)
    texts = ["[PAD]", "<tool_call>", "[END]", "<|im_start|>", "[A]", "[B]"]
    settings: dict[str, dict[str, Any]] = {
        "added_tokens.json": {text: n + i for i, text in enumerate(texts)},
        "tokenizer_config.json": {"pad_token": "[PAD]", "eos_token": {"content": "[END]"}},
        "special_tokens_map.json": {"additional_special_tokens": ["[A]", {"content": "[B]"}, 7]},
    }
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    types = vocabulary_of(tmp_path, n + 10).types[n : n + 6]
    shown = [
        text for text, kind in zip(texts, types, strict=True) if kind == TokenType.USER_DEFINED
    ]
    assert shown == ["<tool_call>"]
    assert types.count(TokenType.CONTROL) == 5


@pytest.mark.parametrize("file", ["config.json", "text_config"])
def test_the_end_of_a_text_is_found_on_either_level(tmp_path: Path, file: str) -> None:
    train_sentencepiece(tmp_path, "bpe", byte_fallback=True, remove_extra_whitespaces=False)
    ends = {"eos_token_id": [2, 7]}
    checkpoint = Checkpoint(tmp_path, {"text_config": ends} if file == "text_config" else ends, {})
    vocabulary = read_vocabulary(checkpoint, 1500)
    vocabulary.special_ids.pop("eos")
    assert special_tokens(checkpoint, vocabulary)["llorch.convert.eog_token_ids"] == [2, 7]


def test_a_tokenizer_json_takes_precedence_over_a_model_of_fewer_tokens(tmp_path: Path) -> None:
    """Like in transformers: adding tokens to a vocabulary saves only the definition."""
    source = sentencepiece_json(tmp_path, {"merges": [["h", "Z"], ["hZ", "h"]]})
    model = load(tmp_path)
    compare(model, source, ["hZh hZ"])
    assert source.token_to_id("hZh") in ids(model, "hZh hZ")
    model.close()


def test_composed_characters_around_special_tokens(tmp_path: Path) -> None:
    source = byte_level(tmp_path, [pre.ByteLevel(add_prefix_space=False)])
    source.normalizer = normalizers.NFC()
    source.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path)
    compare(model, source, ("e\u0301", "<|turn|>\u0338e\u0301<tool>", "\u1100\u1161\u11a8"))
    assert ids(model, "e\u0301") == ids(model, "\u00e9")
    model.close()
