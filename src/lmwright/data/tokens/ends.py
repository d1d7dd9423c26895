"""Ends: the tokens that an encoder's own file puts around a text, by Hugging Face's names."""

import tokenizers


def ends_of(backend: tokenizers.Tokenizer) -> dict[str, str]:
    """`cls_token` and `sep_token`, which pipelines of transformers ask for, of a tokenizer without
    padding that puts one token before a text and one after it; of others none."""
    bare, whole = (backend.encode("a", add_special_tokens=own).tokens for own in (False, True))
    if whole[1:-1] != bare or len(whole) != len(bare) + 2:
        return {}
    return {"cls_token": whole[0], "sep_token": whole[-1]}
