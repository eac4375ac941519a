"""OpenAI's and Anthropic's own clients, through the published smg, get the answers of the public API."""

import threading

import anthropic
import openai
import pytest
from smg_front import REQUESTS_MAX, SmgFront

from tessera.client import ChatMessage, Client
from tests.system.process_stack import MODEL
from tests.system.stream_reader import wait_until

pytestmark = pytest.mark.slow  # half a minute, nearly all of it the start

PROMPT = "Once upon a time in a small village there lived"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "temperature": 0.0, "max_tokens": 12}
LONG = {"model": MODEL, "max_tokens": 8000, "stream": True, "extra_body": {"ignore_eos": True}}


def own_chat(own: Client, messages=MESSAGES, max_tokens=12):
    chat = [ChatMessage(message["role"], message["content"]) for message in messages]
    return own.generate(chat, temperature=0.0, max_tokens=max_tokens)


def test_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_a_completion_streamed_and_whole(openai_client: openai.OpenAI, own: Client) -> None:
    ours = own.generate(PROMPT, temperature=0.0, max_tokens=12)
    whole = openai_client.completions.create(prompt=PROMPT, **GREEDY)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (ours.text, "length")
    usage = ours.finish.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    pieces = list(
        openai_client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert "".join(choice.text for choice in choices) == ours.text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert len(choices) > 4 and pieces[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_chat_streamed_and_whole(openai_client: openai.OpenAI, own: Client) -> None:
    ours = own_chat(own)
    whole = openai_client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ours.text, "length")
    assert whole.usage.prompt_tokens == ours.finish.usage.prompt_tokens, "the same template"
    options = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    pieces = list(openai_client.chat.completions.create(messages=MESSAGES, **options))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == ours.text
    assert pieces[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": pieces[-1].usage.prompt_tokens_details})
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens >= 16, "what was sent before is cached"


def test_log_probabilities(openai_client: openai.OpenAI, own: Client) -> None:
    ours = own.generate(
        [ChatMessage(message["role"], message["content"]) for message in MESSAGES], temperature=0.0, max_tokens=3, logprobs=2
    )
    options = {**GREEDY, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    theirs = openai_client.chat.completions.create(messages=MESSAGES, **options).choices[0].logprobs.content
    assert [item.logprob for item in theirs] == pytest.approx([item.token.logprob for item in ours.logprobs])
    assert [len(item.top_logprobs) for item in theirs] == [2, 2, 2]


def test_a_stop_string(openai_client: openai.OpenAI, own: Client) -> None:
    text = own.generate(PROMPT, temperature=0.0, max_tokens=12).text
    stop = text[8:12]
    cut = openai_client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


def test_responses_streamed_and_whole(openai_client: openai.OpenAI, own: Client) -> None:
    options = {"model": MODEL, "input": MESSAGES, "temperature": 0.0, "max_output_tokens": 12}
    ours = own_chat(own)
    whole = openai_client.responses.create(**options)
    assert (whole.output_text, whole.usage.output_tokens) == (ours.text, 12)
    events = list(openai_client.responses.create(stream=True, **options))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ours.text


def test_anthropic_messages_streamed_and_whole(anthropic_client: anthropic.Anthropic, own: Client) -> None:
    options = {"model": MODEL, "max_tokens": 12, "system": MESSAGES[0]["content"], "messages": MESSAGES[1:]}
    options["extra_body"] = {"temperature": 0.0}
    ours = own_chat(own)
    whole = anthropic_client.messages.create(**options)
    assert (whole.content[0].text, whole.stop_reason, whole.usage.output_tokens) == (ours.text, "max_tokens", 12)
    events = list(anthropic_client.messages.create(stream=True, **options))
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == ours.text


def test_smg_follows_what_is_cached(front: SmgFront, openai_client: openai.OpenAI) -> None:
    """Two rounds of one prompt; smg counts what it was told, and what it could not follow."""

    def count(name: str) -> float:
        lines = [line.split() for line in front.metrics().splitlines() if line.startswith(f"smg_kv_{name}")]
        assert lines, f"smg does not count {name}"
        return sum(float(value) for *_, value in lines)

    stored = f'event_blocks_total{{worker="grpc://{front.engine_address}",op="stored"'
    before = count(stored)
    asked = {**GREEDY, "prompt": "What smg is told of lies behind the engine's port. " * 8}
    cold, warm = (openai_client.completions.create(**asked).usage for _ in range(2))
    num_blocks = cold.prompt_tokens // 16
    assert warm.prompt_tokens_details.cached_tokens >= 16 * (num_blocks - 1) > 64
    wait_until(lambda: count(stored) >= before + num_blocks, "smg has heard of it")
    assert count("index_blocks") >= num_blocks
    for unsound in ("event_gaps_total", "event_missed_batches_total", "event_parentless_blocks_total"):
        assert count(unsound) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2}, "sampling_params.n"),
        ({"response_format": {"type": "json_object"}}, "sampling_params.json"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"extra_body": {"stop_token_ids": [99999]}}, r"sampling_params.stop_token_ids\[0\]"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "again " * 9000}]}, "maximum context length"),
    ],
)
def test_bad_input_is_400_and_says_why(openai_client: openai.OpenAI, options: dict[str, object], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        openai_client.chat.completions.create(**{"messages": MESSAGES, "model": MODEL, "max_tokens": 4, **options})


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_ends_its_request(front: SmgFront, openai_client: openai.OpenAI, stream: bool) -> None:
    wait_until(front.is_settled, "nothing runs")
    before = front.num_ended("aborted")
    if stream:
        with openai_client.completions.create(prompt=PROMPT, **LONG) as pieces:
            next(iter(pieces))
    else:
        with pytest.raises(openai.APITimeoutError):
            openai_client.completions.create(prompt=PROMPT, timeout=0.5, **{**LONG, "stream": False})
    wait_until(lambda: front.num_ended("aborted") == before + 1, "the scheduler has aborted it")


def test_too_many_at_once_are_429_and_the_others_go_on(front: SmgFront, openai_client: openai.OpenAI) -> None:
    answers = []

    def ask() -> None:
        answers.append(openai_client.completions.create(prompt=PROMPT, **GREEDY).usage.completion_tokens)

    wait_until(front.is_settled, "nothing runs")
    threads = [threading.Thread(target=ask) for _ in range(REQUESTS_MAX)]
    front.stack.worker.freeze()
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: front.active_requests() == REQUESTS_MAX, "all are admitted")
        with pytest.raises(openai.RateLimitError, match="at most 4 may be"):
            openai_client.completions.create(prompt=PROMPT, **GREEDY)
    finally:
        front.stack.worker.thaw()
        for thread in threads:
            thread.join()
    assert answers == [12] * REQUESTS_MAX


def test_a_gateway_that_was_killed_is_found_again(front: SmgFront, openai_client: openai.OpenAI) -> None:
    gateway = front.stack.gateway
    gateway.kill()
    with pytest.raises(openai.InternalServerError, match="503"):
        openai_client.completions.create(prompt=PROMPT, **GREEDY)
    gateway.start()
    gateway.wait_ready()

    def answered() -> bool:
        try:
            return openai_client.completions.create(prompt=PROMPT, **GREEDY).usage.completion_tokens == 12
        except openai.InternalServerError:
            return False

    wait_until(answered, "smg has found the gateway")
