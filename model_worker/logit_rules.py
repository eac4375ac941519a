"""Rules that change logits before a token is drawn: masks, bias, penalties, in vLLM's order, which docs/sampling.md tells.

Each takes time for the rows that use it alone, and touches only the ids that it names: (row, id) pairs of all such rows at once. So a row's
logits do not depend on the others.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from model_worker.sample_rows import SampleRows
from model_worker.sampling_table import NO_ID

RULED_OUT = np.float32(-np.inf)


def apply_rules(logits: np.ndarray, rows: SampleRows, eos_token_ids: np.ndarray) -> None:
    """Change `logits`, float32 `[N, vocab]`, C-contiguous and finite, in place. `eos_token_ids` int64, below the vocabulary size."""
    flat = logits.reshape(-1)
    assert np.shares_memory(flat, logits)
    vocab_size, slots = logits.shape[1], rows.slots.tolist()

    def pairs(using: Sequence[int], ids: Iterable[np.ndarray]) -> np.ndarray:
        """Places in `flat` of the ids that go with each of the rows `using`."""
        lists = list(ids)
        firsts = np.array(using, np.int64) * vocab_size
        places: np.ndarray = np.repeat(firsts, [len(ids) for ids in lists]) + np.concatenate(lists)
        return places

    table = rows.table
    using = [row for row, slot in enumerate(slots) if slot in table.allowed_ids]
    if using:
        allowed = pairs(using, [table.allowed_ids[slots[row]] for row in using])
        kept = flat[allowed]
        logits[using] = RULED_OUT
        flat[allowed] = kept
    using = [row for row, slot in enumerate(slots) if slot in table.bad_words]
    if using:
        flat[_bad_words(rows, using, vocab_size)] = RULED_OUT
    using = np.flatnonzero(rows.output_indices < table.min_tokens[rows.slots]).tolist()
    if using:
        logits[np.array(using)[:, None], eos_token_ids] = RULED_OUT
        flat[pairs(using, [table.stop_ids[slots[row]] for row in using])] = RULED_OUT
    using = [row for row, slot in enumerate(slots) if slot in table.biases]
    if using:
        biases = [table.biases[slots[row]] for row in using]
        flat[pairs(using, [ids for ids, _ in biases])] += np.concatenate([bias for _, bias in biases])
    penalised = np.flatnonzero(table.penalised[rows.slots])
    if len(penalised):
        _penalise(flat, rows, penalised, vocab_size)


def _bad_words(rows: SampleRows, using: list[int], vocab_size: int) -> np.ndarray:
    """Places in the flat logits of the last ids of the words that the outputs of the rows `using` end with, but for that id."""
    words = [rows.table.bad_words[slot] for slot in rows.slots[using].tolist()]
    word_rows = np.repeat(using, [len(word.last) for word in words])
    prefixes = np.concatenate([word.prefixes for word in words])
    width = int((prefixes != NO_ID).sum(axis=1).max())
    prefixes = prefixes[:, prefixes.shape[1] - width :]
    positions = rows.history_lens[:, None] + np.arange(-width, 0)
    # In front of the output lies nothing that a word could begin with.
    is_output = positions >= rows.prompt_lens[:, None]
    ends = np.where(is_output, rows.token_ids[rows.slots[:, None], np.maximum(positions, 0)], NO_ID)
    matches = ((prefixes == NO_ID) | (prefixes == ends[word_rows])).all(axis=1)
    last = np.concatenate([word.last for word in words])
    places: np.ndarray = word_rows[matches] * vocab_size + last[matches]
    return places


def _penalise(flat: np.ndarray, rows: SampleRows, penalised: np.ndarray, vocab_size: int) -> None:
    """Repetition over prompt and output (positive logits divided, others multiplied), then frequency and presence over the output."""
    slots, prompt_lens = rows.slots[penalised], rows.prompt_lens[penalised]
    repetition = rows.table.repetition[slots]
    starts = np.where(repetition == 1, prompt_lens, 0)
    counts = rows.history_lens[penalised] - starts
    if not counts.any():
        return
    place = np.repeat(np.arange(len(penalised)), counts)
    positions = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[place]
    is_output = positions >= prompt_lens[place]
    # One number per id of a history, sorted: equal (row, id) pairs lie together, and the lowest bit counts those of the output.
    numbers = (place * vocab_size + rows.token_ids[slots[place], positions]) * 2 + is_output
    numbers.sort()
    pairs = numbers >> 1
    firsts = np.flatnonzero(np.concatenate(([True], pairs[1:] != pairs[:-1])))
    times = np.add.reduceat(numbers & 1, firsts).astype(np.float32)
    place, token_ids = np.divmod(pairs[firsts], vocab_size)
    at = penalised[place] * vocab_size + token_ids
    logits = flat[at]
    logits = np.where(logits > 0, logits / repetition[place], logits * repetition[place])
    logits -= rows.table.frequency[slots][place] * times
    logits -= rows.table.presence[slots][place] * (times > 0)
    flat[at] = logits
