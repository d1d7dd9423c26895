"""llama.cpp's own forward pass, through the C functions that the wheel of xllamacpp exports; their
declarations are those of llama-cpp-py-sync, whose own library is never loaded."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

DECLARATIONS = re.compile(r'_LLAMA_H_CDEF = """(.*?)"""', re.S)
PACKAGES = ("xllamacpp", "llama_cpp_py_sync", "cffi")


def needed():
    """Skips a test where the packages are not installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


@cache
def _library():
    import cffi

    folder, bindings = (Path(importlib.util.find_spec(n).origin).parent for n in PACKAGES[:2])
    ffi = cffi.FFI()
    ffi.cdef(DECLARATIONS.search((bindings / "_cffi_bindings.py").read_text())[1])
    library = ffi.dlopen(str(next(folder.glob("*.so"))))
    library.llama_backend_init()
    return ffi, library


def embeddings(path, ids):
    """float32 [T, D]: the hidden states of ids [T], after the last norm."""
    return _outputs(path, ids, "embeddings")


def logits(path, ids):
    """float32 [T, V] for ids [T], in one pass."""
    return _outputs(path, ids, "logits")


def tokens(path, text):
    """Ids of a text without special tokens, by the tokenizer in the file."""
    ffi, lib = _library()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model != ffi.NULL, "llama.cpp does not load it"
    raw = text.encode()
    out = ffi.new(f"int32_t[{len(raw) + 8}]")
    vocab = lib.llama_model_get_vocab(model)
    count = lib.llama_tokenize(vocab, raw, len(raw), out, len(raw) + 8, False, False)
    assert count >= 0
    found = list(out[0:count])
    lib.llama_model_free(model)
    return found


def _outputs(path, ids, what):
    ffi, lib = _library()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model != ffi.NULL, "llama.cpp does not load it"
    said, size = lib.llama_context_default_params(), max(64, len(ids))
    said.n_ctx = said.n_batch = said.n_ubatch = size
    said.n_seq_max = said.n_threads = said.n_threads_batch = 1
    if what == "embeddings":
        said.embeddings, said.pooling_type = True, 0  # none
    said.type_k = said.type_v = 0  # float32
    said.flash_attn_type = 0
    context = lib.llama_init_from_model(model, said)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if what == "embeddings":
        assert lib.llama_encode(context, batch) == 0
        get, width = lib.llama_get_embeddings_ith, lib.llama_model_n_embd(model)
    else:
        assert lib.llama_decode(context, batch) == 0
        get, width = (
            lib.llama_get_logits_ith,
            lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)),
        )
    rows = [ffi.buffer(get(context, i), 4 * width) for i in range(len(ids))]
    out = np.stack([np.frombuffer(row, np.float32).copy() for row in rows])
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return out
