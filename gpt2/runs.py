"""Runs as folders: what was asked, where it ran, how it ended, and every number on the way.

    runs/cpu-exact-output_bits2-i0-o0-1a2b3c4d5e6f/
        run.json         identity, config, corpus, environment, parent
        status.json      running, finished, diverged, nonfinite, interrupted or failed, and where
        metrics.jsonl    strict JSON, one row a line; NaN and infinities are null, named in the row
        checkpoints/     see gpt2.checkpoint
        captures/        tensors that probes kept

The name ends in a hash of everything that determines the run (config, corpus content, code, parent
of a fork), so asking for the same run again finds it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil

from .config import RunConfig
from .fingerprint import code_fingerprint
from .outcomes import Outcome, OutcomeTracker, summarize
from .processes import is_alive

FORMAT = "bit-by-bit run 1"
STATUSES = ("running", "finished", "diverged", "nonfinite", "interrupted", "failed")
ENDED = ("finished", "diverged", "nonfinite")


class RunError(ValueError):
    """A folder that is not a run, or not the run that was asked for."""


@dataclass(frozen=True)
class Parent:
    """Where a fork starts: a checkpoint of another run, after `step` updates.

    `Parent.from_weights(path)` is a start from given weights (ours, Hugging Face's or nanoGPT's
    GPT-2) at step 0, with a fresh optimiser.
    """

    run_id: str
    step: int
    checkpoint: str

    @classmethod
    def from_weights(cls, path: str | Path) -> Parent:
        """Raises CheckpointError for a file that holds no plain tensors."""
        from .checkpoint import weights_sha256

        return cls(f"weights:{weights_sha256(path)[:12]}", 0, str(path))

    @property
    def weights_only(self) -> bool:
        return self.run_id.startswith("weights:")

    def identity(self) -> dict:
        return {"run_id": self.run_id, "step": self.step}


def run_id(config: RunConfig, corpus_sha: str, parent: Parent | None = None) -> str:
    """12 hexadecimal digits of everything that determines a run's result."""
    told = {
        "config": config.identity(),
        "corpus": corpus_sha,
        "code": code_fingerprint(),
        "parent": parent.identity() if parent else None,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


class RunStore:
    """A folder of runs."""

    def __init__(self, root: str | Path = "runs"):
        self.root = Path(root)

    def path(self, config: RunConfig, corpus_sha: str, parent: Parent | None = None) -> Path:
        words = re.sub(r"[^A-Za-z0-9_.]+", "-", config.attention.replace("=", "")).strip("-")[:48]
        fork = f"-from{parent.step}" if parent else ""
        if parent and parent.weights_only:
            fork = "-" + parent.run_id.replace(":", "")
        name = f"{config.preset}-{words}-i{config.init_seed}-o{config.order_seed}{fork}"
        return self.root / f"{name}-{run_id(config, corpus_sha, parent)}"

    def runs(self) -> list[Run]:
        """Every run in the store, oldest first; folders that are no runs are left out."""
        found = [Run(p.parent) for p in self.root.glob("*/run.json")]
        return sorted(found, key=lambda run: run.info["environment"]["date"])

    def find(self, text: str | Path) -> Run:
        """A run by path, folder name or id (or the beginning of one). Raises RunError."""
        if Path(text).is_dir():
            return Run(text)
        hits = [r for r in self.runs() if r.id.startswith(str(text)) or r.path.name == str(text)]
        if len(hits) != 1:
            what = "no run" if not hits else f"{len(hits)} runs"
            raise RunError(f"{what} named {str(text)!r} in {self.root}; give a run folder or id")
        return hits[0]


class Run:
    """A run folder, read. Raises RunError, in one sentence, if it is not one."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise RunError(f"{self.path} does not exist; give the path of a run folder")
        self.info = self._read("run.json")
        if self.info.get("format") != FORMAT:
            raise RunError(f"{self.path} is not a run of this project (no {FORMAT!r} in run.json)")
        self._rows: tuple[tuple, dict] | None = None

    def __repr__(self) -> str:
        return f"Run({self.path.name}: {self.status} at step {self.step})"

    def _read(self, name: str) -> dict:
        file = self.path / name
        try:
            value = json.loads(file.read_text())
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run folder: it has no {name}") from None
        except (ValueError, OSError) as error:
            raise RunError(
                f"{file} is damaged ({error}); delete the folder to start anew"
            ) from None
        if not isinstance(value, dict):
            raise RunError(f"{file} is damaged: not a JSON object; delete the folder")
        return value

    @property
    def id(self) -> str:
        return self.info["id"]

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.info["config"])

    @property
    def parent(self) -> Parent | None:
        return Parent(**self.info["parent"]) if self.info.get("parent") else None

    @property
    def state(self) -> dict:
        """status.json: status, step, message, duration_s; while running process; `tracker` once
        training began; at the end batches_sha256, unless the batches are too many to keep.
        """
        return self._read("status.json")

    @property
    def status(self) -> str:
        """One of STATUSES; a run whose process is gone is `interrupted`."""
        state = self.state
        if state["status"] == "running" and not process_alive(state.get("process")):
            return "interrupted"
        return state["status"]

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def message(self) -> str:
        return self.state.get("message", "")

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do: finished, diverged or nonfinite."""
        return self.status in ENDED

    def rows(self) -> list[dict]:
        """The lines of metrics.jsonl; a torn last line is left out. Raises RunError on others."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().split("\n")
        out = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                out.append(json.loads(line, parse_constant=_refuse_constant))
            except ValueError:
                if number < len(lines):
                    raise RunError(f"{file}, line {number}, is not strict JSON") from None
        return out

    def metrics(self) -> dict[str, np.ndarray]:
        """Columns over all rows: 'step' int [n]; scalars float [n], NaN where a row has none;
        per-head metrics float [n, n_layer, n_head]. 'nonfinite:NAME' lists the steps at which NAME
        was NaN or infinite.
        """
        file = self.path / "metrics.jsonl"
        stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else ()
        if self._rows is None or self._rows[0] != stamp:
            self._rows = (stamp, columns(self.rows()))
        return self._rows[1]

    @property
    def tracker(self) -> OutcomeTracker | None:
        """The divergence rule's last state: of every step, where metrics have gaps in a long run,
        and of a fork's parent too. None before training began.
        """
        state = self.state.get("tracker")
        return OutcomeTracker.from_dict(state) if state else None

    @property
    def outcome(self) -> Outcome:
        """The declared rules applied to this run alone (onset needs a twin: gpt2.outcomes)."""
        return summarize(self.metrics(), tracker=self.tracker)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, oldest first."""
        from .checkpoint import list_checkpoints

        return list_checkpoints(self.path)

    def captures(self) -> list[Path]:
        """Files that the capture probe kept, in order of their names."""
        return sorted((self.path / "captures").glob("*"))


def columns(rows: Iterable[dict]) -> dict[str, np.ndarray]:
    """Rows of metrics to columns (see `Run.metrics`)."""
    rows = list(rows)
    shapes: dict[str, tuple] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, (dict, str)) or key in ("step", "nonfinite"):
                continue
            shapes.setdefault(key, np.shape(value))
    out = {"step": np.array([row["step"] for row in rows], dtype=np.int64)}
    for key, shape in shapes.items():
        values = np.full((len(rows), *shape), np.nan)
        for i, row in enumerate(rows):
            if key in row:
                values[i] = np.array(row[key], dtype=float)
        out[key] = values
    for row in rows:
        for key in row.get("nonfinite", ()):
            out.setdefault(f"nonfinite:{key}", []).append(row["step"])
    return {k: np.array(v, dtype=np.int64) if isinstance(v, list) else v for k, v in out.items()}


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


