"""A small random model of every architecture, without files of weights: for any kernels, on any device."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from model_worker.models.model_config import ModelConfig
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from tests.parity.tiny_models import tiny_configs


@cache
def tiny_shapes() -> dict[str, ModelConfig]:
    """Architecture -> the first of its small shapes."""
    shapes = {}
    for architecture, configs in sorted(tiny_configs().items()):
        with TemporaryDirectory() as folder:
            configs[0].architectures = [architecture]
            configs[0].save_pretrained(folder)
            shapes[architecture] = HuggingFaceConfig(Path(folder)).model_config()
    return shapes
