"""A page's run file in the working folder, beside a small encoder that it can start from."""

import re
import shutil
from pathlib import Path

from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.data.prepare import prepare
from lmwright.objectives.mlm import Mlm
from lmwright.optim import KINDS
from tests.saved_run import save_run


def write_encoder(model, seq_len: int, **source) -> None:
    """Saves an encoder in `encoder`, whose tokenizer is trained on this source."""
    run = Run(
        name="encoder",
        dir="encoder",
        model=model,
        objective=Mlm(mask_token_id=1),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir="text", workers=1, sources=(Source(**source),),
            tokenizer=Tokenizer(vocab_size=300, special_tokens=("<|endoftext|>", "<|mask|>")),
            pack=Pack(seq_len=seq_len),
        ),
        train=Train(steps=1, global_batch_size=2),
    )  # fmt: skip
    prepare(run.data, seq_len)
    save_run(run, steps=(1,))
    shutil.copytree("text/tokenizer", "encoder/tokenizer")  # as training keeps it


def write_run_file(page: Path) -> None:
    """Writes the page's first run file."""
    toml = re.search(r"```toml\n(.*?)```", page.read_text("utf-8"), re.S)[1]
    Path("run.toml").write_text(toml)
