"""`tessera up` as a newcomer meets it: real processes, the real model, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import trustme

from services.free_ports import free_ports

END_TIMEOUT_S = 60


def up(folder: Path, address: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "services.cli.main", "up"]
    return [*command, "--data", str(folder), "--listen", address, *options]


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@contextmanager
def serving(command: list[str]) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """A system that serves, and its processes; whatever the test does, nothing is left behind."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Serving on" in line:
                break
        else:
            raise AssertionError(f"it ended ({process.wait(END_TIMEOUT_S)}) before it served:\n{''.join(lines)}")
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_serve_interrupt_kill_and_run_again(tmp_path: Path, address: str) -> None:
    with serving(up(tmp_path, address)) as (process, parts):
        assert len(parts) == 4, "redis, worker, scheduler, gateway"
        assert {os.sched_getscheduler(part.pid) for part in parts} == {os.SCHED_BATCH}
        second = subprocess.run(up(tmp_path, address), capture_output=True, text=True, timeout=END_TIMEOUT_S)
        assert second.returncode == 1 and f"in use by another `tessera up` (process {process.pid})" in second.stderr
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == 0, err
        assert "Paris" in out
        assert not psutil.wait_procs(parts, timeout=0)[1], "the parts end before `up` does"

    with serving(up(tmp_path, address, "--prompt", "")) as (process, parts):
        process.kill()
        assert not psutil.wait_procs(parts, timeout=END_TIMEOUT_S)[1], "the kernel ends the parts"

    once = subprocess.run(up(tmp_path, address, "--once"), capture_output=True, text=True, timeout=4 * END_TIMEOUT_S)
    assert once.returncode == 0, once.stderr
    assert once.stdout == "The capital of France is Paris.\n"


@pytest.mark.slow
def test_with_http_the_curl_line_that_it_prints_is_answered(tmp_path: Path, address: str) -> None:
    http = f"127.0.0.1:{free_ports(1)[0]}"
    command = up(tmp_path, address, "--prompt", "", "--model", "SmolLM2-135M-Instruct", "--http", http)
    with serving(command) as (process, parts):
        assert len(parts) == 5, "smg beside the others"
        printed = []
        for line in process.stderr:
            printed.append(line)
            if "messages" in line:
                break
        curl = "".join(printed[-2:]).replace('"max_tokens": 100', '"max_tokens": 4')
        assert f"curl http://{http}/v1/chat/completions" in curl
        told = subprocess.run(curl.strip(), shell=True, capture_output=True, text=True, timeout=END_TIMEOUT_S)
        answer = json.loads(told.stdout)
        assert answer["choices"][0]["message"]["content"], answer
        refused = urllib.request.Request(
            f"http://{http}/workers", b'{"url": "grpc://127.0.0.1:1"}', {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(refused, timeout=END_TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == 0, err
        assert not psutil.wait_procs(parts, timeout=0)[1], "the parts end before `up` does"


@pytest.mark.slow
def test_with_certificate_and_tokens_the_lines_that_it_prints_are_answered(tmp_path: Path, address: str) -> None:
    """Also the question, whose answer comes first."""
    leaf = trustme.CA().issue_cert("llm.example")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "tokens").write_text("a-token-of-my-own me public\n")
    (tmp_path / "mine").write_text("a-token-of-my-own\n")
    files = ["--tls-cert", f"{tmp_path}/cert.pem", "--tls-key", f"{tmp_path}/key.pem", "--tls-name", "llm.example"]
    tokens = ["--tokens", f"{tmp_path}/tokens", "--token-file", f"{tmp_path}/mine"]
    with serving(up(tmp_path / "data", address, *files, *tokens)) as (process, _):
        assert process.stderr is not None and process.stdout is not None
        assert process.stdout.readline() == "The capital of France is Paris.\n"
        generate, buf = process.stderr.readline(), process.stderr.readline() + process.stderr.readline()
        for line, answer in ((generate, " "), (buf, '"text":')):
            told = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=END_TIMEOUT_S)
            assert told.returncode == 0 and answer in told.stdout, (line, told)
        without = subprocess.run(
            generate.replace(f"--token-file {tmp_path}/mine", ""),
            shell=True,
            capture_output=True,
            text=True,
            timeout=END_TIMEOUT_S,
        )
        assert without.returncode != 0 and "give a token" in without.stderr


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_it_with_the_reason(tmp_path: Path, address: str) -> None:
    command = up(tmp_path, address, "--once", "--model", "./gone")
    result = subprocess.run(command, capture_output=True, text=True, timeout=END_TIMEOUT_S)
    assert result.returncode == 1
    assert "model './gone' does not exist" in result.stderr and "Traceback" not in result.stderr
