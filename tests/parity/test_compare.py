"""The comparison itself: what counts as a near tie, and that nothing behind a difference goes unseen."""

from tests.parity.compare import NEAR_TIE_GAP, Differences, compare
from tests.parity.reference import Expected

PROMPTS = [[7, 8], [9]]
EXPECTED = [
    Expected([1, 2, 3, 4], [11, 12, 13, 14], [1.0, NEAR_TIE_GAP, 2 * NEAR_TIE_GAP, 0.0]),
    Expected([5, 6], [15, 16], [1.0, 1.0]),
]
TRUTH = {(7, 8): [1, 2, 3, 4], (9,): [5, 6]}


def generator(wrong: dict[tuple[int, ...], int], calls: list[list[int]]):
    """Says the truth, except that behind the ids in `wrong` it says another token, and only zeros from there on."""

    def generate(starts: list[list[int]], counts: list[int]) -> list[list[int]]:
        outputs = []
        for start, count in zip(starts, counts, strict=True):
            calls.append(start)
            prompt = next(p for p in TRUTH if tuple(start[: len(p)]) == p)
            ids, output = list(start), []
            truth = TRUTH[prompt][len(start) - len(prompt) :]
            derailed = False
            for token in truth[:count]:
                said = 0 if derailed else wrong.get(tuple(ids), token)
                derailed |= said != token
                output.append(said)
                ids.append(said)
            outputs.append(output)
        return outputs

    return generate


def test_equal_outputs_take_one_pass() -> None:
    calls: list[list[int]] = []
    assert compare(PROMPTS, EXPECTED, generator({}, calls)) == Differences()
    assert calls == PROMPTS


def test_a_near_tie_is_forced_past() -> None:
    calls: list[list[int]] = []
    found = compare(PROMPTS, EXPECTED, generator({(7, 8, 1): 12}, calls))
    assert found == Differences(near_ties={(0, 1)})
    assert calls == [[7, 8], [9], [7, 8, 1, 2]]


def test_another_token_than_the_second_best_is_no_tie() -> None:
    assert compare(PROMPTS, EXPECTED, generator({(7, 8, 1): 99}, [])) == Differences(mismatches={(0, 1)})


def test_a_wider_gap_is_no_tie() -> None:
    assert compare(PROMPTS, EXPECTED, generator({(7, 8, 1, 2): 13}, [])) == Differences(mismatches={(0, 2)})


def test_differences_behind_differences_are_found() -> None:
    wrong = {(7, 8): 11, (7, 8, 1): 12, (7, 8, 1, 2, 3): 14, (9, 5): 16}
    found = compare(PROMPTS, EXPECTED, generator(wrong, []))
    assert found == Differences(near_ties={(0, 1), (0, 3)}, mismatches={(0, 0), (1, 1)})
