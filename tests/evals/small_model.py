"""A small model, and prompts and ways of sampling whose shapes its tests share."""

from lmwright.evals.generate import Sampling
from lmwright.models.llama import Llama

MODEL = Llama(
    vocab_size=304, embed_dim=48, mlp_dim=88, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=10, seq_len=96, rope_theta=3001.0, qk_norm="head", bias="attention",
)  # fmt: skip
PROMPTS = [[7], list(range(40, 69)), [250, 3, 3, 99, 8], list(range(11, 200, 10))]
# Most tests share these shapes, and so the compiled programs.
GREEDY = Sampling(45)
SAMPLED = Sampling(45, temperature=1.3, top_k=40, top_p=0.95, seed=5)
