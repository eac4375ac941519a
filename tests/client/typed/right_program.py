"""A user's program with every public name of the client, as `mypy --strict` is to accept it. Never run."""

from collections.abc import AsyncIterator, Iterator, Sequence

from tessera.client import (
    AccessDenied,
    AdminClient,
    AlreadyExists,
    Answer,
    AsyncClient,
    ChatMessage,
    ChatOptions,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    Finish,
    FinishReason,
    GenerateOptions,
    InternalError,
    InvalidArgument,
    Model,
    NotFound,
    Overloaded,
    Piece,
    Prompt,
    RequestAborted,
    TesseraError,
    Timings,
    Tls,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    Unavailable,
    Usage,
)
from tessera.client.admin import CacheReset, RequestInfo, RequestState, Stats, WorkerState

TLS = Tls(ca="ca.pem", cert="me.pem", key="me.key", server_name="gateway")

CALL = ToolCall("weather", {"place": "Oslo"}, id="1")
CHAT: Sequence[ChatMessage] = [
    ChatMessage("system", "Be brief."),
    ChatMessage("assistant", "", tool_calls=[CALL]),
    ChatMessage("tool", "12 degrees", tool_call_id="1"),
]
PROMPTS: list[Prompt] = ["text", [1, 2, 3], CHAT]

TOOLS: ChatOptions = {"tools": [{"type": "function"}], "template_args": {"thinking": False}}
OPTIONS: GenerateOptions = {
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["\n"],
    "logit_bias": {4: 1.0},
    "logprobs": 2,
    "timeout_s": 3.0,
    "max_queue_ms": 100,
    "cache_salt": "mine",
    "priority": -1,
}


def told(piece: Piece) -> str:
    finish: Finish | None = piece.finish
    if finish is None:
        return piece.text
    usage: Usage = finish.usage
    timings: Timings = finish.timings
    reason: FinishReason = finish.reason
    ids: tuple[int, ...] = piece.token_ids
    end = reason.value if finish.is_whole else finish.message
    return f"{end} {usage.cached_tokens + timings.ttft_us + len(ids)} {finish.stop_string or finish.stop_token_id}"


def likely(logprobs: Sequence[TokenLogprobs]) -> Iterator[float]:
    for one in logprobs:
        token: TokenLogprob | None = one.token
        yield token.logprob if token is not None else one.top[0].logprob


def blocking() -> str:
    with Client(["a:1", "b:2"], resume_timeout_s=5.0, retry_overloaded=True, tls=TLS, token="t") as client:
        for prompt in PROMPTS:
            answer: Answer = client.generate(prompt, **OPTIONS)
            several: list[Answer] = client.generate_several(prompt, 3, seed=4, top_k=5)
            text = answer.text + several[0].text + str(sum(likely(answer.logprobs)))
        pieces: Iterator[Piece] = client.stream(CHAT, **TOOLS, request_id="mine")
        text += "".join(told(piece) for piece in pieces)
        client.abort("mine")
        ids: tuple[int, ...] = client.tokenize(CHAT, model="m", tools=[{"type": "function"}])
        model: Model = client.model()
        models: list[Model] = client.models()
        return client.detokenize(ids, skip_special_tokens=False) + model.name + str(models[0].bos_token_id)


async def asynchronous() -> str:
    async with AsyncClient("a:1,b:2", tls=TLS) as client:
        answer: Answer = await client.generate("x", **OPTIONS)
        several: list[Answer] = await client.generate_several("x", 2)
        pieces: AsyncIterator[Piece] = client.stream([1, 2], ignore_eos=True)
        text = "".join([told(piece) async for piece in pieces])
        await client.abort(answer.request_id)
        ids: tuple[int, ...] = await client.tokenize("text", add_special_tokens=False)
        model: Model = await client.model("m")
        models: list[Model] = await client.models()
        await client.close()
        return text + await client.detokenize(ids) + model.name + str(models) + several[0].text


def administration() -> str:
    with AdminClient(["a:1", "b:2"], tls=TLS, token="t") as client:
        stats: Stats = client.stats()
        workers = [worker.address for worker in stats.load.workers if worker.state is WorkerState.SERVING]
        requests: list[RequestInfo] = client.requests(limit=5)
        waiting = [request.id for request in requests if request.state is RequestState.WAITING]
        count: int = client.abort(waiting[0]) + client.abort(principal="me")
        reset: CacheReset = client.reset_prefix_cache()
        client.pause_admission()
        client.resume_admission()
        count += client.drain_worker(workers[0]) + reset.num_forgotten_blocks
        client.undrain_worker(workers[0])
        return f"{stats.model} {count}"


def named(error: TesseraError) -> str:
    match error:
        case InvalidArgument():
            return ", ".join(f"{field}: {why}" for field, why in error.details.fields.items())
        case Overloaded() | Unavailable():
            wait_ms: int | None = error.details.retry_after_ms
            return f"{error.retryable} {wait_ms}"
        case AccessDenied() | AlreadyExists() | DeadlineExceeded() | FailedPrecondition():
            return error.details.reason
        case InternalError() | NotFound() | RequestAborted():
            return f"{error.request_id} {error.received_tokens} {error.code.name}"
        case _:
            return error.message
