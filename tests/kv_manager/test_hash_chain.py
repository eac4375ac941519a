"""The digests other processes, other versions and ATOM must agree on."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kv_manager.hash_chain import NAMESPACE_TAG, chain_digests, join_namespace, namespace_link

ROOT = Path(__file__).resolve().parents[2]


def blocks(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.mark.parametrize(
    ("rows", "digests"),
    [
        ([[1, 2, 3, 4]], [8356527653647720045]),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [8356527653647720045, 610383040053763902]),
        ([[5, 6, 7, 8]], [15290973870868887534]),
        ([[0] * 16], [8040990501003754519]),
        ([list(range(16))], [50805424035424587]),
    ],
)
def test_vectors(rows: list[list[int]], digests: list[int]) -> None:
    assert chain_digests(blocks(*rows)) == digests


def test_a_chain_goes_on_from_any_link() -> None:
    whole = chain_digests(blocks([1, 2], [3, 4], [5, 6]))
    first = chain_digests(blocks([1, 2]))
    assert first + chain_digests(blocks([3, 4], [5, 6]), first[-1]) == whole


def test_nothing_gives_no_digests() -> None:
    assert chain_digests(np.zeros((0, 4), np.int32)) == []


def test_digests_do_not_depend_on_width_or_byte_order_of_the_ids() -> None:
    ids = [[1, 2, 3, 49151], [70000, 0, 2**31 - 1, 5]]
    expected = chain_digests(blocks(*ids))
    for dtype in ("<i4", ">i4", "<i8", ">i8"):
        assert chain_digests(np.array(ids, dtype)) == expected


def test_other_interpreters_with_other_hash_seeds_agree() -> None:
    code = (
        "import numpy as np; from kv_manager.hash_chain import *; "
        "print(chain_digests(np.array([[1, 2, 3, 4]], np.int32), namespace_link(b'')), namespace_link(b'model'))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"[8356527653647720045] {namespace_link(b'model')}\n"}


def test_blocks_that_fool_a_polynomial_hash_differ() -> None:
    ids = [5, 100, 200, 7]
    shifted = [5, 100 + 31, 200 - 1, 7]
    assert chain_digests(blocks(ids)) != chain_digests(blocks(shifted))


def test_an_empty_namespace_has_no_link() -> None:
    assert namespace_link(b"") is None
    assert join_namespace() == b""


def test_the_namespace_link_is_pinned() -> None:
    link = namespace_link(b"model")
    assert link == 9179062389569422126
    assert chain_digests(blocks([1, 2, 3, 4]), link) == [17213199533953551238]


def test_namespaces_separate_chains() -> None:
    links = [namespace_link(n) for n in (b"", b"t1", b"t2", b"t", b"t\x00", join_namespace("t", "1"), join_namespace("t1"))]
    digests = [chain_digests(blocks([1, 2, 3, 4]), link)[0] for link in links]
    assert len(set(digests)) == len(digests)


def test_joined_parts_cannot_run_into_one_another() -> None:
    joined = {join_namespace("ab", "c"), join_namespace("a", "bc"), join_namespace("abc"), join_namespace("abc", "")}
    assert len(joined) == 4


def test_no_block_begins_like_a_namespace_link() -> None:
    assert int.from_bytes(NAMESPACE_TAG, "little", signed=True) < 0
