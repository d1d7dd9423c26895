"""adapter_config.json of PEFT: what of it changes the result is read exactly or refused."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmwright.data.json_text import read_downloaded
from lmwright.errors import UserError

# how the factors began, and what that means for the base that they are added to
PLAIN_STARTS = ("gaussian", "orthogonal", "eva", "mica")
TAKEN_OUT = ("pissa", "olora")
"""Initializations whose first product PEFT subtracts from the base whenever it loads the
adapter."""
OTHER_STARTS = {
    "pissa_niter_": "its start is found by chance",
    "corda": "its start depends on the data that it was prepared with",
    "loftq": "its base was rounded in a way that the folder does not say",
    "lora_ga": "its start depends on gradients that the folder does not hold",
}
# features of PEFT that compute something else than base + scale * B A
PLAIN = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "arrow_config": (None,),
    "velora_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
}
UNMERGED = ("alora_invocation_tokens", "arrow_config", "use_qalora")
"""Features of PEFT that it does not merge either."""
# which change nothing once the factors, and the modules that are saved, are there
HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_core", "merge_weights", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "modules_to_save", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
OF_EXPERTS = re.compile(
    r"([\w.]+\.)?((gate_up|up|down)_proj|((gate|up|down)_proj|w[123]|gate|router)\.weight)"
)
LIKE_TEXT = re.compile(r"\^?[\w.\\-]*\$?")
ENDING = r"(.*\.)?({})$"  # how PEFT looks for a pattern of ranks or alphas in a name
SECONDS = 5.0  # for all patterns of a file; honest ones take microseconds
LONGEST = 1000


def read_config(path: Path) -> dict[str, Any]:
    """adapter_config.json, checked. Raises UserError for one that is not LoRA's or asks for a
    feature that is not plain LoRA, rsLoRA or DoRA."""
    config = read_downloaded(path, "a PEFT adapter folder")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: is not the config of a LoRA adapter")
    for name, plain in PLAIN.items():
        if config.get(name) not in plain:
            cure = "use it with PEFT" if name in UNMERGED else "merge with PEFT"
            raise UserError(f"{path}: {name} = {_short(config[name])} is not supported; {cure}")
    _refuse_parameters(config, path)
    for name in sorted(config.keys() - PLAIN.keys() - HARMLESS):
        if config[name]:
            raise UserError(
                f"{path}: {name} = {_short(config[name])} is unknown; remove that line if it does "
                "not change what the adapter computes"
            )
    _check_types(config, path)
    start_of(config, str(path))
    return config


def _refuse_parameters(config: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for `target_parameters` other than of experts, routers and feed-forwards."""
    said = config.get("target_parameters") or []
    known = isinstance(said, list) and all(isinstance(each, str) for each in said)
    if not known or not all(OF_EXPERTS.fullmatch(each) for each in said):
        raise UserError(
            f"{path}: target_parameters = {_short(said)} is not supported; these are: "
            "experts.gate_up_proj, experts.up_proj, experts.down_proj, and weights of routers and "
            "of gate, up, down"
        )


