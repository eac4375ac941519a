"""What the weights digest notices."""

from pathlib import Path

import pytest

from model_worker.weights.digest import HEAD_BYTES, weights_digest

SIZE = HEAD_BYTES + 64 * 32_768


def digest_of(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    return weights_digest([path])


@pytest.mark.parametrize("position", [0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 63 * 32_768 + 16_383])
def test_a_changed_byte_in_the_head_or_a_chunk(tmp_path: Path, position: int) -> None:
    raw = bytearray(SIZE)
    first = digest_of(tmp_path / "a", bytes(raw))
    assert digest_of(tmp_path / "b", bytes(raw)) == first
    raw[position] = 1
    assert digest_of(tmp_path / "a", bytes(raw)) != first


def test_size_and_order_of_files_count(tmp_path: Path) -> None:
    assert digest_of(tmp_path / "a", bytes(SIZE)) != digest_of(tmp_path / "a", bytes(SIZE + 1))
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert weights_digest([one, two]) != weights_digest([two, one])
