"""The tokenizer digest: equal for equal tokenizers, different for any change."""

from tessera.values.tokenizer_digest import gguf_tokenizer_digest, tokenizer_json_digest


def test_a_json_file_is_its_bytes() -> None:
    assert tokenizer_json_digest(b"{}") == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_gguf_digests_differ_by_any_part_and_its_place() -> None:
    inputs = [
        (["a", "b"], ["a b"], [1, 1], "smollm"),
        (["b", "a"], ["a b"], [1, 1], "smollm"),
        (["ab"], ["a b"], [1, 1], "smollm"),
        (["a", "b"], ["a b"], [1, 3], "smollm"),
        (["a", "b"], ["a b"], [1], "smollm"),
        (["a", "b"], [], [1, 1], "smollm"),
        (["a", "b", "a b"], [], [1, 1], "smollm"),
        (["a", "b"], ["a b"], [1, 1], ""),
        (["a"], ["b", "a b"], [1, 1], "smollm"),
    ]
    digests = [gguf_tokenizer_digest(*each) for each in inputs]
    assert len(set(digests)) == len(inputs)
    assert digests == [gguf_tokenizer_digest(*each) for each in inputs]


def test_the_gguf_digest_stays_what_it_was() -> None:
    """Gateways and workers of different releases must agree."""
    assert (
        gguf_tokenizer_digest(["a", "ü"], ["a ü"], [1, 3], "smollm")
        == "73d84d66cbb7c003f0ce06cb2d05bcc8e29d84452b0a0f09f636ca04690af508"
    )
