"""lmwright from Python: each verb of the command line as a function.

    import lmwright.api as lm

    run = lm.load_run("run.toml", "train.steps=200")
    lm.prepare(run)
    print(lm.plan(run, on="v5e-8"))
    lm.train(run)
    model = lm.load_model(run.dir)
    print(lm.generate(model, "Once upon a time")[0].text)
    lm.export(run.dir, "my-model")

Each function does what the command of its name does, prints the same progress, and returns what was
found. A mistake in the input raises `UserError` with the sentence that the command line shows.
Importing this module sets the environment variables that jax reads, and imports no jax.
"""

from lmwright.api.models import (
    compare_tasks,
    embed,
    evaluate,
    evaluate_tasks,
    export,
    export_adapter,
    generate,
    import_model,
    load_model,
    merge_adapter,
    predict,
    publish,
    quantize,
    verify,
)
from lmwright.api.runs import launch, load_run, plan, prepare, read_run, report, sweep, train
from lmwright.errors import UserError
from lmwright.hardware.environment import set_environment

__all__ = [
    "UserError",
    "compare_tasks",
    "embed",
    "evaluate",
    "evaluate_tasks",
    "export",
    "export_adapter",
    "generate",
    "import_model",
    "launch",
    "load_model",
    "load_run",
    "merge_adapter",
    "plan",
    "predict",
    "prepare",
    "publish",
    "quantize",
    "read_run",
    "report",
    "sweep",
    "train",
    "verify",
]

set_environment()
