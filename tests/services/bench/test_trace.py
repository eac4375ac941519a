"""Traces in both published formats, and what is said of files that are none."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from services.bench.trace import LINE_CHARACTERS_MAX, TraceError, TraceRequest, read_trace

HEAD, AT = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:15:51"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.6805900,12,0
"""

MOONCAKE = """{"timestamp": 500, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}

{"timestamp": 3500, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]}
"""


def line(**given: Any) -> str:
    """One of Mooncake's with these fields; None: without."""
    row = {"timestamp": 500, "input_length": 1200, "output_length": 52} | given
    return json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"


def read(tmp_path: Path, text: str, limit: int | None = None) -> list[TraceRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, limit)


def test_azure_s_csv_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    requests = read(tmp_path, AZURE)
    assert [(item.input_tokens, item.output_tokens, item.block_ids) for item in requests] == [
        (374, 44, ()),
        (12, 0, ()),
        (396, 109, ()),
    ]
    assert [item.arrival_s for item in requests] == pytest.approx([0, 3, 4.314579])
    assert [item.is_empty for item in requests] == [False, True, False]


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
        ("", ": has no requests"),
        (HEAD, ": has no requests"),
        ("a,b\n1,2\n", ", line 1: 'a,b' is no JSON object, and has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("hello world\n", ", line 1: 'hello world' is no JSON object, and has no column TIMESTAMP"),
        ("[" + MOONCAKE + "]", ', line 1: \'[{"timestamp": 500, "input_length": 120... is no JSON object'),
        ("\n" + MOONCAKE, ", line 1: '' is no JSON object"),
        (
            "TIMESTAMP,ContextTokens\n" + AT + ",5\n",
            ", line 1: 'TIMESTAMP,ContextTokens' is no JSON object, and has no column GeneratedTokens",
        ),
        (AZURE + AT + ",4\n", ", line 5: GeneratedTokens is missing"),
        (AZURE + "abc,4,3\n", ", line 5: TIMESTAMP 'abc' is no time"),
        (AZURE + AT + ",many,3\n", ", line 5: ContextTokens 'many' is no whole number from 0 to"),
        (AZURE + AT + ",4.5,3\n", ", line 5: ContextTokens '4.5' is no whole number"),
        (AZURE + AT + ",4,\n", ", line 5: GeneratedTokens '' is no whole number"),
        (AZURE + AT + ",-4,3\n", ", line 5: ContextTokens -4 is no whole number"),
        (AZURE + AT + ",1_0,3\n", ", line 5: ContextTokens '1_0' is no whole number"),
        (AZURE + AT + f",4,{'9' * 5000}\n", ", line 5: GeneratedTokens '999999999999999999999999999999999999999... is no"),
        (AZURE + 'x,"' + "y\\n" * 100_000, ", line 5: cannot be read as CSV: field larger than"),
        (MOONCAKE + "\n{nonsense\n", ", line 5: column 2: is no JSON"),
        (MOONCAKE + "[1]\n", ", line 4: [1] is no JSON object"),
        ('{"a":' * 100_000 + "\n", ", line 1: is nested too deeply"),
        (line(output_length=None), ", line 1: output_length is missing"),
        (line(timestamp=math.inf), ", line 1: timestamp inf is no number of milliseconds"),
        (line().replace("500", "1e400"), ", line 1: timestamp inf is no number of milliseconds"),
        (line(timestamp=math.nan), ", line 1: timestamp nan is no number"),
        (line(timestamp=1e300), ", line 1: timestamp 1e+300 is no number of milliseconds, 1e+15 at most"),
        (line(timestamp="9"), ", line 1: timestamp '9' is no number"),
        (line().replace("1200", "9" * 5000), ", line 1: input_length '999999999999999999999999999999999999999... is no"),
        (line(input_length=4.5), ", line 1: input_length 4.5 is no whole number"),
        (line(input_length=True), ", line 1: input_length True is no whole number"),
        (line(output_length=1 << 31), ", line 1: output_length 2147483648 is no whole number from 0 to 2147483647"),
        (line(hash_ids="12"), ", line 1: hash_ids '12' is no list"),
        (line(hash_ids=[-1]), ", line 1: hash_ids: -1 is no whole number from 0"),
        (line(hash_ids=[1.5]), ", line 1: hash_ids: 1.5 is no whole number from 0"),
        (line(hash_ids=[1, 2, 3, 4]), ", line 1: hash_ids has 4 where an input_length of 1200 has 3 blocks of 512 tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError) as refused:
        read(tmp_path, text)
    said = str(refused.value)
    assert (
        said.startswith(f"{tmp_path / 'trace'}{complaint}") and "; expected is CSV with TIMESTAMP" in said and len(said) < 500
    )


def test_a_whole_number_with_a_point_is_one(tmp_path: Path) -> None:
    assert read(tmp_path, line(input_length=4.0, hash_ids=[7])) == [TraceRequest(0.0, 4, 52, (7,))]


def test_times_without_a_zone_are_no_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        requests = read(tmp_path, HEAD + "2023-03-26 01:59:59,1,1\n2023-03-26 03:00:01,2,2\n")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [item.arrival_s for item in requests] == [0.0, 3602.0]


def test_a_line_without_end_is_not_read_for_ever() -> None:
    with pytest.raises(TraceError, match=f"/dev/zero, line 1: has more than {LINE_CHARACTERS_MAX} characters"):
        read_trace(Path("/dev/zero"))


@pytest.mark.parametrize("begin", [AZURE, MOONCAKE])
def test_lines_without_end_are_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    monkeypatch.setattr("services.bench.trace.LINES_MAX", 50)
    with pytest.raises(TraceError, match="line 51: more than 50 lines are not read: give --trace-limit"):
        read(tmp_path, begin + "\n" * 100)
    assert len(read(tmp_path, begin + "\n" * 100, limit=2)) == 2


def test_nothing_is_read_after_the_limit(tmp_path: Path) -> None:
    assert len(read(tmp_path, MOONCAKE + "x" * (LINE_CHARACTERS_MAX + 1), limit=2)) == 2
    assert len(read(tmp_path, AZURE + "x" * (LINE_CHARACTERS_MAX + 1), limit=3)) == 3


def test_a_pipe_is_read_and_a_folder_refused(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.write(sink, AZURE.encode())
    try:
        assert len(read_trace(Path(f"/dev/fd/{source}"), limit=3)) == 3, "though its other end is open"
    finally:
        os.close(source)
        os.close(sink)
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
