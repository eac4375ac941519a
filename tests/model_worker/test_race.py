"""The race finds the winner of the whole row wherever it comes from: the likely few, or the many that are not."""

import numpy as np
import pytest
from row_maker import sample_rows
from rule_reference import drawn_token

from model_worker.race import LIKELY
from model_worker.sampler import Sampler
from tessera.values.sampling import SamplingParams


@pytest.mark.parametrize("share", [0.99, 0.5, 0.01])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_tokens_that_are_just_not_likely_win_as_often_as_they_should(share: float, temperature: float) -> None:
    """Twenty likely tokens before 20,000 whose likelihood is a `share` of what counts as likely."""
    num_rows, vocab = 150, 20_020
    logits = np.full((num_rows, vocab), np.log(LIKELY * share) * temperature, np.float32)
    logits[:, :20] = np.linspace(-1, 0, 20) * temperature
    params = [SamplingParams(seed=seed, temperature=temperature) for seed in range(num_rows)]
    tokens = Sampler(()).sample(logits, sample_rows(params, [3] * num_rows, vocab)).token_ids.tolist()
    assert tokens == [drawn_token(row.astype(np.float64), own, 3) for row, own in zip(logits, params, strict=True)]
    from_the_many = sum(token >= 20 for token in tokens)
    assert share < 0.1 or 0 < from_the_many < num_rows
