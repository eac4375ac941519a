"""The figures by which docs/operations.md has workers sized, against the code that reserves the memory."""

import re

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from model_worker.kv_shape import KVShape
from tessera.values.known_models import locate
from tests.deploy.image_build import ROOT

SECTION = (ROOT / "docs" / "operations.md").read_text().partition("\n## Size\n")[2].partition("\n## ")[0]
NAMES = re.findall(r"^\| ([\w. -]+?) \|(?: [\d.]+ \|){7}$", SECTION, re.MULTILINE)


def row(name: str) -> list[float]:
    """Parameters in 10^9, layers, planes, KV heads, head size, KiB of a token, GB of weights."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", SECTION, re.MULTILINE)
    return [float(cell) for cell in line.split(" | ")]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_the_formula_says(name: str) -> None:
    billions, layers, planes, heads, size, token_kib, weights_gb = row(name)
    shape = KVShape(int(layers), int(heads), int(size), int(planes))
    assert token_kib == pytest.approx(shape.bytes_per_token(torch.float16) / 1024, rel=0.002)
    assert weights_gb == pytest.approx(2 * billions, rel=0.005)


def test_the_table_is_found() -> None:
    assert len(NAMES) > 4


def test_the_model_at_hand_is_as_large_as_its_row() -> None:
    billions, layers, _, heads, size, *_ = row("SmolLM2-135M-Instruct")
    reader = GGUFReader(locate("SmolLM2-135M-Instruct"))
    assert sum(int(np.prod(tensor.shape)) for tensor in reader.tensors) == pytest.approx(billions * 1e9, rel=0.005)
    field = {name.partition(".")[2]: reader.fields[name].contents() for name in reader.fields if name.startswith("llama.")}
    assert (field["block_count"], field["attention.head_count_kv"]) == (layers, heads)
    assert field["embedding_length"] // field["attention.head_count"] == size
