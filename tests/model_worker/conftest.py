"""Fixtures of the model worker's tests: torch on one thread, and a reference Llama per shape with ours loaded from its files."""

from collections.abc import Iterator

import pytest
import torch
from tiny_llama import SHAPES, Pair, reference, save

from model_worker.kernels.invariant_backend import ask_mkl_for_invariance
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model

ask_mkl_for_invariance()  # before the first test multiplies


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs = reference(request.param)
    directory = save(theirs, tmp_path_factory.mktemp(request.param))
    return Pair(theirs, load_model(open_model(str(directory)), TorchKernels()), directory)
