"""The tests; CONTRIBUTING.md says which folder covers what."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
DATA = ROOT / "tests" / "data"
