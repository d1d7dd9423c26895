"""How far a model in few bits is from its floats, by grid and by method: integers next to each
weight, and GPTQ.

    python benchmarks/quantize_quality.py MODEL TEXT [--rows 32] [--context 1024] [--groups 64]

Rows of TEXT are measured on, every eighth is kept to compare on.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from lmwright.evals.compute import row_compute
from lmwright.formats.load import load_model
from lmwright.quantize.command import matrices_of, quantized
from lmwright.quantize.gptq import Method
from lmwright.quantize.grids import GridName
from lmwright.quantize.layers import Weights
from lmwright.quantize.moments import measured
from lmwright.quantize.parts import Parts
from lmwright.quantize.rows import rows_of_text

METHODS: tuple[Method, ...] = ("nearest", "gptq")


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--groups", type=int, nargs="*", default=[64], help="of int4")
    said = parser.parse_args()
    loaded, compute = load_model(said.model), row_compute("fp32")
    rows = rows_of_text(loaded, said.text, None, said.rows, said.context)
    cases: list[tuple[GridName, int | None]] = [("int4", group) for group in said.groups]
    params = matrices_of(loaded.model, "int4")
    weights = Weights(loaded.model, loaded.tensors)
    moments = list(measured(loaded.model, weights, rows.batches(), params, compute))
    print("| grid | method | perplexity, floats | rounded | KL, nats | same choice |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for to, group in [*cases, ("q4_0", None), ("iq4_nl", None), ("int8", None)]:
        for method in METHODS:
            with TemporaryDirectory() as folder:
                found = quantized(
                    loaded, rows, Parts(Path(folder)), to, compute,
                    group_size=group, method=method, moments=moments,
                ).difference  # fmt: skip
            before, after = found.perplexities
            print(
                f"| {to}{f', groups of {group}' if group else ''} | {method} | {before:.2f} | "
                f"{after:.2f} | {found.kl:.4f} | {found.greedy:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
