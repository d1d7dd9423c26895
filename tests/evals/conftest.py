"""A small model, and the harness's own class for it."""

import numpy as np
import pytest

WORDS = "the man woman dog turned on a tap and water came out of it because rain fell".split()


def sentence(rng, most):
    return " ".join(rng.choice(WORDS, rng.integers(1, most)))


@pytest.fixture(scope="session")
def harness_folder(tmp_path_factory):
    """A random llama of transformers with a tokenizer that begins a text with bos."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder, rng = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator([sentence(rng, 12) for _ in range(60)], trainer)
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(own.get_vocab()), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=320,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def theirs(harness_folder):
    """The same model by the harness and transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(harness_folder), dtype="float32", device="cpu", batch_size=4)
