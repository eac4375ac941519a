"""A model's tokenizer as the files that other programs load it from, in one zip."""

import io
import json
import zipfile

from gateway.served_model import ServedModel

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def tokenizer_bundle(model: ServedModel) -> bytes:
    """The zip: tokenizer.json, tokenizer_config.json (special tokens, chat template) and config.json, as Hugging Face has them. It is made
    of what this gateway uses, so a GGUF file gives the same as a directory; the same tokenizer gives the same bytes."""
    info, tokenizer = model.info, model.tokenizer
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special.texts}
    if tokenizer.chat_template is not None:
        tokenizer_config["chat_template"] = tokenizer.chat_template.source
    config = {
        "architectures": [info.architecture],
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.max_model_len,
        "eos_token_id": list(info.eos_token_ids),
        "bos_token_id": info.bos_token_id,
    }
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(tokenizer_config),
        "config.json": json.dumps(config),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
