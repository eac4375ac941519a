"""Write deploy/images/*.txt again: every package of each image, at the version that this environment has. `make image-locks`.

Torch is left out: which build of it an image gets is an argument of the build, or the base's.
"""

from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "images"

EXTRAS = {"slim.txt": ("engine", "tracing"), "worker.txt": ("worker", "tracing")}
"""Which extras of this distribution the images with that file have."""

LEFT_OUT = {"tessera-server", "tessera", "torch"}


def needed(extras: tuple[str, ...], root: str = "tessera-server") -> dict[str, set[Requirement]]:
    """Every distribution that `root` with `extras` needs on this machine, itself among them, and what is asked of it."""
    found: dict[str, set[Requirement]] = {}
    todo = [(root, frozenset(extras))]
    done = set()
    while todo:
        name, wanted = todo.pop()
        found.setdefault(name, set())
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        for requirement in map(Requirement, requires(name) or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                to = canonicalize_name(requirement.name)
                found.setdefault(to, set()).add(requirement)
                todo.append((to, frozenset(requirement.extras)))
    return found


def lock(extras: tuple[str, ...]) -> str:
    """A requirements file."""
    names = sorted(needed(extras).keys() - LEFT_OUT)
    return "# Written by `make image-locks`.\n" + "".join(f"{name}=={version(name)}\n" for name in names)


def main() -> None:
    for name, extras in EXTRAS.items():
        (FOLDER / name).write_text(lock(extras))


if __name__ == "__main__":
    main()
