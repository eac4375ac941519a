"""Ratios to the best peer: who may be compared with whom, in which rounds, and who need not run again."""

from tests.benchmarks.peers.ratios import Rate, Ratio, has_lost, ratio_to_best, ratios

EXACT = Rate("exact", 32, (100.0, 110.0, 90.0))
HALF = Rate("half", 16, (120.0, 150.0, 100.0))
BYTE = Rate("byte", 8, (300.0, 310.0, 290.0))


def test_the_best_is_the_one_with_the_highest_median() -> None:
    ours = Rate("ours", 16, (240.0, 300.0, 250.0))
    assert ratio_to_best(ours, [EXACT, HALF, BYTE], bits_min=16) == Ratio(250 / 120, 2.0, 2.5, "ours", "half")


def test_a_peer_with_fewer_bits_is_no_match() -> None:
    ours = Rate("ours", 32, (100.0, 110.0, 90.0))
    best = ratio_to_best(ours, [BYTE, HALF, EXACT], bits_min=32)
    assert best is not None and (best.peer, best.ratio) == ("exact", 1.0)
    assert ratio_to_best(ours, [BYTE, HALF], bits_min=32) is None


def test_every_precision_of_ours_has_its_class() -> None:
    ours = [Rate(name, bits, (600.0,) * 3) for name, bits in (("f32", 32), ("f16", 16), ("int8", 8))]
    told = ratios(ours, [EXACT, HALF, BYTE])
    assert {name: (of["ours"], of["peer"], of["ratio"]) for name, of in told.items()} == {
        "f32": ("f32", "exact", 6.0),
        "16 bits or more": ("f16", "half", 5.0),
        "any precision": ("int8", "byte", 2.0),
    }


def test_of_two_of_ours_with_16_bits_the_faster_counts() -> None:
    ours = [Rate("f16", 16, (200.0,) * 3), Rate("bf16", 16, (300.0,) * 3)]
    assert ratios(ours, [HALF])["16 bits or more"]["ours"] == "bf16"


def test_a_precision_that_did_not_run_is_left_out() -> None:
    assert list(ratios([Rate("f16", 16, (1.0,) * 3)], [EXACT])) == ["16 bits or more"]
    assert ratios([Rate("f16", 16, (1.0,) * 3)], [BYTE]) == {}


def test_who_has_less_than_half_of_the_best_of_its_class_has_lost() -> None:
    slow = Rate("slow", 32, (49.0,))
    assert has_lost(slow, [slow, EXACT])
    assert not has_lost(Rate("slow", 32, (51.0,)), [slow, EXACT])
    assert not has_lost(slow, [slow, BYTE, HALF]), "it is still the best of those as exact"
    assert has_lost(Rate("coarse", 8, (140.0,)), [EXACT, BYTE]), "who is coarse competes with all"


def test_who_did_not_run_all_rounds_is_no_match() -> None:
    ours = Rate("ours", 32, (100.0, 110.0, 90.0))
    best = ratio_to_best(ours, [Rate("once", 32, (500.0,)), EXACT], bits_min=32)
    assert best is not None and best.peer == "exact"
