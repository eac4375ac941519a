"""How many tokens a request may come to, its prompt and all its answers together, which share the prompt."""

from tessera.values.request import Submission


def output_tokens_max(submission: Submission, max_model_len: int) -> int:
    """Of one answer."""
    return max(0, min(submission.sampling.max_tokens, max_model_len - len(submission.prompt_token_ids)))


def least_tokens(max_tokens: int, count: int, max_model_len: int) -> int:
    """Of `count` answers, whatever the prompt is: told before it is read."""
    whole = max_model_len - 1
    return min(1 + count * min(max_tokens, whole), whole + count)
