"""Traces in both published formats, and what is said of files that are none."""

from pathlib import Path

import pytest

from services.bench.trace import TraceError, TraceRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.6805900,12,0
"""

MOONCAKE = """{"timestamp": 500, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}

{"timestamp": 3500, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]}
"""


def read(tmp_path: Path, text: str, limit: int | None = None) -> list[TraceRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, limit)


def test_azure_s_csv_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    requests = read(tmp_path, AZURE)
    assert [(item.input_tokens, item.output_tokens, item.block_ids) for item in requests] == [
        (374, 44, ()),
        (12, 1, ()),
        (396, 109, ()),
    ]
    assert [item.arrival_s for item in requests] == pytest.approx([0, 3, 4.314579])


def test_mooncake_s_lines_are_read_with_their_blocks(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == [TraceRequest(0.0, 1200, 52, (0, 1, 2)), TraceRequest(3.0, 600, 3, (0, 9))]


def test_a_limit_takes_the_first_lines(tmp_path: Path) -> None:
    assert [item.input_tokens for item in read(tmp_path, AZURE, 2)] == [374, 396]
    assert [item.input_tokens for item in read(tmp_path, MOONCAKE, 1)] == [1200]


def test_a_mark_at_the_beginning_and_time_zones_are_read(tmp_path: Path) -> None:
    text = "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert read(tmp_path, text) == [TraceRequest(0.0, 2162, 5)]


def test_a_file_of_anything_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for data in (bytes(range(256)) * 20, b"a,b\n" + b"x" * 200_000 + b"\n", b"\xff\xfe{\x00"):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=str(path)):
            read_trace(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a,b\n1,2\n", "line 2: has no 'TIMESTAMP'"),
        (AZURE + "2023-11-16 18:15:51,many,3\n", "line 5: invalid literal"),
        (AZURE + "2023-11-16 18:15:51,-4,3\n", "line 5: -4 tokens"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: has no 'output_length'"),
        (MOONCAKE + "{nonsense\n", "line 4: Expecting property name"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": [-1]}\n', "line 1: a hash id is negative"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint.replace("(", r"\(")):
        read(tmp_path, text)
