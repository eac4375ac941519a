"""The header reader against the gguf package's writer and reader, and on damaged files."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.values.gguf_header import GGUFFormatError, read_gguf_header
from tessera.values.known_models import locate


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.scale", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "über 😀")
    writer.add_array("a.words", ["", "x", "naïve"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("first.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 128])
def test_reads_what_the_package_wrote(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "small.gguf", alignment)
    header = read_gguf_header(path)
    values = {key: value for key, value in header.metadata.items() if key.startswith("a.")}
    assert values == {
        "a.count": 7,
        "a.scale": 0.5,
        "a.flag": True,
        "a.text": "über 😀",
        "a.words": ["", "x", "naïve"],
        "a.numbers": [1, -2, 3],
    }
    first, second = header.tensors
    assert (first.name, first.shape, first.ggml_type) == ("first.weight", (2, 3), gguf.GGMLQuantizationType.F32)
    assert (second.name, second.shape, second.ggml_type) == ("second.weight", (5,), gguf.GGMLQuantizationType.F16)
    assert np.fromfile(path, np.float32, 6, offset=first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.fromfile(path, np.float16, 5, offset=second.offset).tolist() == [0, 1, 2, 3, 4]


def test_agrees_with_the_package_on_a_real_file() -> None:
    path = locate("SmolLM2-135M-Instruct")
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.data_offset == reader.data_offset
    assert {key: reader.fields[key].contents() for key in header.metadata} == header.metadata
    assert [(t.name, t.shape, t.ggml_type, t.offset) for t in header.tensors] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset) for t in reader.tensors
    ]


@pytest.mark.parametrize(
    "raw", [b"", b"GGU", b"PK\x03\x04 zip file", b"GGUF\x01\x00\x00\x00", b"GGUF\x00\x00\x00\x03" + b"\x00" * 16]
)
def test_other_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(raw)
    with pytest.raises(GGUFFormatError, match=str(path)):
        read_gguf_header(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, derandomize=True)
@given(cut=st.integers(8, 400), position=st.integers(8, 400), byte=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_read_but_never_crashes(tmp_path: Path, cut: int, position: int, byte: int) -> None:
    whole = write(tmp_path / "whole.gguf").read_bytes()
    end = read_gguf_header(tmp_path / "whole.gguf").data_offset
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole[: min(cut, end - 64)])
    with pytest.raises(GGUFFormatError, match="damaged"):
        read_gguf_header(damaged)
    damaged.write_bytes(whole[:position] + bytes([byte]) + whole[position + 1 :])
    try:
        read_gguf_header(damaged)
    except GGUFFormatError as error:
        assert str(damaged) in str(error)
