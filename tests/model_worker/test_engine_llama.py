"""The engine around a real Llama gives transformers' greedy tokens, however prompts are cut, batched, shared and resumed."""

from engine_driver import EngineDriver, Row, drop, entry, pairs, swap
from tiny_llama import Pair, reference_greedy

PROMPTS = [[3, 100, 7, 44, 150, 9], [12, 13], [198, 5, 5, 5, 80, 41, 77, 2, 60]]
OUTPUTS = 8


def test_a_batch_of_mixed_lengths(pair: Pair) -> None:
    driver = EngineDriver(pair.ours)
    tables = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11]]
    entries = [entry(slot, ids, tables[slot], str(slot)) for slot, ids in enumerate(PROMPTS)]
    rows = [Row(slot, len(ids), len(ids)) for slot, ids in enumerate(PROMPTS)]
    tokens = [driver.run(rows, entries).token_ids.tolist()]
    for step in range(1, OUTPUTS):
        tokens.append(driver.run([Row(slot, 1, len(ids) + step) for slot, ids in enumerate(PROMPTS)]).token_ids.tolist())
    assert [list(column) for column in zip(*tokens, strict=True)] == [
        reference_greedy(pair.theirs, ids, OUTPUTS) for ids in PROMPTS
    ]


def test_chunks_cached_prefixes_and_a_resumption(pair: Pair) -> None:
    driver = EngineDriver(pair.ours)
    prompt = PROMPTS[2]
    expected = reference_greedy(pair.theirs, prompt, OUTPUTS)
    driver.run([Row(0, 3, 3)], [entry(0, prompt, [0, 1, 2], "a")])
    driver.run([Row(0, 1, 4)])
    tokens = driver.run([Row(0, 5, 9)]).token_ids.tolist()
    tokens += [driver.decode(0, 10), driver.decode(0, 11)]
    # Another request on its first two blocks, beside its own next decode.
    longer = [*prompt[:8], 31, 32]
    output = driver.run([Row(0, 1, 12), Row(1, 2, 10)], [entry(1, longer, [0, 1, 5, 6], "b", cached=8)])
    tokens.append(output.token_ids.tolist()[0])
    assert output.token_ids.tolist()[1:] == reference_greedy(pair.theirs, longer, 1)
    # Preempted and resumed on its cached blocks in another slot.
    resumed = entry(2, prompt + tokens, [0, 1, 2, 9, 10], "a", attempt=2, prompt_len=9, cached=12)
    tokens += driver.run([Row(2, 1, 13)], [resumed], [drop(0, "a")]).token_ids.tolist()
    tokens += [driver.decode(2, 14), driver.decode(2, 15), driver.decode(2, 16)]
    assert tokens == expected


def test_a_swap_in_the_middle_changes_no_token(pair: Pair) -> None:
    """Out after two tokens while another sequence takes its blocks, back in other places beside a decode of that one, and out and in
    again on a prefix that is still there."""
    driver = EngineDriver(pair.ours)
    prompt, other = PROMPTS[2], PROMPTS[0]
    tokens = driver.run([Row(0, 9, 9)], [entry(0, prompt, [0, 1, 2], "a")]).token_ids.tolist()
    tokens.append(driver.decode(0, 10))
    held = driver.kv(0, 1, 2)
    out = swap(0, [6, 5, 4], [(0, 6), (1, 5), (2, 4)], "a")
    output = driver.run([Row(1, 6, 6)], [entry(1, other, [2, 0], "b")], swap_outs=(out,))
    others = output.token_ids.tolist()
    assert driver.kv(6, 5, 4, is_host=True) == held
    output = driver.run([Row(1, 1, 7), Row(0, 1, 11)], swap_ins=(swap(0, [9, 1, 8], [(6, 9), (4, 8)], "a"),))
    others.append(int(output.token_ids[0]))
    tokens += [int(output.token_ids[1]), driver.decode(0, 12)]
    assert driver.kv(9, 1) == held[:2]
    driver.run(swap_outs=(swap(0, [0, 1, 2], [(9, 0), (1, 1), (8, 2)], "a"),))
    others.append(driver.decode(1, 8))
    driver.run(swap_ins=(swap(0, [9, 1, 3, 4], [(2, 3)], "a"),))
    tokens += [driver.decode(0, length) for length in (13, 14, 15, 16)]
    assert tokens == reference_greedy(pair.theirs, prompt, OUTPUTS)
    assert others == reference_greedy(pair.theirs, other, 3)


def test_a_forked_child_goes_on_as_its_parent_does(pair: Pair) -> None:
    driver = EngineDriver(pair.ours)
    prompt = PROMPTS[0]
    parent = driver.run([Row(0, 6, 6)], [entry(0, prompt, [3, 5], "p")]).token_ids.tolist()
    fork = entry(1, prompt, [3, 8], "c", cached=5)
    output = driver.run([Row(0, 1, 7), Row(1, 1, 6)], [fork], copies=pairs((5, 8)))
    parent.append(int(output.token_ids[0]))
    child = [int(output.token_ids[1]), driver.decode(1, 7), driver.decode(1, 8)]
    parent.append(driver.decode(0, 8))
    assert parent == child == reference_greedy(pair.theirs, prompt, 3)
