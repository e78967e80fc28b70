"""Makes the tables of the configuration classes' defaults, for the converter and for its test.

    python -m tools.reference.make_config_defaults

Needs transformers. `worker/convert/family/classes.json` has for each `model_type` the defaults of
the keys that the converter reads, other names of keys, and keys that may be `null`. For
`tests/data/definitions/defaults.json` each key is removed from each checkpoint's text configuration
in turn, and the class provides its default: `{checkpoint: {key: value}}`; a key that the class
requires or does not have is left out.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
OF_FILES = {"architectures", "model_type", "transformers_version", "dtype", "use_cache"}
"""Keys that do not affect how the model computes."""
FURTHER = ("qwen2_5_vl_text", "roberta")
"""Types of models without a checkpoint in `tests/data/parity`."""
UNUSED = {"bos_token_id", "eos_token_id"}
"""Keys that the tokenizer's files define."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    paths = sorted((DATA / "parity").glob("*/config.json"))
    configs = {path.parent.name: text_config(path) for path in paths}
    found = {name: defaults(config) for name, config in configs.items()}
    write(DATA / "definitions/defaults.json", found)
    kinds = {*FURTHER, *(config["model_type"] for config in configs.values())}
    classes = {kind.removesuffix("_text"): of_class(kind) for kind in sorted(kinds)}
    write(ROOT / "worker/convert/family/classes.json", classes)


def write(path: Path, by_name: Mapping[str, object]) -> None:
    lines = (f" {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in by_name.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def text_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    found: dict[str, Any] = {}
    for key in config.keys() - OF_FILES:
        others = {k: v for k, v in config.items() if k != key}
        try:
            said = kind.from_dict(others).to_dict()
        except Exception:  # Values of the class, for keys whose default does not fit another key.
            continue
        if key in said:
            found[key] = said[key]
    return found


def of_class(model_type: str) -> dict[str, Any]:
    kind = transformers.CONFIG_MAPPING[model_type]
    sources = (ROOT / "worker/convert").rglob("*.py")
    read = set(re.findall(r'"(\w+)"', "".join(path.read_text("utf-8") for path in sources)))
    names = kind.attribute_map
    known = {names.get(field.name, field.name): field.default for field in fields(kind)}
    if "rope_parameters" in known:
        theta = kind.default_theta
        by_layer = "global_rope_theta" in inspect.getsource(kind.convert_rope_params_to_dict)
        name = "global_rope_theta" if by_layer else "rope_theta"
        known[name] = theta["global"] if isinstance(theta, dict) else theta
    defaults = {
        key: value
        for key, value in known.items()
        if key in read - UNUSED and isinstance(value, int | float | str) and value != "auto"
        # Older releases omitted `true`, whatever the class's default: the tensors decide.
        if (key, value) != ("tie_word_embeddings", False)
    }
    return {
        "defaults": defaults,
        "names": {name: key for name, key in names.items() if key in read},
        "nullable": sorted(
            f.name for f in fields(kind) if f.name in defaults and "None" in str(f.type)
        ),
    }


if __name__ == "__main__":
    main()
