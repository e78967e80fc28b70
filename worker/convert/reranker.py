"""Qwen3-Reranker: a decoder whose score is the probability that it answers "yes".

Only a name distinguishes its checkpoints from those of the chat model: that of the repository or
folder, or the one in `config.json`. The GGUF gets the rows of the output head for "yes" and "no" as
a classifier, and the prompt, under the keys of llama.cpp's own script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gguf.constants import Keys, PoolingType

from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.rules import Array, Family, Into, Sources
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError
from worker.models.reference import name_of

LABELS = ("yes", "no")
PROMPTS = {
    "rerank": "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
}
"""The prompt from the model card for a query and a document, by the name of its template."""

_NAME = re.compile(r"qwen3-reranker", re.IGNORECASE)


def is_reranker(source: Path, family: Family, config: Config) -> bool:
    if family.architecture != "qwen3" or "Qwen3ForCausalLM" not in family.names:
        return False
    texts = (name_of(source), str(config.values.get("_name_or_path")))
    return any(_NAME.search(text) for text in texts)


def with_classifier(
    family: Family, config: Config, d: Dims, vocabulary: Vocabulary, *, has_head: bool
) -> tuple[Family, Dims]:
    """The family with a classifier instead of the output head: the rows of "yes" and "no" from the
    head, or from the embedding if the checkpoint has no head.

    Raises:
        ModelError: "yes" or "no" is not a token.
    """
    ids = {label: vocabulary.id_of(label) for label in LABELS}
    found = {label: i for label, i in ids.items() if i is not None}
    if len(found) < len(LABELS):
        raise ModelError(f"a reranker answers {' or '.join(LABELS)}, so both must be tokens")
    rows = Into("cls.output", make=_rows)
    classifier: Sources = {"embed_tokens.weight": ("token_embd", rows), "lm_head.weight": ()}
    if has_head or not config.flag("tie_word_embeddings", default=True):
        classifier = {"lm_head.weight": rows}
    family = replace(
        family,
        sources={**family.sources, **classifier},
        head="none",
        metadata={
            **family.metadata,
            Keys.LLM.POOLING_TYPE: int(PoolingType.RANK),
            Keys.Classifier.OUTPUT_LABELS: list(LABELS),
        },
    )
    return family, replace(d, extra={**d.extra, **found})


def _rows(sources: Sequence[Array], d: Dims) -> Array:
    return sources[0][[d.extra[label] for label in LABELS]]
