"""nanoGPT's configuration names, translated: an existing config runs here unchanged.

Most names are the same. `batch_size` is not the same thing: in nanoGPT it is the micro batch, and
`gradient_accumulation_steps` counts micro batches over all processes; here it is the global batch.
Where the accumulation is given, the pair is translated and a note says so.
"""

from __future__ import annotations

import ast
import operator

from .coerce import coerce

RENAMED = {
    "max_iters": "max_steps",
    "lr_decay_iters": "decay_steps",
    "warmup_iters": "warmup_steps",
    "eval_iters": "eval_batches",
}
SPECIAL = ("gradient_accumulation_steps", "decay_lr", "seed", "dataset", "init_from")
IGNORED = (
    "out_dir",
    "log_interval",
    "eval_only",
    "always_save_checkpoint",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "backend",
)
NAMES = (*RENAMED, *SPECIAL)


def translate(overrides: dict) -> tuple[dict, list[str]]:
    """(overrides under our names, notes for the user). Unknown keys pass through untouched.

    Raises ValueError where two keys contradict or a value has no counterpart here.
    """
    out = {k: v for k, v in overrides.items() if k not in NAMES + IGNORED}
    notes = []
    for old, new in RENAMED.items():
        if old in overrides:
            _put(out, new, overrides[old], old)
    if "gradient_accumulation_steps" in overrides:
        notes.append(_accumulation(out, overrides))
    if "decay_lr" in overrides:
        decays = coerce("decay_lr", overrides["decay_lr"], bool)
        _put(out, "schedule", "cosine" if decays else "constant", "decay_lr")
    if "seed" in overrides:
        _put(out, "init_seed", overrides["seed"], "seed")
        _put(out, "order_seed", overrides["seed"], "seed")
    if "dataset" in overrides:
        _dataset(out, str(overrides["dataset"]))
    if overrides.get("init_from", "scratch") != "scratch":
        raise ValueError(
            f"init_from={overrides['init_from']!r} is not a setting here; a run resumes by being "
            "asked for again, and `gpt2.checkpoint` loads GPT-2 weights"
        )
    ignored = [k for k in IGNORED if k in overrides]
    if ignored:
        notes.append(f"{', '.join(ignored)} of nanoGPT's config has no effect here")
    return out, notes


def _put(out: dict, key: str, value, source: str) -> None:
    if key in out:
        raise ValueError(f"{source} and {key} are the same setting; give one of them")
    out[key] = value


def _accumulation(out: dict, overrides: dict) -> str:
    if "batch_size" not in overrides:
        raise ValueError(
            "gradient_accumulation_steps needs batch_size (the micro batch) beside it"
        )
    steps = coerce("gradient_accumulation_steps", overrides["gradient_accumulation_steps"], int)
    micro = coerce("batch_size", overrides["batch_size"], int)
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps={steps}; use at least 1")
    _put(out, "micro_batch_size", micro, "gradient_accumulation_steps")
    out["batch_size"] = micro * steps
    return (
        f"gradient_accumulation_steps={steps} was given, so batch_size={micro} is read as "
        f"nanoGPT's micro batch: batch_size={micro * steps}, micro_batch_size={micro}"
    )


def _dataset(out: dict, name: str) -> None:
    if name == "openwebtext":
        _put(out, "corpus", "openwebtext", "dataset")
        out.setdefault("tokenizer", "gpt2")
    else:
        _put(out, "corpus", f"bin:data/{name}", "dataset")


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def read_assignments(source: str, path: str) -> dict:
    """The `name = value` lines of a nanoGPT config file, read without running it.

    Values may be constants, earlier names and arithmetic (`batch_size * 5 * 8`). A name that is
    no setting, such as `import time`, is skipped only if nothing refers to it.
    Raises ValueError naming file and line for anything else.
    """
    out = {}
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            raise ValueError(f"{path}, line {node.lineno}: only `name = value` lines are read")
        name = node.targets[0].id
        try:
            out[name] = _value(node.value, out)
        except ValueError:
            if name in IGNORED:
                out[name] = None
                continue
            raise ValueError(
                f"{path}, line {node.lineno}: {name} = {ast.unparse(node.value)} "
                "is not a plain value or arithmetic"
            ) from None
    return out


def _value(node: ast.expr, names: dict):
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names), _value(node.right, names)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError
