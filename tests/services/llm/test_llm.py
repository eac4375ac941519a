"""A model in this process: batches, streams, stops, aborts, and the example."""

import runpy
from pathlib import Path

import pytest

from gateway.delta import Delta
from gateway.errors import InvalidRequest
from gateway.generate_input import GenerateInput, LimitsInput, SamplingInput
from services.llm import LLM, Completion, NotAdmitted
from services.worker.config import WorkerConfig
from tessera.values.config import Config
from tessera.values.finish import FinishReason

MODEL = "deterministic:SmolLM2-135M-Instruct"
GREEDY = SamplingInput(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = WorkerConfig(MODEL, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_bytes=1 << 20)
    return LLM(config, Config(max_num_seqs=4, max_num_batched_tokens=32, max_queued_requests=8))


def test_a_batch_gives_what_its_prompts_give_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [len(item.token_ids) for item in together] == [6, 6, 6]
    assert all(item.finish is not None and item.finish.reason is FinishReason.MAX_TOKENS for item in together)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [(item.text, item.token_ids) for item in alone] == [(item.text, item.token_ids) for item in together]
    assert alone[0].token_ids != alone[1].token_ids
    assert llm.get_num_unfinished_requests() == 0


def test_each_prompt_can_have_its_own_sampling(llm: LLM) -> None:
    given = [SamplingInput(max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(item.token_ids) for item in llm.generate(PROMPTS, given)] == [1, 2, 3]


def test_steps_stream_and_the_pieces_are_the_whole(llm: LLM) -> None:
    pieces: list[Delta] = []
    request_id = llm.add_request(GenerateInput(PROMPTS[0], sampling=GREEDY), lambda _, delta: pieces.append(delta))
    told: list[Completion] = []
    while llm.has_unfinished_requests():
        told += llm.step()
    assert {item.request_id for item in told} == {request_id}
    assert len(pieces) == len(told) > 1
    assert "".join(piece.text for piece in pieces) == told[-1].text == llm.generate(PROMPTS[:1], GREEDY)[0].text
    assert told[-1].timings is not None and told[-1].timings.total_us > 0


def test_a_stop_string_ends_a_request(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[:1], GREEDY)[0].text
    asked = GenerateInput(PROMPTS[0], sampling=GREEDY, stop=(whole[1:3],))
    llm.add_request(asked)
    while llm.has_unfinished_requests():
        told = llm.step()
    assert told[-1].text == whole[: whole.index(whole[1:3])]
    assert told[-1].finish is not None and told[-1].finish.stop_string == whole[1:3]


def test_what_is_aborted_is_told_of_no_more(llm: LLM) -> None:
    request_id = llm.add_request(GenerateInput("Hi", sampling=SamplingInput(max_tokens=1000, ignore_eos=True)))
    llm.step()
    assert llm.get_num_unfinished_requests() == 1
    llm.abort_request(request_id)
    llm.abort_request(request_id)
    assert llm.step() == [] and not llm.has_unfinished_requests()


def test_wrong_and_too_many_requests_are_refused_and_leave_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        llm.generate(PROMPTS, SamplingInput(top_p=2))
    with pytest.raises(NotAdmitted, match="queued"):
        llm.generate(["Hi"] * 40, GREEDY)
    assert not llm.has_unfinished_requests()


def test_a_limit_ends_a_request(llm: LLM) -> None:
    sampling = SamplingInput(max_tokens=1000, ignore_eos=True)
    llm.add_request(GenerateInput("Hi", sampling=sampling, limits=LimitsInput(max_total_ms=1)))
    while llm.has_unfinished_requests():
        told = llm.step()
    assert told[-1].finish is not None and told[-1].finish.limit == "max_total_ms"


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["in_process.py", MODEL])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "in_process.py"), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 2
