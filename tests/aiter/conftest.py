"""AITER's real Python and Triton code on a CPU. `make test-aiter` runs this folder once per mode and architecture, each in processes of its own:
Triton's interpreter and its compiler exclude each other, and AITER chooses dtypes and tile sizes when it is imported.

MODE `interpreter`: everything but `compiler/`; on a second architecture only what is marked `each_arch`. MODE `compiler`: `compiler/` alone.
"""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

FIRST_ARCH = "gfx942"
MODE = os.environ.get("AITER_TEST_MODE", "interpreter")
ARCH = os.environ.get("AITER_TEST_ARCH", FIRST_ARCH)

if find_spec("triton") is None:
    raise pytest.UsageError("these tests need triton and amd-aiter: `make test-aiter` sets up an environment with both")

# Read when triton is imported, so before everything else.
os.environ["TRITON_INTERPRET"] = "1" if MODE == "interpreter" else "0"

from model_worker.kernels.aiter.library import AiterLibrary  # noqa: E402
from model_worker.kernels.aiter.triton_calls import TritonCalls  # noqa: E402
from tests.aiter import checkout, compiled_modules, fake_rocm  # noqa: E402

# Removed when the process ends.
_folder = tempfile.TemporaryDirectory(prefix="fake-rocm-")
fake_rocm.install(ARCH, Path(_folder.name))
compiled_modules.install()
if MODE == "interpreter":
    from tests.aiter import interpreter_patches

    interpreter_patches.apply()
    collect_ignore = ["compiler"]
else:
    collect_ignore_glob = ["test_*.py"]
if checkout.CHECKOUT is not None:
    checkout.use(checkout.CHECKOUT)
    # What is of the wheel: its declarations, and its operators as the stand-ins have them.
    collect_ignore_glob = ["test_*.py" if MODE == "compiler" else "test_[!t]*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each_arch: depends on the architecture, so it runs on each")
    # The interpreter's own, once for each program.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if MODE == "interpreter" and ARCH != FIRST_ARCH:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("each_arch") is None])
        items[:] = [item for item in items if item.get_closest_marker("each_arch") is not None]


@pytest.fixture(scope="session")
def arch() -> str:
    """The architecture that AITER takes this machine's GPU for."""
    return ARCH


@pytest.fixture(autouse=True)
def recorded_calls() -> list[compiled_modules.Call]:
    """The calls of compiled operators in this test so far, see `compiled_modules`."""
    compiled_modules.CALLS.clear()
    return compiled_modules.CALLS


@pytest.fixture(scope="session")
def triton_calls(arch: str) -> TritonCalls:
    """AITER's real Triton kernels, called as the worker calls them."""
    return TritonCalls(AiterLibrary(arch))
