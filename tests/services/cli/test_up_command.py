"""What `tessera up` refuses before it starts anything, and what it tells its parts."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.cli.data_folder import DataFolder
from services.cli.local_system import local_parts, local_url
from services.cli.main import main
from services.cli.public_access import PublicAccess
from services.cli.up_command import how_to_go_on
from services.cli.up_config import UpConfig
from services.worker.config import SpeculationConfig


def up(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["up", *arguments])


def test_a_data_folder_in_use_is_an_error(tmp_path: Path) -> None:
    with DataFolder(tmp_path).lock():
        result = up("--data", str(tmp_path))
    assert result.exit_code == 1
    assert f"data folder {tmp_path} is in use by another `tessera up` (process " in result.output


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        result = up("--data", str(tmp_path), "--listen", address)
    assert result.exit_code == 1
    assert f"cannot listen on {address}" in result.output and "--listen HOST:PORT" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--listen", "50051"), "--listen must be host:port"),
        (("--http", "8000"), "--http must be host:port"),
        (("--listen", "127.0.0.1:0"), "--listen must be host:port with a port from 1 to 65535"),
        (("--start-timeout-s", "0"), "--start-timeout-s must be positive"),
        (("--otlp-endpoint", "localhost:4317"), "--otlp-endpoint must be http://HOST:PORT, or https://HOST:PORT"),
        (("--tls-key", __file__), "--tls-cert and --tls-key go together: give both or neither"),
        (("--tls-name", "llm.example"), "--tls-name is given, but no --tls-cert that says it"),
        (("--tokens", "gone"), "--tokens gone is no file"),
        (("--token-file", __file__), "--token-file is given, but no file of tokens: nobody asks for one"),
        (("--tokens", __file__), "--tokens are given, but no --token-file to ask the question with"),
        (("--trace-sample-ratio", "2"), "--trace-sample-ratio must be from 0 to 1, got 2"),
        (("--once", "--prompt", ""), "--once ends after the answer, so it needs a prompt"),
        (("--num-speculative-tokens", "1000"), "--num-speculative-tokens must be at most 31, got 1000"),
        (
            ("--proposer", "draft_model"),
            "--draft-model must say what proposer draft_model is to load",
        ),
        (
            ("--draft-model", "x"),
            "--draft-model is given, but proposer ngram takes none: set proposer to draft_model or eagle",
        ),
        (("--ngram-min", "5"), "--ngram-max (4) must be at least --ngram-min (5): raise it, or lower --ngram-min"),
    ],
)
def test_a_bad_option_is_a_usage_error(arguments: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    result = up("--data", str(tmp_path / "untouched"), *arguments)
    assert result.exit_code == 2 and complaint in result.output
    assert not (tmp_path / "untouched").exists()


def test_the_worker_alone_is_told_of_its_ranks(tmp_path: Path) -> None:
    parts = local_parts(UpConfig(tensor_parallel_size=3, redis_url="redis://127.0.0.1:1/0"), DataFolder(tmp_path))
    commands = {part.name: part._spec.command for part in parts}
    at = commands["worker"].index("--tensor-parallel-size")
    assert commands["worker"][at + 1] == "3"
    assert all("--tensor-parallel-size" not in command for name, command in commands.items() if name != "worker")


def test_an_http_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, socket.create_server(("127.0.0.1", 0)) as free:
        port, listen = stranger.getsockname()[1], f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        result = up("--data", str(tmp_path), "--listen", listen, "--http", f"127.0.0.1:{port}")
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.output and "--http HOST:PORT" in result.output


def test_without_smg_http_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.http_part.importlib.util.find_spec", lambda name: None)
    result = up("--data", str(tmp_path / "untouched"), "--http", "127.0.0.1:8000")
    assert result.exit_code == 1 and "--http needs smg and its protocol: run `pip install" in result.output
    assert not (tmp_path / "untouched").exists()


def test_smg_stands_before_the_engine_port_of_the_gateway(tmp_path: Path) -> None:
    for folder in ("logs", "run"):
        (tmp_path / folder).mkdir()
    redis_url = "redis://127.0.0.1:1/0"
    assert local_parts(UpConfig(redis_url=redis_url), DataFolder(tmp_path))[0].name == "gateway"
    parts = local_parts(UpConfig(redis_url=redis_url, http="0.0.0.0:8000"), DataFolder(tmp_path))
    assert [part.name for part in parts] == ["http", "gateway", "scheduler", "worker"], "in the order in which they end"
    front, gateway = (part._spec.command for part in parts[:2])
    engine = gateway[gateway.index("--engine-listen") + 1]
    assert front[front.index("--worker-urls") + 1] == f"grpc://{engine}"
    assert front[front.index("--host") + 1 : front.index("--host") + 4] == ("0.0.0.0", "--port", "8000")


@pytest.mark.parametrize(
    ("address", "url"),
    [("127.0.0.1:1", "http://127.0.0.1:1"), ("0.0.0.0:80", "http://127.0.0.1:80"), ("[::]:80", "http://[::1]:80")],
)
def test_a_url_is_one_that_this_machine_can_reach(address: str, url: str) -> None:
    assert local_url(address) == url


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_worker_alone_is_told_to_be_batch_invariant(batch_invariant: bool, tmp_path: Path) -> None:
    parts = local_parts(UpConfig(batch_invariant=batch_invariant, redis_url="redis://127.0.0.1:1/0"), DataFolder(tmp_path))
    told = {part.name for part in parts if "--batch-invariant" in part._spec.command}
    assert told == ({"worker"} if batch_invariant else set())


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_speculation_is_an_option_of_scheduler_and_worker(num_drafts: int, tmp_path: Path) -> None:
    speculation = SpeculationConfig(num_drafts, ngram_max=5) if num_drafts else SpeculationConfig()
    config = UpConfig(redis_url="redis://127.0.0.1:1/0", speculation=speculation)
    commands = {part.name: " ".join(part._spec.command) for part in local_parts(config, DataFolder(tmp_path))}
    asked = " --num-speculative-tokens 4"
    assert [asked in commands[role] for role in ("gateway", "scheduler", "worker")] == [False, *[num_drafts > 0] * 2]
    assert (f"{asked} --proposer ngram --ngram-min 2 --ngram-max 5" in commands["worker"]) == (num_drafts > 0)


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:4317"])
def test_every_part_sends_its_spans_to_the_same_place(endpoint: str, tmp_path: Path) -> None:
    config = UpConfig(redis_url="redis://127.0.0.1:1/0", otlp_endpoint=endpoint, trace_sample_ratio=0.5)
    commands = {part.name: " ".join(part._spec.command) for part in local_parts(config, DataFolder(tmp_path))}
    assert {role for role in commands if f" --otlp-endpoint {endpoint}" in commands[role]} == (
        set(commands) if endpoint else set()
    )
    assert {role for role in commands if " --trace-sample-ratio 0.5" in commands[role]} == ({"gateway"} if endpoint else set())


def test_the_gateway_alone_is_told_of_certificate_and_tokens(tmp_path: Path) -> None:
    for name in ("cert", "key", "tokens", "mine"):
        (tmp_path / name).write_text("x")
    public = PublicAccess(tmp_path / "cert", tmp_path / "key", "", tmp_path / "tokens", tmp_path / "mine")
    parts = local_parts(UpConfig(redis_url="redis://127.0.0.1:1/0", public=public), DataFolder(tmp_path))
    commands = {part.name: " ".join(part._spec.command) for part in parts}
    told = f" --tls-cert {tmp_path}/cert --tls-key {tmp_path}/key --tokens {tmp_path}/tokens"
    assert {role for role in commands if told in commands[role]} == {"gateway"}
    assert not any(f"{tmp_path}/mine" in command for command in commands.values()), "the token is the question's own"


def test_the_last_lines_say_the_gateway_by_the_option_of_the_guide() -> None:
    assert 'tessera generate --gateway 127.0.0.1:9 --chat "' in how_to_go_on(UpConfig(listen="127.0.0.1:9"))
    assert "--gateway" not in how_to_go_on(UpConfig())
