"""The four parts of `gpt2.scaling`: losses, kill -9, the reduction's rounding, speed.

Each is a function of (machine, runs) that returns rows of plain numbers. A part raises ChildError
where it has nothing to say; within a part, what failed is a row with its error.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .children import Child, ChildError, Machine
from .outcomes import series
from .processes import ranks
from .runs import Run, RunStore
from .scaling_runs import Runs, slug

KILLED_STEPS = 20_000  # more than it will see
LOST = re.compile(r"rank \d+ of \d+ .*? is gone")

# -- losses ---------------------------------------------------------------------------------------

COMPARISONS = (
    ("small, alone", "small, together"),
    ("small, alone in passes", "small, together"),
    ("small, together", "small, bf16 sums"),
    ("large, alone", "large, together"),
)


def losses(machine: Machine, runs: Runs) -> list[dict]:
    runs.prepare_alone()
    rows = []
    for a, b in COMPARISONS:
        try:
            rows.append({"comparison": f"{a} / {b}", **compare_runs(runs, a, b)})
        except ChildError as error:
            rows.append({"comparison": f"{a} / {b}", "error": str(error)})
    return rows


def compare_runs(runs: Runs, a: str, b: str) -> dict:
    """Losses and gradient norms of two runs over the same batches, bit by bit."""
    pair = [runs.get(name) for name in (a, b)]
    processes = [runs.configs[name][1] for name in (a, b)]
    config = pair[0].config
    metrics = [run.metrics() for run in pair]
    told = {
        "a": a,
        "b": b,
        "preset": config.preset,
        "attention": config.attention,
        "tokens_per_step": config.tokens_per_step,
        "processes": processes,
        "micro_batch": [r.config.accumulation(n)[0] for r, n in zip(pair, processes)],
        "passes": [r.config.accumulation(n)[1] for r, n in zip(pair, processes)],
        "tokens_per_s": [_median(series(m, "tokens_per_s")[1][1:]) for m in metrics],
        "grad_reduce_dtype": [r.config.grad_reduce_dtype for r in pair],
    }
    told |= compare_series(*(series(m, "train_loss") for m in metrics))
    norms = compare_series(*(series(m, "grad_norm") for m in metrics))
    return told | {"first_different_grad_norm": norms["first_different"]}


def compare_series(a: tuple, b: tuple) -> dict:
    """First step at which two fp32 series differ in any bit (None: none), largest difference.

    a, b: (steps, values); compared over the steps that both have. Stored values have nine
    significant digits, which tell any two fp32 numbers apart.
    """
    left, right = (dict(zip(np.asarray(s).tolist(), np.asarray(v).tolist())) for s, v in (a, b))
    steps = sorted(left.keys() & right.keys())
    if not steps:
        raise ChildError("the two runs have no step in common")
    gaps = {s: abs(left[s] - right[s]) for s in steps}
    differing = [s for s in steps if left[s] != right[s]]
    largest = max(steps, key=lambda s: gaps[s])
    return {
        "steps": [steps[0], steps[-1]],
        "first_different": differing[0] if differing else None,
        "largest_difference": gaps[largest],
        "largest_at": largest if differing else None,
        "loss_a": [left[s] for s in steps],
        "loss_b": [right[s] for s in steps],
    }


def _median(values) -> float | None:
    return float(statistics.median(values)) if len(values) else None


# -- kill -9 --------------------------------------------------------------------------------------


def kill(machine: Machine, runs: Runs) -> list[dict]:
    """Kill the last rank of a run in full swing; then go on with all processes, and with one."""
    reference = runs.get("small, together")
    config = runs.study.small.at(max_steps=KILLED_STEPS)
    arguments = runs.arguments("killed", config)
    child = machine.start("killed", "gpt2.train", arguments, machine.processes)
    store = runs.store("killed")
    try:
        run = _wait_for(lambda: _saved_run(store, child), machine, "a checkpoint")
        time.sleep(0.3)  # a few steps that are lost
        workers = ranks(child.process)
        victim = len(workers) - 1
        workers[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        code = child.wait(min(90.0, machine.remaining()))
        seconds = time.monotonic() - began
    finally:
        child.end()
    found = LOST.search(child.text())
    row = {
        "event": f"kill -9 of rank {victim} of {machine.processes}",
        "others_ended_after_s": round(seconds, 2),
        "exit_code": code,
        "message": _line_with(child.text(), found.group(0)) if found else None,
        "status": Run(run.path).status,
        "checkpoint": Run(run.path).checkpoints()[-1][0],
    }
    rows = [row]
    for processes in (machine.processes, 1):
        name = f"resumed on {processes}"
        shutil.copytree(store.root, runs.store(name).root)
        rows.append(resume(machine, runs, name, processes, config, row["checkpoint"], reference))
    return rows


def resume(machine, runs, name, processes, config, start, reference: Run) -> dict:
    """Continue the killed run and compare it with the one that was not interrupted."""
    steps = runs.study.small.checkpoint_interval
    arguments = [*runs.arguments(name, config), f"--stop_at={start + steps}"]
    row = {"event": name, "processes": processes, "from": start, "to": start + steps}
    try:
        machine.run(slug(name), "gpt2.train", arguments, processes)
        (run,) = runs.store(name).runs()
        row["status"] = run.status
        went_on = _after(run, start), _after(reference, start)
        return row | {k: v for k, v in compare_series(*went_on).items() if "loss" not in k}
    except ChildError as error:
        return row | {"error": str(error)}


def _after(run: Run, start: int) -> tuple:
    steps, values = series(run.metrics(), "train_loss")
    return steps[steps >= start], values[steps >= start]


def _saved_run(store: RunStore, child: Child) -> Run | None:
    """The run in `store` once it has a checkpoint."""
    if child.process.poll() is not None:
        child.finish(0)
        raise ChildError("the run ended before it could be interrupted")
    runs = store.runs() if store.root.exists() else []
    if runs and (runs[0].path / "status.json").exists() and runs[0].checkpoints():
        return Run(runs[0].path)
    return None


def _wait_for(condition: Callable, machine: Machine, what: str):
    while machine.remaining() > 0:
        found = condition()
        if found is not None:
            return found
        time.sleep(0.05)
    raise ChildError(f"the time was over before there was {what}")


def _line_with(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if words in line).strip()


# -- reduction ------------------------------------------------------------------------------------


def reduction(machine: Machine, runs: Runs) -> list[dict]:
    """delta's error by the probes of three runs, then each cause of error in dW_Q by itself."""
    rows = []
    for name in ("small, alone in passes", "small, together", "small, bf16 sums"):
        try:
            rows.append({"run": name, **probe_row(runs.get(name), runs.study.probe_step)})
        except (ChildError, KeyError) as error:
            rows.append({"run": name, "error": str(error)})
    path, out = runs.get("small, together").path, machine.work / "reduction.json"
    arguments = [str(path), "--json", str(out), "--data", str(machine.work / "data")]
    try:
        machine.run("reduction", "gpt2.reduction", arguments, machine.processes)
        rows += json.loads(out.read_text())["rows"]
    except ChildError as error:
        rows.append({"cause": "each by itself", "error": str(error)})
    return rows


