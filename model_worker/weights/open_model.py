"""From a `--model` argument to a loaded model."""

from model_worker.kernels.interface import Kernels
from model_worker.layers.decoder import Decoder
from model_worker.models.causal_lm import CausalLM
from model_worker.models.eagle_head import Eagle3Head, EagleHead
from model_worker.models.mtp_head import BLOCKS, MtpHead
from model_worker.models.registry import build_model
from model_worker.weights.eagle_source import EagleSource
from model_worker.weights.errors import ModelUnsupported
from model_worker.weights.gguf import GGUFSource
from model_worker.weights.model_source import ModelSource, fill, load_further_weights, load_weights
from model_worker.weights.safetensors import SafetensorsSource
from tessera.values.known_models import locate, served_name


def open_model(model: str) -> ModelSource:
    """Open what `model` names (a known name, a directory, a .gguf file) without reading weights.

    Raises a `tessera.values.known_models.ModelError` that names what is missing or wrong and what to do.
    """
    path = locate(model)
    name = served_name(model)
    return SafetensorsSource(path, name) if path.is_dir() else GGUFSource(path, name)


def load_model(source: ModelSource, kernels: Kernels) -> CausalLM:
    """Build the model of an opened source and read its weights (float32). Raises ModelError."""
    model = build_model(source.config, kernels)
    load_weights(model, source)
    return model


def load_mtp_head(source: ModelSource, kernels: Kernels, model: CausalLM) -> MtpHead:
    """The layers behind the last of a loaded model, which predict further tokens. Raises ModelError where it has none."""
    config = source.config
    if config.architecture not in BLOCKS or not isinstance(model, Decoder):
        raise ModelUnsupported(
            f"{source.info.name} ({config.architecture}) cannot have layers that predict further tokens: use another proposer"
        )
    if not config.num_mtp_layers or not source.further_names():
        raise ModelUnsupported(f"{source.info.name} has no layers that predict further tokens: use another proposer")
    with kernels.placement.in_force():
        head = MtpHead(config, kernels, model, source.further_names())
    load_further_weights(head, source)
    return head


def load_eagle_head(name: str, kernels: Kernels, model: CausalLM, model_name: str) -> EagleHead | Eagle3Head:
    """The EAGLE or EAGLE-3 head in the directory `name`, for a loaded model. Raises ModelError, DraftMismatch where it is not for this model."""
    if not isinstance(model, Decoder):
        raise ModelUnsupported(f"{model_name} shows no hidden states: use another proposer")
    source = EagleSource(locate(name), served_name(name))
    shape = source.shape(model.config, model_name)
    head: EagleHead | Eagle3Head
    with kernels.placement.in_force():
        if source.is_third:
            head = Eagle3Head(shape, kernels, model, source.names(), model.config.hidden_size)
        else:
            head = EagleHead(shape, kernels, model, source.names())
    fill(head.slots(), set(source.names()), source.read, source.name, source.config)
    return head
