"""The command line of this package: one subcommand per thing that can be made."""

import argparse
import json
import sys
from pathlib import Path

from builds import environment, images, locks, sbom, sdist, smoke, store, ui, wheels
from builds import pins as pinned
from builds.errors import BuildError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing half-made was kept.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m builds", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    given = argparse.ArgumentParser(add_help=False)
    given.add_argument(
        "--sdist", type=Path, help="an sdist that is already here; still verified against the pin"
    )
    for backend in pinned.BACKENDS:
        made = commands.add_parser(
            backend, parents=[given], help=f"build the {backend} wheel into dist/{backend}"
        )
        made.set_defaults(run=_build, backend=backend)
        made.add_argument("--native", action="store_true", help="for this processor alone")
        made.add_argument("--blas", action="store_true", help="with an OpenBLAS plug-in")
        made.add_argument("--arch", action="append", default=[], help="a GPU architecture")
        made.add_argument("--jobs", type=_positive, help="compilers at once, nvcc's among them")
        made.add_argument("--out", type=Path, help="another folder than dist/<backend>")

    page = commands.add_parser(
        "ui", parents=[given], help="build the chat page's wheel, with the pinned Node and npm"
    )
    page.set_defaults(run=_ui)
    page.add_argument("--out", type=Path, help="a folder for the wheel; else it stays in the cache")

    unpacked = commands.add_parser(
        "sdist", parents=[given], help="print the folder of the verified, unpacked sources"
    )
    unpacked.set_defaults(run=lambda options: print(sdist.unpacked(pinned.pins(), options.sdist)))

    tried = commands.add_parser("smoke", help="try a wheel in a fresh venv; prints JSON")
    tried.set_defaults(run=_smoke)
    tried.add_argument("wheel", type=Path)
    tried.add_argument("--model", type=Path, help="a GGUF file instead of the bundled model")

    image = commands.add_parser("image", help="build a backend's container image")
    image.set_defaults(run=_image)
    image.add_argument("backend", choices=images.BACKENDS)
    image.add_argument("--tag", help="without it, llorch-<backend>")
    image.add_argument(
        "--registry", default="", help="what the name begins with: registry.example/team"
    )
    image.add_argument("--pin", help="another set of base images of versions.toml, such as cuda12")
    image.add_argument("--tool", choices=images.TOOLS, help="without it, the first that works")
    image.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    image.add_argument("--extra", action="append", default=[], help="an option for the tool itself")

    lock = commands.add_parser("lock", help="write the versions and hashes of all packages down")
    lock.set_defaults(run=lambda options: locks.write(options.upgrade))
    lock.add_argument("--upgrade", action="store_true", help="let the newest versions in")

    listed = commands.add_parser("sbom", help="what a venv and this system hold, as CycloneDX JSON")
    listed.set_defaults(run=_sbom)
    listed.add_argument("venv", type=Path)

    placed = commands.add_parser("install", help="a new venv with built wheels and the worker")
    placed.set_defaults(run=lambda options: environment.install(options.venv, options.wheel))
    placed.add_argument("venv", type=Path)
    placed.add_argument("wheel", type=Path, nargs="+", help="llama.cpp's, and the chat page's")

    setup = commands.add_parser("setup", parents=[given], help="bring a venv up to date")
    setup.set_defaults(run=_setup)
    setup.add_argument("--venv", type=Path, required=True)
    setup.add_argument("--backend", choices=pinned.BACKENDS, default="cpu")
    setup.add_argument(
        "--native", action="store_true", help="with a wheel for this processor and GPU alone"
    )
    setup.add_argument("--sanitized", action="store_true", help="with a wheel for `make asan`")
    setup.add_argument(
        "--to-run", action="store_true", help="the quickest way to a running worker, without tests"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _build(options: argparse.Namespace) -> None:
    recipe = pinned.recipe(
        options.backend,
        native=options.native,
        blas=options.blas,
        architectures=tuple(options.arch),
    )
    built = wheels.build(recipe, pinned.pins(), given_sdist=options.sdist, jobs=options.jobs)
    target = options.out or environment.ROOT / "dist" / options.backend
    wheel = wheels.export(built, target)
    store.say(f"{wheel.stat().st_size / 1e6:.1f} MB")
    print(wheel)


def _ui(options: argparse.Namespace) -> None:
    wheel = ui.build(pinned.pins(), options.sdist)
    print(wheels.export(wheel, options.out) if options.out else wheel)


def _smoke(options: argparse.Namespace) -> None:
    print(json.dumps(smoke.smoke(options.wheel, options.model), indent=2))


def _image(options: argparse.Namespace) -> None:
    tag = options.tag or f"llorch-{options.backend}"
    if options.registry:
        tag = f"{options.registry.rstrip('/')}/{tag}"
    built = images.build(
        options.backend,
        tag,
        pin=options.pin,
        with_tool=options.tool,
        given=options.build_arg,
        extra=options.extra,
    )
    print(built)


def _sbom(options: argparse.Namespace) -> None:
    print(json.dumps(sbom.document(options.venv), indent=1))


def _setup(options: argparse.Namespace) -> None:
    environment.setup(
        options.venv,
        options.backend,
        to_run=options.to_run,
        native=options.native,
        sanitized=options.sanitized,
        given_sdist=options.sdist,
    )
