"""Every family of the converter: its logits against transformers, its tensors against llama.cpp's.

    python -m tools.bench.convert_families --peer-python VENV/bin/python

Converts the small checkpoints of `tests/data/parity` with our converter and with llama.cpp's own
script, from the pinned sources, compares tensors bit for bit, and writes the table of
`worker/convert/README.md`. The peer's Python needs PyTorch, transformers and sentencepiece.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import gguf
import numpy as np

from builds import sdist
from builds.pins import pins
from tests.unit.convert import engine, rebuild
from tests.unit.convert.test_parity import DATA as PARITY
from tests.unit.convert.test_parity import checkpoint
from worker.commands import convert as cli
from worker.convert import architectures
from worker.convert.config import Config
from worker.convert.family.rules import Family
from worker.models.checkpoint_files import read_json

README = Path(__file__).parents[2] / "worker/convert/README.md"
MARK = "<!-- the table is written by tools/bench/convert_families.py -->"

# The script recognises pre-tokenizers by a hash of their output for one text, and lacks this one.
PEER = """
import runpy, sys, traceback
sources, outtype, *folders = sys.argv[1:]
sys.path[:0] = [sources, sources + "/gguf-py"]
from conversion import base, bert, gemma, glm
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for kind in (glm.Glm4Model, glm.Glm4MoeModel, gemma.Gemma4Model, bert.XLMRobertaModel):
    kind.set_vocab = base.TextModel._set_vocab_gpt2
bert.NomicBertModel._is_tokenizer_xlmroberta = lambda self: False
for folder in folders:
    sys.argv = ["convert", folder, "--outtype", outtype, "--outfile", folder + ".peer.gguf"]
    if any(f"/{name}" in folder for name in ("qwen3-next", "qwen3.5", "deepseek-v3.2", "glm-dsa")):
        sys.argv.append("--no-mtp")
    if "/embedding-gemma" in folder:
        sys.argv.append("--sentence-transformers-dense-modules")
    try:
        runpy.run_path(sources + "/convert_hf_to_gguf.py", run_name="__main__")
    except BaseException as error:
        print(folder, "failed:", type(error).__name__, error, file=sys.stderr)
"""

PEER_CONFIG: dict[str, dict[str, object]] = {
    "cohere-2": {"rotary_pct": 1.0},
    "gpt-2": {"n_ctx": 32},
    "granite-4": {"layer_types": ["attention", "attention"]},
    "granite-hybrid": {"layer_types": ["mamba", "attention"]},
    "granite-hybrid-dense": {"layer_types": ["mamba", "attention"]},
    "nomic-bert": {
        **{"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 2048},
        **{"activation_function": "swiglu", "causal": False, "prenorm": False},
        **{"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False},
        **{"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
        **{"rotary_emb_scale_base": None, "rotary_emb_base": 1000},
    },
}
"""Keys that the script needs and newer configurations no longer have, or must not have (...)."""

SENTENCEPIECE = ("ernie-4.5", "ernie-4.5-moe", "gemma", "gemma-2", "internlm-3", "nemotron")
"""Families whose vocabulary the script reads only from a `tokenizer.model`."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    architecture: str
    lines: int
    """Lines of the family's description."""
    difference: float
    """Largest difference of a logit, or of a component of a vector, relative to the largest one."""
    tensors: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    sources = sdist.unpacked(pins()) / "vendor/llama.cpp"
    names = options.names or sorted(p.name for p in PARITY.iterdir() if p.name != "tokenizer")
    with tempfile.TemporaryDirectory(prefix="convert-families-") as folder:
        work = Path(folder)
        run_peer(names, work, sources, options.peer_python)
        rows = [row(name, work) for name in names]
    table = "\n".join(
        [
            "| checkpoint | llama.cpp's name | lines | largest difference | tensors |",
            "| --- | --- | ---: | ---: | --- |",
            *(
                f"| {r.name} | {r.architecture} | {r.lines} | {r.difference:.0e} | {r.tensors} |"
                for r in rows
            ),
        ]
    )
    print(table)
    if not options.names:
        text = README.read_text(encoding="utf-8")
        README.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{table}\n", encoding="utf-8")


