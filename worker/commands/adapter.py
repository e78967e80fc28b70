"""`llorch-convert adapter`: converts a PEFT LoRA adapter into a GGUF adapter for one base model."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.convert.progress import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, help="a folder with adapter_config.json")
    parser.add_argument("base", type=Path, help="the GGUF of the model that it was trained on")
    parser.add_argument("destination", type=Path, help="the GGUF file to write")


def run(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.convert.adapter import convert_adapter
    from worker.models.gguf.header import read_header

    count = convert_adapter(options.adapter, read_header(options.base), options.destination)
    if options.progress != "json":
        print(f"{options.destination} adapts {count} weights of {options.base}")
