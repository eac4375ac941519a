"""What the Dockerfiles say, read without building anything: a linter, and what they repeat of other files."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from io import BytesIO
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import image_locks
from tests.deploy.image_build import ROOT, context_files, is_ignored

IMAGES = ROOT / "deploy" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))


def texts() -> dict[str, str]:
    return {file.name: file.read_text() for file in DOCKERFILES}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    result = subprocess.run((hadolint, "--failure-threshold", "style", file), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    worse = subprocess.run((hadolint, "-"), input="FROM debian\nRUN cd /x && pip install y\n", capture_output=True, text=True)
    assert worse.returncode == 1 and "DL3006" in worse.stdout


def test_the_last_stage_of_each_is_for_use() -> None:
    """Not root, an entry point without a shell, which would keep signals to itself, a health check, and a base that nobody can change."""
    for name, text in texts().items():
        *_, last = re.split(r"^FROM .*\n", text, flags=re.MULTILINE)
        check = r'^HEALTHCHECK .*CMD \["tessera", "health"\]$'
        for need in (r"^USER 10001:10001$", r'^ENTRYPOINT \["tessera"\]$', check, r"^CMD \[", r"^EXPOSE \d+", "^LABEL "):
            assert re.search(need, last, re.MULTILINE), f"{name}: {need}"
        stages = set(re.findall(r" AS (\S+)$", text, re.MULTILINE))
        bases = [base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if base not in stages]
        assert bases and all(re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", base) for base in bases), f"{name}: {bases}"


def test_versions_are_those_of_the_distribution_and_of_the_aiter_that_calls_are_checked_against() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, text in texts().items():
        assert set(re.findall(r'image\.version="([^"]*)"', text)) == {version}, name
    aiter, _ = json.loads((ROOT / "tests" / "aiter" / "signatures" / "head.json").read_text())["commit"].split()
    assert f"ARG AITER_COMMIT={aiter}\n" in texts()["worker-rocm.Dockerfile"]
    (weights,) = re.findall(r"^WEIGHTS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(f'ARG WEIGHTS="{weights}"\n' in texts()[f"{name}.Dockerfile"] for name in ("slim", "worker-cpu"))
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f'ARG TORCH="{torch} ' in texts()["worker-cpu.Dockerfile"]


@pytest.mark.parametrize("name", image_locks.EXTRAS)
def test_a_lock_pins_what_is_asked_for_to_versions_that_will_do(name: str) -> None:
    """That it has all that these need in turn is for `pip check`, while the image is built: what the newest ones need may be something else."""
    lines = [line for line in (IMAGES / name).read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "protos" / "pyproject.toml").read_text())["project"]
    extras = (line for extra in image_locks.EXTRAS[name] for line in own["optional-dependencies"][extra])
    for requirement in map(Requirement, (*own["dependencies"], *client["dependencies"], *extras)):
        to = canonicalize_name(requirement.name)
        if to not in image_locks.LEFT_OUT:
            assert to in pinned and requirement.specifier.contains(pinned[to]), (
                f"make image-locks: {requirement}, {pinned.get(to)}"
            )


def test_torch_is_in_no_slim_image_and_its_build_is_chosen_elsewhere_for_workers() -> None:
    assert "torch" in image_locks.needed(("worker",)) and "torch" not in image_locks.needed(image_locks.EXTRAS["slim.txt"])
    assert not re.search(r"^torch==", (IMAGES / "worker.txt").read_text(), re.MULTILINE)


def run_lines(name: str) -> list[str]:
    """Of one Dockerfile."""
    parser = DockerfileParser(fileobj=BytesIO(texts()[name].encode()))
    return [one["value"] for one in parser.structure if one["instruction"] == "RUN"]


@pytest.mark.parametrize("name", texts())
def test_all_that_pip_installs_is_pinned_and_checked(name: str) -> None:
    lines = run_lines(name)
    for words in (
        re.split(r"pip install ", part)[1].split()
        for line in lines
        for part in re.split(r" && |; ", line)
        if "pip install " in part
    ):
        pinned = {"--no-deps", "--constraint"} & set(words) or all("==" in word for word in words)
        of_a_stage_that_is_left_behind = name == "worker-rocm.Dockerfile" and words == ["--requirement", "requirements.txt"]
        assert pinned or of_a_stage_that_is_left_behind, words
    own = next(place for place, line in enumerate(lines) if "pip install --no-deps ./protos ." in line)
    assert any("pip check" in line for line in lines[own:])


def test_torch_comes_after_what_it_needs() -> None:
    """An index that has torch alone is enough then: pip takes what is there."""
    (line,) = [line for line in run_lines("worker-cpu.Dockerfile") if "$TORCH" in line]
    first, second = re.findall(r"pip install (.*?)(?: &&|$)", line)
    assert first == "--no-deps --requirement worker.txt" and second == "--constraint worker.txt $TORCH"


@pytest.mark.parametrize(
    ("lacks", "status"),
    [
        (None, 0),
        ("torchvision 0.25 requires pillow, which is not installed.", 0),
        ("numpy 2.0 is not what gguf 0.19 wants.", 1),
    ],
)
def test_only_what_comes_to_the_gpu_base_can_fail_its_check(tmp_path: Path, lacks: str | None, status: int) -> None:
    (line,) = [line for line in run_lines("worker-rocm.Dockerfile") if line.startswith("pip check")]
    (tmp_path / "base-lacks.txt").write_text("torchvision 0.25 requires pillow, which is not installed.\n")
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/bin/sh\necho 'No broken requirements found.'\n" if lacks is None else f"#!/bin/sh\necho '{lacks}'\nexit 1\n"
    )
    pip.chmod(0o755)
    result = subprocess.run(
        ("sh", "-c", line.replace("/opt/", f"{tmp_path}/")),
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == status and result.stdout.strip() == (lacks if status else ""), result


def test_the_context_has_the_sources_and_nothing_that_was_made_of_them() -> None:
    assert Path("services/cli/main.py") in set(context_files("services"))
    assert Path("protos/tessera/v1/inference.proto") in set(context_files("protos"))
    for name in (
        "services/__pycache__/x.pyc",
        "model_worker/kernels/cpu/built/avx2-1.so",
        "data/redis/dump.rdb",
        ".git/config",
    ):
        assert is_ignored(Path(name)), name
    assert list(context_files("deploy/images/slim.txt")) == [Path("deploy/images/slim.txt")]