# -- writing --------------------------------------------------------------------------------------


def write_json(path: Path, value: dict) -> None:
    """Replace `path` at once: a reader sees the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def this_process() -> dict:
    me = psutil.Process()
    return {"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}


def process_alive(process: dict | None) -> bool:
    """Whether the process that wrote a status still runs (another machine's is assumed to)."""
    if not process:
        return False
    if process["host"] != socket.gethostname():
        return True
    return is_alive(process["pid"], process["started"])


class RunWriter:
    """The one writer of a run folder. `open` creates it, or takes up one that is not finished."""

    def __init__(self, path: Path):
        self.path = path
        self._log = None

    @classmethod
    def open(
        cls,
        path: Path,
        config: RunConfig,
        corpus: dict,
        environment: dict,
        parent: Parent | None = None,
    ) -> RunWriter:
        """Raises RunError if another live process trains here, or the folder is foreign."""
        writer = cls(path)
        identity = path.name.rpartition("-")[2]
        if (path / "run.json").exists():
            run = Run(path)
            if run.id != identity:
                raise RunError(f"{path} holds run {run.id}, not {identity}; move it away")
            state = run.state if (path / "status.json").exists() else {}
            owner = state.get("process")
            if state.get("status") == "running" and process_alive(owner):
                if owner["pid"] != os.getpid():
                    raise RunError(
                        f"{path} is being trained by process {owner['pid']} on {owner['host']}; "
                        "wait for it or stop it"
                    )
            info = run.info
        else:
            if path.exists() and any(path.iterdir()):
                raise RunError(f"{path} exists but is no run folder; move it away")
            path.mkdir(parents=True, exist_ok=True)
            info = {
                "format": FORMAT,
                "id": identity,
                "config": config.to_dict(),
                "identity": config.identity(),
                "corpus": corpus,
                "environment": environment,
                "parent": asdict(parent) if parent else None,
                "segments": [],
            }
        info["segments"] = [*info["segments"], environment]
        write_json(path / "run.json", info)
        return writer

    def status(self, status: str, step: int, message: str = "", duration_s: float = 0.0, **more):
        if status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; use one of {', '.join(STATUSES)}")
        value = dict(status=status, step=step, message=message, duration_s=round(duration_s, 3))
        if status == "running":
            value["process"] = this_process()
        write_json(self.path / "status.json", value | more)

    def rewind(self, step: int) -> None:
        """Drop rows of `step` and later: they will be written again."""
        self.close()
        if (self.path / "metrics.jsonl").exists():
            kept = [row for row in Run(self.path).rows() if row["step"] < step]
            temporary = self.path / ".metrics.jsonl"
            temporary.write_text("".join(row_text(row) for row in kept))
            os.replace(temporary, self.path / "metrics.jsonl")

    def write(self, rows: Iterable[dict]) -> None:
        """Append rows and hand them to the system, so that a kill loses none of them."""
        if self._log is None:
            self._log = open(self.path / "metrics.jsonl", "a")  # noqa: SIM115 - closed by close()
        self._log.write("".join(row_text(row) for row in rows))
        self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def row_text(row: dict) -> str:
    """One strict JSON line: numbers with 9 significant digits (exact for fp32), null for NaN."""
    lost = list(row.get("nonfinite", ()))

    def clean(value, key):
        if isinstance(value, (list, tuple)):
            return [clean(v, key) for v in value]
        if isinstance(value, (np.ndarray, np.generic)):
            return clean(value.tolist(), key)
        if isinstance(value, float):
            if not math.isfinite(value):
                if key not in lost:
                    lost.append(key)
                return None
            return float(f"{value:.9g}")
        return value

    out = {k: clean(v, k) for k, v in row.items() if k != "nonfinite"}
    if lost:
        out["nonfinite"] = lost
    return json.dumps(out, allow_nan=False, separators=(",", ":")) + "\n"
