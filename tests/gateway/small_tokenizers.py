"""Small tokenizers to test with, and the description of a model that fits one."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from gateway.tokenizer import Tokenizer
from tessera.values.model import ModelInfo

SMOLLM2 = "SmolLM2-135M-Instruct"
ROLE_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def model_info(tokenizer: Tokenizer, max_model_len: int = 64) -> ModelInfo:
    return ModelInfo(
        name="m",
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tokenizer.special.eos_ids,
        bos_token_id=tokenizer.special.bos_id,
        tokenizer_digest=tokenizer.digest,
        weights_digest="w",
    )


def byte_fallback_backend() -> Backend:
    """Shaped like Llama 2's: `▁` for a space, 256 byte tokens, one leading space dropped. Adds BOS."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "é"]
    backend = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def byte_level_backend() -> Backend:
    """One token per byte (ids 0 to 255 in the order of the byte alphabet), then `<end>` (special) and `<é note>` (not special)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    backend.add_tokens([AddedToken("<é note>", normalized=False)])
    return backend
