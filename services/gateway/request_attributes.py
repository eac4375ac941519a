"""What the span of a call says of its request, under OpenTelemetry's names for generative models and those that vLLM added. No text."""

from collections.abc import Sequence

from gateway.delta import Delta
from services.rpc.call_span import is_traced, tell_span
from tessera.values.request import Submission


def tell_request(submission: Submission, model: str, num_answers: int) -> None:
    """What was asked; a no-op for a call that is not traced."""
    if not is_traced():
        return
    sampling = submission.sampling
    tell_span(
        {
            "gen_ai.request.model": model,
            "gen_ai.request.id": submission.client_request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": num_answers,
            "gen_ai.usage.input_tokens": len(submission.prompt_token_ids),
            "tessera.request_id": submission.request_id.hex(),
        }
    )


def tell_answers(ends: Sequence[Delta]) -> None:
    """What has come of it, from the last piece of each answer; times are those of the first, seconds. A no-op for a call that is not
    traced."""
    if not is_traced() or not ends:
        return
    finishes = [end.finish for end in ends if end.finish is not None]
    reasons = [end.public_reason.name.lower() for end in ends if end.public_reason is not None]
    tell_span(
        {
            "gen_ai.usage.output_tokens": sum(finish.output_len for finish in finishes),
            "gen_ai.usage.cache_read.input_tokens": ends[0].num_cached_tokens,
            "gen_ai.response.finish_reasons": reasons,
        }
    )
    if (timings := ends[0].timings) is not None:
        tell_span(
            {
                "gen_ai.latency.time_in_queue": timings.queue_us / 1e6,
                "gen_ai.latency.time_to_first_token": timings.ttft_us / 1e6,
                "gen_ai.latency.time_in_model_prefill": max(0, timings.ttft_us - timings.queue_us) / 1e6,
                "gen_ai.latency.time_in_model_decode": max(0, timings.total_us - timings.ttft_us) / 1e6,
                "gen_ai.latency.time_in_model_inference": max(0, timings.total_us - timings.queue_us) / 1e6,
                "gen_ai.latency.e2e": timings.total_us / 1e6,
            }
        )
