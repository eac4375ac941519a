"""The engine around a real Llama gives transformers' greedy tokens, however prompts are cut, batched, shared and resumed."""

from engine_driver import EngineDriver, Row, drop, entry
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
