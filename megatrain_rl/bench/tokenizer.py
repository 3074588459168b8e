"""A tokenizer that needs no download: one token a byte, no merges, the chat format of Qwen."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer(vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """Three special tokens and the bytes; up to `vocab_size` follow names that no text encodes to. ValueError for a
    smaller vocabulary. (A rollout engine does not sample tokens its tokenizer lacks, so it has to have as many as the
    model.)"""
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size is not None and vocab_size < len(words):
        raise ValueError(
            f"a vocabulary of {vocab_size} does not hold the {len(words)} tokens of a byte-level tokenizer"
        )
    words += [f"~{i:06d}" for i in range((vocab_size or len(words)) - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
