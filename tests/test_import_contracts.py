"""The import contracts of pyproject.toml hold, and each of them can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("services", "kv_manager", "model_worker", "gateway")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of ROOT on the packages below `folder`."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'protos'}"}
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache", ROOT / "pyproject.toml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """Every module of ours, emptied: a tree that keeps every contract."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules += (ROOT / "protos" / "tessera").rglob("*.py")
    for path in modules:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    return tmp_path


def test_the_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


def test_an_empty_tree_keeps_every_contract(skeleton: Path) -> None:
    result = lint(skeleton)
    assert result.returncode == 0, result.stdout
    assert "6 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kv_manager/planted.py", "import grpc"),
        ("model_worker/planted.py", "from opentelemetry import trace"),
        ("model_worker/planted.py", "def later():\n    import redis.asyncio"),
        ("gateway/planted.py", "from services.rpc import anything"),
        ("gateway/planted.py", "from tessera.v1 import inference_pb2"),
        ("protos/tessera/values/planted.py", "from google.protobuf import message"),
        ("services/scheduler/core/planted.py", "from tessera.scheduler.v1 import journal_pb2"),
        ("services/scheduler/core/planted.py", "from services.gateway import anything"),
        ("services/scheduler/core/planted.py", "from services.scheduler import config"),
        ("services/scheduler/core/planted.py", "import redis"),
        ("services/scheduler/core/planted.py", "import opentelemetry"),
        ("services/scheduler/core/planted.py", "import model_worker"),
        ("services/bench/planted.py", "import tessera.client"),
        ("services/bench/planted.py", "import services.rpc"),
        ("services/bench/planted.py", "import grpc"),
        ("gateway/planted.py", "import kv_manager"),
        ("kv_manager/planted.py", "import services.scheduler.core"),
        ("protos/tessera/planted.py", "import torch"),
        ("protos/tessera/planted.py", "import kv_manager"),
        ("services/gateway/planted.py", "import torch"),
        ("services/scheduler/planted.py", "import model_worker"),
    ],
)
def test_a_planted_import_breaks_a_contract(skeleton: Path, module: str, line: str) -> None:
    (skeleton / module).write_text(line + "\n")
    result = lint(skeleton)
    assert result.returncode == 1, result.stdout
    assert "planted" in result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("services/scheduler/core/planted.py", "import kv_manager"),
        ("services/scheduler/core/planted.py", "import services.scheduler.core.record"),
        ("services/scheduler/planted.py", "import redis, grpc, services.rpc, tessera.scheduler.v1"),
        ("services/worker/planted.py", "import torch, model_worker, kv_manager"),
        ("kv_manager/planted.py", "import tessera.values.config"),
    ],
)
def test_an_allowed_import_breaks_none(skeleton: Path, module: str, line: str) -> None:
    (skeleton / module).write_text(line + "\n")
    result = lint(skeleton)
    assert result.returncode == 0, result.stdout