def probe_row(run: Run, step: int) -> dict:
    """Means over heads of what the probes found at `step`, and the spread over heads.

    The standard error of the mean over heads takes heads as independent. Raises KeyError if the
    run has no such row.
    """
    row = next((r for r in run.rows() if r["step"] == step and "delta_error_mean" in r), None)
    if row is None:
        raise KeyError(f"{run.path.name} has no probes at step {step}")
    mean, error, ratio = (
        np.array(row[name], dtype=float).ravel()
        for name in ("delta_error_mean", "delta_error_stderr", "dwq_error_ratio")
    )
    return {
        "at_step": step,
        "processes": run.info["segments"][-1]["processes"],
        "grad_reduce_dtype": run.config.grad_reduce_dtype,
        "heads": len(mean),
        "delta_error_mean": float(mean.mean()),
        "delta_error_stderr": float(np.sqrt(np.square(error).sum()) / len(error)),
        "heads_beyond_2_stderr": int((np.abs(mean) > 2 * error).sum()),
        "delta_error_rms": float(np.array(row["delta_error_rms"], dtype=float).mean()),
        "dwq_error_ratio_median": float(np.nanmedian(ratio)),
        "dwq_error_ratio_max": float(np.nanmax(ratio)),
    }


# -- speed ----------------------------------------------------------------------------------------


def speed(machine: Machine, runs: Runs) -> list[dict]:
    """Rows of gpt2.bench on one process and on all, and what they say of the missing time.

    The benches of one process run side by side, each on a GPU of its own; on a CPU they would
    share its cores, and follow one another.
    """
    plans = runs.study.bench
    gpus = range(machine.processes) if machine.device == "cuda" else [None]
    with ThreadPoolExecutor(len(gpus)) as pool:
        places = [gpus[i % len(gpus)] for i in range(len(plans))]
        alone = list(
            pool.map(lambda plan, gpu: machine_bench(machine, plan, 1, gpu), plans, places)
        )
    together = [machine_bench(machine, plan, machine.processes) for plan in plans]
    rows = [row for pair in zip(alone, together) for part in pair for row in part]
    scaled = [scale_row(row, rows) for row in rows]
    return rows + [row for row in scaled if row]


def machine_bench(
    machine: Machine, plan: tuple, processes: int, gpu: int | None = None
) -> list[dict]:
    """The row of one preset and numerics; a failure is a row too."""
    preset, implementations, changes = plan
    name = slug(f"bench-{preset}-{implementations}-{processes}")
    out = machine.work / f"{name}.json"
    arguments = ["--presets", preset, "--implementations", implementations, "--json", str(out)]
    arguments += [f"--limit-s={machine.remaining():.0f}", "--set", f"device={machine.device}"]
    arguments += [word for change in changes for word in ("--set", change)]
    try:
        if machine.remaining() < 20:
            raise ChildError("not run: no time was left")
        machine.run(name, "gpt2.bench", arguments, processes, gpu)
        return json.loads(out.read_text())["rows"]
    except ChildError as error:
        told = {"preset": preset, "implementation": implementations, "processes": processes}
        return [told | {"error": str(error)}]


def scale_row(row: dict, rows: list[dict]) -> dict | None:
    """Speed of `row` (several processes) over that of one process; the missing time's causes."""
    if row.get("processes", 1) < 2 or "error" in row:
        return None
    same = ("preset", "implementation", "tokens_per_step")
    ones = [r for r in rows if r.get("processes") == 1 and "error" not in r]
    one = next((r for r in ones if all(r[k] == row[k] for k in same)), None)
    if one is None:
        return None
    t1, tn = (1e3 * r["tokens_per_step"] / r["tokens_per_s"] for r in (one, row))
    return {
        "scaling": f"{row['preset']}, {row['implementation']}",
        "from_processes": 1,
        "to_processes": row["processes"],
        "ratio": row["tokens_per_s"] / one["tokens_per_s"],
        "efficiency": row["tokens_per_s"] / one["tokens_per_s"] / row["processes"],
        "step_ms": [t1, tn],
        "missing_ms": tn - t1 / row["processes"],
        "reduce_ms": row["reduce_ms"],
        "undivided_update_ms": row["update_ms"] * (1 - 1 / row["processes"]),
    }
