"""Conversations and a small tokenizer with chat tokens, for the tests of fine-tuning data."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmwright.data.tokens.tokenizer import TextTokenizer

SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>"]
SPECIAL += ["<end_of_turn>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]

CHATS = {
    "one": [
        {"role": "user", "content": "What is 6 times 7?"},
        {"role": "assistant", "content": "It is 42."},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi there \n"},
        {"role": "assistant", "content": "  Hello <b>you</b>!\n"},
    ],
    "turns": [
        {"role": "user", "content": "It is 42."},
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Gr\u00fc\u00dfe \U0001f600, assistant"},
        {"role": "assistant", "content": "assistant\nXq5 \u00e9\U0001f600"},
    ],
    "thoughts": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nTwo"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "sunny", "name": "f"},
        {"role": "assistant", "content": "Sunny."},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": "\u00fc<b>"}}}]


def chat_tokenizer(chat_template=None):
    """A byte-level BPE of a few merges with the special tokens of several chat formats."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [m["content"] for chat in CHATS.values() for m in chat] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(
        backend, eos="<|endoftext|>", bos="<s>", pad="<|endoftext|>", chat_template=chat_template
    )