def run_peer(names: list[str], work: Path, sources: Path, python: Path) -> None:
    folders = [work / name for name in names]
    for folder in folders:
        checkpoint(folder.name, work)
        # The peer reads the vocabularies of some families in one format each; weights are the same.
        settings = folder / "tokenizer_config.json"
        kind = "GPT2Tokenizer" if folder.name.startswith("phi") else "PreTrainedTokenizerFast"
        values = json.loads(settings.read_text()) | {"tokenizer_class": kind}
        settings.write_text(json.dumps(values))
        config = json.loads((folder / "config.json").read_text()) | PEER_CONFIG.get(folder.name, {})
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
        if folder.name in SENTENCEPIECE:
            vocabulary = rebuild.Source(sources / "models/ggml-vocab-llama-spm.gguf")
            rebuild.write_model(vocabulary, folder, n_pieces=288)
            (folder / "tokenizer.json").unlink()
    command = [str(python), "-c", PEER, str(sources), "bf16", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        if "failed:" in line:
            print(line, file=sys.stderr)


def row(name: str, work: Path) -> Row:
    source = checkpoint(name, work / "ours")
    files = {}
    for outtype in ("f32", "bf16"):
        files[outtype] = work / f"{name}.{outtype}.gguf"
        arguments = [str(source), str(files[outtype]), "--outtype", outtype, "--progress", "none"]
        assert cli.run(arguments) == 0
    expected = np.load(source / "expected.npz")
    got, wanted = engine.answers(files["f32"], expected)
    difference = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    architecture = gguf.GGUFReader(files["bf16"]).fields["general.architecture"].contents()
    peer = work / f"{name}.peer.gguf"
    tensors = compared(files["bf16"], peer) if peer.is_file() else "not converted by the peer"
    return Row(name, str(architecture), n_lines(source), difference, tensors)


def n_lines(source: Path) -> int:
    """Count the lines of the statement that describes the family of a checkpoint."""
    family = architectures.family_of(Config(read_json(source / "config.json")))
    for module in pkgutil.iter_modules(architectures.__path__):
        described = import_module(f"{architectures.__name__}.{module.name}")
        for node in ast.parse(inspect.getsource(described)).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                own = getattr(described, node.targets[0].id, None)
                if family is not None and family in (own, _text_part(own)):
                    return (node.end_lineno or 0) - node.lineno + 1
    raise ValueError(f"no description of {source.name}")


def _text_part(value: object) -> Family | None:
    return value.text_part() if isinstance(value, Family) and value.multimodal else None


def compared(mine: Path, theirs: Path) -> str:
    """Return how many tensors have equal type, shape and bits, and how the others differ."""
    ours = {t.name: t for t in gguf.GGUFReader(mine).tensors}
    peer = {t.name: t for t in gguf.GGUFReader(theirs).tensors}
    found: Counter[str] = Counter()
    for name in sorted(ours.keys() | peer.keys()):
        a, b = ours.get(name), peer.get(name)
        if a is None or b is None:
            found["ours alone" if b is None else "the peer's alone"] += 1
        elif a.tensor_type != b.tensor_type:
            found[f"{a.tensor_type.name} for {b.tensor_type.name}"] += 1
        elif [n for n in a.shape if n > 1] != [n for n in b.shape if n > 1]:
            found["of another shape"] += 1
        else:
            same = a.data.tobytes() == b.data.tobytes()
            found["equal" if same else "of other bits"] += 1
    others = [f"{n} {what}" for what, n in sorted(found.items()) if what != "equal"]
    return f"{found['equal']} equal" + (f"; {', '.join(others)}" if others else "")


if __name__ == "__main__":
    main()
