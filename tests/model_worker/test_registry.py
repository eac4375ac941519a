"""Which architectures can be run."""

from dataclasses import replace

import pytest
from tiny_llama import Pair

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.llama import LlamaForCausalLM
from model_worker.models.registry import UnknownArchitecture, build_model


def test_a_known_architecture(pair: Pair) -> None:
    assert isinstance(build_model(pair.ours.config, TorchKernels()), LlamaForCausalLM)


def test_an_unknown_architecture_names_the_known_ones(pair: Pair) -> None:
    config = replace(pair.ours.config, architecture="MysteryForCausalLM")
    with pytest.raises(UnknownArchitecture, match=r"'MysteryForCausalLM'.*LlamaForCausalLM"):
        build_model(config, TorchKernels())
