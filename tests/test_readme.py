"""What the README shows and lists is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_map_is_the_tree() -> None:
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("worker/*/__init__.py")}
    listed = re.findall(r"^\| `((?:worker/|builds)\w*)` \|", README, re.MULTILINE)
    assert sorted(listed) == sorted({*rooms, "worker/assets", "builds"})


def test_pictures_are_there_and_small() -> None:
    pictures = set(re.findall(r'(?:src|srcset)="([^"]+)"', README))
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).stat().st_size <= 60_000, picture


def test_files_that_it_links_to_exist() -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert links and not [link for link in links if not (ROOT / link).exists()]
