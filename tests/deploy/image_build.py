"""Runs Dockerfiles where there is no container engine: their own RUN lines and entry points, in namespaces of the kernel.

This machine's filesystem takes the place of the base image, with this Python where the base has its own (/usr/local); what a stage adds lies in a
folder over it (overlayfs). So it shows that the lines work and that what they make is enough to run, but nothing of the base itself. Needs root.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path

from dockerfile_parse import DockerfileParser

from services import bound_process

ROOT = Path(__file__).resolve().parents[2]

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/",
    "LD_LIBRARY_PATH": "/usr/local/lib",  # where the base has told the linker of its Python's library
}

_ENTER = """
set -eu
PATH=$PATH:/usr/sbin:/sbin
mount -t overlay overlay -o "$1" "$2"
mount --bind -o ro "$3" "$2/usr/local"
mount -t proc proc "$2/proc"
mount --rbind /dev "$2/dev"
cd "$2"
root=$2 user=$4 folder=$5
shift 5
exec chroot --userspec "$user" "$root" env -i --chdir "$folder" "$@"
"""
"""Options of the overlay, where it is mounted, this Python, who is to run, in which folder; then variables and the command. What runs is process 1."""


@dataclass(frozen=True, slots=True)
class Image:
    """What a stage is so far. `layers` are folders, the newest first."""

    layers: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: dict(BASE_ENVIRONMENT))
    folder: str = "/"
    user: str = "0:0"
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()

    def container(self, mount_point: Path, *arguments: str, **variables: str) -> list[str]:
        """What runs the image's entry point with `arguments` (its own command without any) on a read-only filesystem. It ends with this thread."""
        return self._run(mount_point, (*self.entry_point, *(arguments or self.command)), "ro", variables)

    def health(self, mount_point: Path, **variables: str) -> list[str]:
        """What runs its health check."""
        return self._run(mount_point, self.health_check, "ro", variables)

    def program(self, mount_point: Path, *words: str) -> list[str]:
        """What runs something else in it."""
        return self._run(mount_point, words, "ro", {})

    def run_line(self, mount_point: Path, line: str, variables: dict[str, str]) -> None:
        """One RUN: what it changes goes into the newest layer. Raises CalledProcessError."""
        assert self.layers, "a stage has a layer of its own"
        work = mount_point.with_name("work")
        work.mkdir(exist_ok=True)
        overlay = f"upperdir={self.layers[0]},workdir={work}"
        words = self._run(mount_point, ("/bin/sh", "-c", line), overlay, {**_pip_settings(), **variables})
        subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)

    def _run(self, mount_point: Path, command: tuple[str, ...], overlay: str, variables: dict[str, str]) -> list[str]:
        mount_point.mkdir(exist_ok=True)
        lower = [str(layer) for layer in (self.layers if overlay == "ro" else self.layers[1:])] + ["/"]
        options = f"{overlay},lowerdir={':'.join(lower)}"
        environment = [f"{name}={value}" for name, value in {**self.environment, **variables}.items()]
        enter = ("sh", "-c", _ENTER, "enter", options, str(mount_point), sys.base_prefix, self.user, self.folder)
        bound = (sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid()))
        unshare = shutil.which("unshare")
        assert unshare is not None, "unshare is missing: apt-get install util-linux"
        return [*bound, unshare, "--mount", "--pid", "--fork", "--kill-child", *enter, *environment, *command]


class ImageBuild:
    """One Dockerfile, built below `scratch`, which must not be on the filesystem of /. `arguments` are those of `docker build --build-arg`."""

    def __init__(self, dockerfile: Path, scratch: Path, arguments: dict[str, str]) -> None:
        self._scratch = scratch
        self._arguments = arguments
        self._stages: dict[str, Image] = {}
        scratch.mkdir()
        parser = DockerfileParser(fileobj=BytesIO(dockerfile.read_bytes()))
        self._lines = [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]

    def build(self) -> dict[str, Image]:
        """All stages by name."""
        stage, image, variables = "", Image(), dict[str, str]()
        for instruction, value in self._lines:
            if instruction == "FROM":
                parent, _, stage = value.partition(" AS ")
                variables = {}
                image = self._with_layer(self._stages.get(parent, Image()), stage)
            elif instruction == "RUN":
                if not value.startswith("apt-get"):  # of the base's kind of system: what it installs is on this machine
                    image.run_line(self._scratch / "root", value, variables)
            elif instruction == "COPY":
                self._copy(image, value)
            elif instruction == "ARG":
                variables |= {name: self._arguments.get(name, default) for name, default in _pairs(value)}
            else:
                image = _changed(image, instruction, value)
            self._stages[stage] = image
        return self._stages

    def _with_layer(self, parent: Image, stage: str) -> Image:
        layer = self._scratch / stage
        layer.mkdir()
        return replace(parent, layers=(layer, *parent.layers))

    def _copy(self, image: Image, value: str) -> None:
        *sources, target = [word for word in shlex.split(value) if not word.startswith("--")]
        given = re.match(r"--from=(\S+)", value)
        to = image.layers[0] / (Path(image.folder) / target).relative_to("/")
        if given is not None:
            (source,) = sources
            made = next(layer for layer in self._stages[given[1]].layers if (layer / source[1:]).exists())
            to.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(("cp", "--archive", "--link", made / source[1:], to), check=True)
            return
        for source in sources:
            for file in context_files(source):
                inside = file.relative_to(source) if file != Path(source) else Path(file.name if target == "./" else "")
                (to / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, to / inside)


def context_files(source: str) -> Iterator[Path]:
    """The files that COPY takes for `source`, relative to the repository, which is the context: those that .dockerignore leaves."""
    found = [path for path in (ROOT / source).rglob("*") if path.is_file()] if (ROOT / source).is_dir() else [ROOT / source]
    return (path for path in (each.relative_to(ROOT) for each in sorted(found)) if not is_ignored(path))


def is_ignored(path: Path) -> bool:
    """By .dockerignore: the last line that fits the path, or a folder above it, decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or line.startswith("#"):
            continue
        places = [path, *path.parents][:-1]
        names = [place.name for place in places] if pattern.startswith("**/") else [str(place) for place in places]
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            ignored = not line.startswith("!")
    return ignored


def _changed(image: Image, instruction: str, value: str) -> Image:
    """After an instruction that changes no file."""
    match instruction:
        case "ENV":
            return replace(image, environment={**image.environment, **dict(_pairs(value))})
        case "WORKDIR":
            (image.layers[0] / value[1:]).mkdir(parents=True, exist_ok=True)
            return replace(image, folder=value)
        case "USER":
            return replace(image, user=value)
        case "ENTRYPOINT":
            return replace(image, entry_point=tuple(json.loads(value)), command=())
        case "CMD":
            return replace(image, command=tuple(json.loads(value)))
        case "HEALTHCHECK":
            return replace(image, health_check=tuple(json.loads(value.partition("CMD ")[2])))
        case "LABEL" | "EXPOSE":
            return image
        case _:
            raise AssertionError(f"{instruction} is not known here")


def _pairs(value: str) -> list[tuple[str, str]]:
    """NAME=VALUE NAME="VALUE" ..."""
    found = [(name, text) for name, _, text in (word.partition("=") for word in shlex.split(value))]
    assert not any("$" in text for _, text in found), f"variables in {value} are not known here"
    return found


def _pip_settings() -> dict[str, str]:
    """Where this machine has its packages from."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower().endswith("_proxy")}