def _check_types(config: Mapping[str, Any], path: Path) -> None:
    def insist(name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise UserError(f"{path}: {name} = {_short(config[name])} is not {wanted}")

    rank, alpha = "a whole number above 0", "a number above 0"
    insist("r", _is_rank(config.get("r", 8)), rank)
    insist("lora_alpha", _is_alpha(config.get("lora_alpha", 8)), alpha)
    for name, fits, wanted in (
        ("rank_pattern", _is_rank, rank),
        ("alpha_pattern", _is_alpha, alpha),
    ):
        table = {} if config.get(name) is None else config[name]
        good = isinstance(table, dict) and all(map(fits, table.values()))
        insist(name, good, f"a table of names, each with {wanted}")
    for name in ("use_rslora", "use_dora"):
        insist(name, isinstance(config.get(name), bool | None), "true or false")
    name = "modules_to_save"
    saved = config.get(name) or []
    names = isinstance(saved, list) and all(isinstance(each, str) and each for each in saved)
    insist(name, names, "a list of names")
    name = "base_model_name_or_path"
    insist(name, isinstance(config.get(name), str | None), "a name")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_alpha(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < 1e30 and math.isfinite(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def start_of(config: Mapping[str, Any], where: str) -> str | None:
    """ "pissa" or "olora" where PEFT takes the start of the factors out of the base, else None.
    Raises UserError for a start that the folder does not let one find again."""
    value = name = config.get("init_lora_weights", True)
    if isinstance(value, str) and value.lower() in ("gaussian", "mica", "olora"):
        name = value.lower()  # the others PEFT knows in small letters alone
    if name is None or isinstance(name, bool) or name in PLAIN_STARTS:
        return None
    if name in TAKEN_OUT:
        return name
    why = "it is not known here"
    for prefix, reason in OTHER_STARTS.items():
        if isinstance(name, str) and name.startswith(prefix):
            why = reason
    raise UserError(
        f"{where}: init_lora_weights = {_short(value)}, and {why}; save the adapter again with "
        f"PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    )


def patterned(
    patterns: Mapping[str, Any] | None, names: Sequence[str], where: str
) -> dict[str, Any]:
    """Module name to the value of the first pattern that matches it, as PEFT matches them.
    Raises UserError for a pattern that is no regular expression or does not come to an end."""
    patterns = list((patterns or {}).items())
    for pattern, _ in patterns:
        if len(pattern) > LONGEST:
            raise UserError(
                f"{where}: a pattern of {len(pattern)} letters is too long for module names; "
                "export it again"
            )
        try:
            re.compile(ENDING.replace("{}", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(
                f"{where}: {_short(pattern)} is not a regular expression ({error}); export it again"
            ) from None
    firsts = _firsts([pattern for pattern, _ in patterns], names, where)
    return {n: patterns[i][1] for n, i in zip(names, firsts, strict=True) if i is not None}


def refuse_endless(config: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Tries each regular expression of adapter_config.json on the names that PEFT is going to
    match it with: modules, their last parts, and with PEFT's prefix. Raises UserError where that
    does not come to an end; PEFT has no limit of its own."""
    tests = [("fullmatch", config.get(key), "{}") for key in ("target_modules", "exclude_modules")]
    layers = config.get("layers_pattern")
    for each in layers if isinstance(layers, list | dict) else [layers]:
        tests.append(("match", each, r"(?:^|.*?\.){}\.(?P<idx>\d+)\."))
    for key in ("rank_pattern", "alpha_pattern"):
        tests += [("match", pattern, ENDING) for pattern in config.get(key) or {}]
    expressions = [
        (method, around.replace("{}", pattern))
        for method, pattern, around in tests
        if isinstance(pattern, str) and not LIKE_TEXT.fullmatch(pattern)
    ]
    if expressions:
        lasts = sorted({name.rpartition(".")[2] for name in names})
        _matched(
            expressions, [*names, *lasts, *(f"base_model.model.{name}" for name in names)], where
        )


MATCH = """
import itertools, json, re, sys
tests, names, most = json.load(sys.stdin)
made = [getattr(re.compile(e), method) for method, e in tests]
hits = ((i for i, match in enumerate(made) if match(n)) for n in names)
json.dump([list(itertools.islice(each, most)) for each in hits], sys.stdout)
"""


def _firsts(patterns: list[str], names: Sequence[str], where: str) -> list[int | None]:
    """The first pattern that matches each name."""
    if all(LIKE_TEXT.fullmatch(pattern) for pattern in patterns):
        made = [re.compile(ENDING.replace("{}", pattern)) for pattern in patterns]
        return [next((i for i, m in enumerate(made) if m.match(n)), None) for n in names]
    tests = [("match", ENDING.replace("{}", pattern)) for pattern in patterns]
    return [hits[0] if hits else None for hits in _matched(tests, names, where, most=1)]


def _matched(
    tests: Sequence[tuple[str, str]], names: Sequence[str], where: str, most: int | None = None
) -> list[list[int]]:
    """True for each of the tests, (method of a pattern, expression), that match each name: all, or
    the first `most`. They are tried in a process of their own: a regular expression may run
    forever, and cannot be stopped."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", MATCH],
            input=json.dumps([tests, list(names), most]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{where}: its patterns match module names for more than {SECONDS:g} seconds; write "
            f"the names themselves"
        ) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no reason given").splitlines()[-1]
        raise UserError(f"{where}: its patterns cannot be matched ({last})") from None
    return json.loads(done.stdout)
