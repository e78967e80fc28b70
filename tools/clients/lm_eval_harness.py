"""lm-evaluation-harness: a custom task, whose figures are compared with those of transformers.

The worker computes in single precision here; `make_loglikelihoods` makes the expected values.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from tools.clients.actions import Server, action

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/loglikelihoods.json"
TOKENIZER = ROOT / "worker/assets/tiny-model"
MOST_OFF = 1e-3


def evaluated(model: str, arguments: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a task on `tests/data/loglikelihoods.json`, in order."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        items = json.loads(DATA.read_text("utf-8"))
        fields = ("context", "continuation")
        lines = [json.dumps({name: item[name] for name in fields}) for item in items]
        rows.write_text("\n".join(lines), "utf-8")
        config = {
            "task": "continuations",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{continuation}}",
            "target_delimiter": "",
            **task,
        }
        (Path(folder) / "continuations.yaml").write_text(json.dumps(config), "utf-8")
        results: Any = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=["continuations"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
            **({"apply_chat_template": True} if "chat" in model else {}),
        )
    samples: list[dict[str, Any]] = results["samples"]["continuations"]
    return sorted(samples, key=lambda sample: sample["doc_id"])


@action("lm-eval", "local-completions: loglikelihoods as transformers has them", "exact")
def loglikelihoods(server: Server) -> None:
    arguments = {
        "model": server.model,
        "base_url": f"{server.v1}/completions",
        "tokenizer": str(TOKENIZER),
        "tokenizer_backend": "huggingface",
        "batch_size": 16,
    }
    metrics = [{"metric": "perplexity"}, {"metric": "acc"}]
    task = {"output_type": "loglikelihood", "metric_list": metrics}
    samples = evaluated("local-completions", arguments, task)
    expected = json.loads(DATA.read_text("utf-8"))
    assert len(samples) == len(expected) == 50
    for sample, item in zip(samples, expected, strict=True):
        [(loglikelihood, is_greedy)] = sample["filtered_resps"]
        assert abs(float(loglikelihood) - item["loglikelihood"]) < MOST_OFF, (sample, item)
        assert str(is_greedy) == str(item["is_greedy"]), (sample, item)


@action("lm-eval", "local-chat-completions: texts", "exact")
def texts(server: Server) -> None:
    arguments = {
        "model": server.model,
        "base_url": f"{server.v1}/chat/completions",
        "max_gen_toks": 8,
    }
    task = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    assert len(evaluated("local-chat-completions", arguments, task)) == 50
