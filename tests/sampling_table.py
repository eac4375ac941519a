"""Writes the tables of sampling parameters into docs/sampling.md: `python -m tests.sampling_table`, or `make sampling-table`."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera.v1 import inference_pb2
from tessera.values.sampling import Limit, SamplingParams, plain_number
from tessera.values.sampling_limits import (
    BIAS_LIMIT,
    LIST_LIMITS,
    NUMBER_LIMITS,
    SEQUENCE_IDS_MAX,
    IdsLimit,
    SequencesLimit,
    accepted_params,
    number_verdict,
)

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "sampling.md"
VOCAB = 49152
"""Of the examples; the limits on ids follow the model's own."""


def fields() -> str:
    """One line per field."""
    lines = ["| field | in `tessera.v1` | default | accepted | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, number in NUMBER_LIMITS.items():
        default = "absent" if number.default is None else plain_number(number.default)
        whole = ", whole" if number.integer else ""
        accepted = f"{plain_number(number.minimum)} to {plain_number(number.maximum)}{whole}"
        lines.append(f"| `{name}` | {_public(name)} | {default} | {accepted} | {number.meaning} |")
    for name, limit in LIST_LIMITS.items():
        lines.append(f"| `{name}` | {_public(name)} | empty | {_list_text(limit)} | {limit.meaning} |")
        if name == "logit_bias":
            accepted = f"any finite number, clamped to {plain_number(BIAS_LIMIT.minimum)} to {plain_number(BIAS_LIMIT.maximum)}"
            lines.append(f"| `{name}`, each bias | | | {accepted} | {BIAS_LIMIT.meaning} |")
    return "\n".join(lines)


def _public(name: str) -> str:
    """How clients give a field, by the public message."""
    if name in inference_pb2.Sampling.DESCRIPTOR.fields_by_name:
        return "yes"
    other = {"bad_words_ids": "bad_words"}.get(name)
    assert other is None or other in inference_pb2.Sampling.DESCRIPTOR.fields_by_name
    return "no" if other is None else f"as text, `{other}`"


def _list_text(limit: IdsLimit | SequencesLimit) -> str:
    if isinstance(limit, IdsLimit):
        return f"at most {limit.length_max} ids of the vocabulary" + (", each once" if limit.unique else "")
    return f"at most {limit.length_max} sequences of 1 to {SEQUENCE_IDS_MAX} ids of the vocabulary"


def edges() -> str:
    """What becomes of the values at the edges of every field."""
    lines = ["| field | value | it is |", "| --- | --- | --- |"]
    for name, number in NUMBER_LIMITS.items():
        lines += [f"| `{name}` | {_shown(value)} | {number_verdict(number, value)} |" for value in number_edges(number)]
    lines += [
        f"| `logit_bias`, each bias | {_shown(bias)} | {number_verdict(BIAS_LIMIT, bias)} |"
        for bias in number_edges(BIAS_LIMIT)
    ]
    for name in LIST_LIMITS:
        lines += [f"| `{name}` | {text} | {list_verdict(name, value)} |" for text, value in list_edges(name)]
    return "\n".join(lines)


def number_edges(limit: Limit) -> Iterator[float]:
    """The ends of the range, the numbers next to them outside, and what is no number."""
    step = 1 if limit.integer else 0
    yield limit.minimum - 1 if step else math.nextafter(limit.minimum, -math.inf)
    yield limit.minimum
    yield limit.maximum
    yield limit.maximum + 1 if step else math.nextafter(limit.maximum, math.inf)
    if limit.integer:
        yield limit.minimum + 0.5
    yield math.nan
    yield math.inf


def list_edges(name: str) -> Iterator[tuple[str, Any]]:
    """(in words, value) of the edges of a list."""
    limit = LIST_LIMITS[name]
    yield "empty", ()
    if isinstance(limit, SequencesLimit):
        yield f"{limit.length_max} sequences", ((1,),) * limit.length_max
        yield f"{limit.length_max + 1} sequences", ((1,),) * (limit.length_max + 1)
        yield f"a sequence of {SEQUENCE_IDS_MAX} ids", ((1,) * SEQUENCE_IDS_MAX,)
        yield f"a sequence of {SEQUENCE_IDS_MAX + 1} ids", ((1,) * (SEQUENCE_IDS_MAX + 1),)
        yield "an empty sequence", ((1,), ())
        yield "the last id of the vocabulary", ((VOCAB - 1,),)
        yield "an id that is the vocabulary's size", ((1, VOCAB),)
        yield "the id -1", ((-1,),)
        return
    for text, ids in (
        (f"{limit.length_max} ids", range(limit.length_max)),
        (f"{limit.length_max + 1} ids", range(limit.length_max + 1)),
        ("an id twice", (7, 7)),
        ("the last id of the vocabulary", (VOCAB - 1,)),
        ("an id that is the vocabulary's size", (VOCAB,)),
        ("the id -1", (-1,)),
    ):
        yield text, tuple((token, 1.0) for token in ids) if name == "logit_bias" else tuple(ids)


def list_verdict(name: str, value: Any) -> str:
    """What becomes of a list."""
    accepted = accepted_params(SamplingParams(**{"seed": 0, name: value}), VOCAB)
    return "accepted" if isinstance(accepted, SamplingParams) else "refused"


def _shown(value: float) -> str:
    return plain_number(value) if math.isfinite(value) else str(value)


def with_tables(text: str) -> str:
    """The document with its two tables made anew."""
    for title, table in (("fields", fields()), ("edges", edges())):
        pattern = rf"(<!-- {title} -->\n).*?(\n<!-- end of {title} -->)"
        text, count = re.subn(pattern, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
        assert count == 1, f"{count} tables of {title} in {DOCUMENT}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
