"""The engine gives the sampler each slot's own parameters and history: resumed, moved, beside others, and after another has left the slot."""

import numpy as np
from engine_driver import PROMPT, VOCAB, EngineDriver, Row, drop, entry
from row_maker import sample_rows

from model_worker.models.deterministic import next_tokens
from model_worker.sampling_table import SamplingTable
from tessera.values.sampling import SamplingParams

FLAT = {"temperature": 100.0}
"""So hot that rules and noise decide, not the model."""
RULED = SamplingParams(
    seed=5,
    presence_penalty=2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.5,
    allowed_token_ids=(4, 5, 6, 7),
    bad_words_ids=((4, 5), (6, 6), (7, 4, 6)),
    min_tokens=3,
    stop_token_ids=(7,),
    **FLAT,
)


def outputs(sampling: SamplingParams, count: int) -> list[int]:
    """Alone, without interruption."""
    driver = EngineDriver()
    tokens = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [0, 1, 2, 3, 4], sampling=sampling)]).token_ids.tolist()
    return tokens + [driver.decode(0, 6 + done) for done in range(1, count)]


def test_a_request_with_every_rule_goes_on_with_the_same_tokens_when_it_is_resumed_beside_others() -> None:
    expected = outputs(RULED, 10)
    assert set(expected) <= {4, 5, 6, 7} and 7 not in expected[:3] and len(set(expected)) > 1
    driver = EngineDriver()
    others = [
        entry(1, [8, 9], [10, 11], "greedy"),
        entry(2, [8, 9], [12, 13], "hot", sampling=SamplingParams(seed=5, logprobs=3, **FLAT)),
    ]
    resumed = entry(3, PROMPT + expected[:4], [0, 1, 2, 3, 4], prompt_len=6, attempt=2, sampling=RULED)
    output = driver.run([Row(1, 2, 2), Row(3, 10, 10), Row(2, 2, 2)], [*others, resumed])
    tokens = [int(output.token_ids[1])]
    for length in range(11, 16):
        tokens.append(int(driver.run([Row(1, 1, length - 8), Row(3, 1, length), Row(2, 1, length - 8)]).token_ids[1]))
    assert tokens == expected[4:]


def test_a_slot_s_next_holder_has_none_of_its_rules() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [0, 1], "a", sampling=RULED)])
    output = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [2, 3], "b")], [drop(0, "a")])
    assert output.token_ids.tolist() == [next_tokens(PROMPT, VOCAB)[0]]


def test_no_list_of_an_earlier_holder_stays_in_the_table() -> None:
    table, fresh = SamplingTable(1, VOCAB), SamplingTable(1, VOCAB)
    everything = SamplingParams(
        seed=1, stop_token_ids=(3,), min_tokens=2, allowed_token_ids=(4,), logit_bias=((5, 1.0),), bad_words_ids=((6,),),
        logprob_token_ids=(7,), logprobs=2, prompt_logprobs=1, top_k=4, repetition_penalty=1.1,
    )  # fmt: skip
    table.set(0, everything)
    for one in (table, fresh):
        one.set(0, SamplingParams(seed=2))
    for name, column in vars(fresh).items():
        found = getattr(table, name)
        assert found.tolist() == column.tolist() if isinstance(column, np.ndarray) else found == column, name


def test_the_table_s_columns_are_what_the_rows_ask_for() -> None:
    rows = sample_rows([SamplingParams(seed=2**63 - 1, top_k=VOCAB, logprob_token_ids=(1,))], [7], VOCAB)
    table = rows.table
    assert int(table.seeds[0]) == 2**63 - 1 and rows.output_indices.tolist() == [7]
    assert table.top_ks.tolist() == [0], "as many as there are is all"
    assert table.logprobs.tolist() == [0] and table.prompt_logprobs.tolist() == [-1]
