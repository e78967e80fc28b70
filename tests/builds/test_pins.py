"""The pin, and the flags of every backend."""

import re
import tomllib
from pathlib import Path

import pytest

from builds import pins as pinned
from builds.environment import CONSTRAINTS
from builds.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]


def test_the_project_asks_for_the_release_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = f"llama-cpp-python=={pinned.pins().version}"
    assert wanted in project["dependencies"]


def test_the_pin_names_whole_hashes() -> None:
    pins = pinned.pins()
    assert re.fullmatch(r"[0-9a-f]{64}", pins.sdist_sha256)
    assert re.fullmatch(r"[0-9a-f]{40}", pins.llama_cpp_commit)


def test_the_version_is_written_nowhere_else() -> None:
    """One pin: a second place would be forgotten at the next release."""
    version = re.escape(pinned.pins().version)
    allowed = {"builds/versions.toml", "pyproject.toml"}
    code = [*(ROOT / "builds").rglob("*.py"), *(ROOT / "builds").glob("*.toml")]
    code += [*ROOT.glob("Dockerfile*"), ROOT / "Makefile"]
    found = {str(path.relative_to(ROOT)) for path in code if re.search(version, path.read_text())}
    assert found <= allowed


@pytest.mark.parametrize("backend", pinned.BACKENDS)
def test_every_backend_has_flags_and_ships_plugins(backend: str) -> None:
    recipe = pinned.recipe(backend)
    assert recipe.cmake["GGML_BACKEND_DL"] == "ON"
    assert recipe.cmake["GGML_NATIVE"] == "OFF"
    assert recipe.ship
    assert not set(recipe.ship) & set(recipe.test)


@pytest.mark.parametrize("backend", pinned.BACKENDS)
def test_a_comment_says_why_before_the_flags(backend: str) -> None:
    lines = (pinned.FOLDER / f"{backend}.toml").read_text().splitlines()
    table = lines.index("[cmake]")
    commented = False
    for line in lines[table + 1 : lines.index("", table)]:
        assert commented or line.startswith("#") or line.startswith(f"GGML_{backend.upper()} ")
        commented = commented or line.startswith("#")
    assert commented


def test_native_changes_the_flags_and_the_plugins() -> None:
    recipe = pinned.recipe("cpu", native=True)
    assert recipe.cmake["GGML_NATIVE"] == "ON"
    assert recipe.cmake["GGML_CPU_ALL_VARIANTS"] == "OFF"
    assert recipe.ship == ("libggml-cpu.so",)


def test_blas_is_an_optional_plugin() -> None:
    assert pinned.recipe("cpu").optional == ()
    recipe = pinned.recipe("cpu", blas=True)
    assert recipe.optional == ("libggml-blas.so",)
    assert recipe.optional[0] not in recipe.ship


def test_architectures_come_from_the_pin_unless_given() -> None:
    default = pinned.recipe("cuda").cmake["CMAKE_CUDA_ARCHITECTURES"]
    assert default == ";".join(pinned.versions()["cuda"]["architectures"])
    given = pinned.recipe("cuda", architectures=("90-real",))
    assert given.cmake["CMAKE_CUDA_ARCHITECTURES"] == "90-real"


def test_a_variation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BuildError, match="--arch does not apply to the cpu backend"):
        pinned.recipe("cpu", architectures=("90",))
    with pytest.raises(BuildError, match="--blas does not apply to the cuda backend"):
        pinned.recipe("cuda", blas=True)


def test_every_dependency_has_a_version_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[\[<>=!~ ]", each)[0] for each in wanted} - {"llama-cpp-python"}
    locked = {
        line.split("==")[0].lower().replace("_", "-")
        for line in CONSTRAINTS.read_text().splitlines()
        if "==" in line
    }
    assert {name.lower().replace("_", "-") for name in names} <= locked
