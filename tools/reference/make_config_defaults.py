"""Makes `tests/data/definitions/defaults.json`: what classes of configurations say for absent keys.

    python -m tools.reference.make_config_defaults

Needs transformers. Each key is taken out of each checkpoint's text configuration in turn, and the
class says what it then is. The file is committed, as `{checkpoint: {key: value}}`; a key that the
class wants or does not know is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers  # type: ignore[import-not-found]

DATA = Path(__file__).parents[2] / "tests/data"
OF_FILES = {"architectures", "model_type", "transformers_version", "dtype", "use_cache"}
"""What says nothing of how the model computes."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    paths = sorted((DATA / "parity").glob("*/config.json"))
    found = {path.parent.name: defaults(json.loads(path.read_text())) for path in paths}
    lines = (f" {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in found.items())
    (DATA / "definitions/defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    config = config.get("text_config", config)
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    found: dict[str, Any] = {}
    for key in config.keys() - OF_FILES:
        others = {k: v for k, v in config.items() if k != key}
        try:
            said = kind.from_dict(others).to_dict()
        except Exception:  # Of the class's own, where another key does not go with its default.
            continue
        if key in said:
            found[key] = said[key]
    return found


if __name__ == "__main__":
    main()
