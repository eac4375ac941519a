"""What people read of the options of speculation, which a worker and `tessera up` share."""

from services.cli.config_options import Text
from services.worker.config import PROPOSERS, VERIFICATIONS

SPECULATION_TEXTS = {
    "num_speculative_tokens": Text(
        "Speculation: most tokens guessed ahead of one answer and verified in the same step. 0 is off.",
        "COUNT",
    ),
    "proposer": Text(
        "Who guesses: ngram takes what followed the last few tokens when they came before, in the prompt or in the answer; mtp are layers "
        "of the model itself (DeepSeek-V3, V3.2, GLM-4-MoE); draft_model is a smaller model with the same vocabulary; eagle is "
        "an EAGLE or EAGLE-3 head made for the model.",
        choices=PROPOSERS,
    ),
    "draft_model": Text(
        "What the proposer loads. draft_model: a known name, a directory or a .gguf file; eagle: the head's directory (config.json, *.safetensors).",
        "MODEL",
    ),
    "ngram_min": Text("The fewest last tokens that must have come before, 1 or more.", "TOKENS"),
    "ngram_max": Text("The most last tokens that are compared, at least ngram-min; longer matches go first.", "TOKENS"),
    "verification": Text(
        "Which guesses stand. coupled: those that are the model's own token, so that the output is the same. rejection: by rejection sampling; "
        "the tokens drawn then depend on the guesses, a seed repeats them only under the same conditions, and their distribution is the same.",
        choices=VERIFICATIONS,
    ),
}
