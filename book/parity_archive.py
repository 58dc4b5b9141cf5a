"""Archives of what tests measured: the GPU parity run, and the time of the kernel tests.

On a GPU, `pytest -m gpu tests --parity-json raw.json` and then
`python -m book.parity_archive gpu raw.json` keep every row of the table in `book/results/parity/`.
`python -m book.parity_archive tests` runs the quick kernel tests here and keeps their time in
`book/results/kernel-tests/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt2.hardware import device_name
from kernels.machine import driver_version
from kernels.numerics import Numerics, parse_numerics

from . import RESULTS, ROOT
from .evidence import Archive, latest

STORED = ("out", "dq", "dk", "dv")  # kept in the format of their site; the rest is fp32 or counts

NEEDED = ("gpu", "driver", "torch", "triton", "commit", "date", "duration_s", "passed", "failed")


def compact(raw: Mapping, **provenance) -> dict:
    """The table that the GPU tests wrote, with numbers cut to 4 digits and where it comes from.

    raw: {"provenance": {gpu, torch, triton, ...}, "rows": [{site, case, result, numbers...}]}.
    Raises ValueError unless NEEDED is all told, there or in `provenance`.
    """
    told = dict(raw["provenance"]) | {k: v for k, v in provenance.items() if v is not None}
    told |= {"machine": told.get("gpu"), "device": "cuda", "code": told.get("commit")}
    missing = [name for name in NEEDED if told.get(name) in (None, "")]
    if missing:
        raise ValueError(f"the run's {', '.join(missing)} must be told: see --help")
    return {"provenance": told, "rows": [{k: _cut(v) for k, v in r.items()} for r in raw["rows"]]}


def _cut(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


def save(told: Mapping, experiment: str, folder: Path = RESULTS) -> Path:
    """Write an archive, one row a line, under the name of its machine and date."""
    source = told["provenance"]
    name = re.sub(r"[^a-z0-9]+", "-", source["machine"].lower()).strip("-")
    path = folder / experiment / f"{name}-{source['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in told["rows"])
    head = json.dumps(source, indent=1, allow_nan=False)
    path.write_text(f'{{"provenance": {head},\n"rows": [\n{rows}\n]}}\n')
    return path


# -- what the parity run says ---------------------------------------------------------------------


def parity_rows(archive: Archive) -> list[dict]:
    """The rows that compare the Triton kernels with the emulator, quantity by quantity."""
    return [row for row in archive.rows if "max_ulp" in row]


def summary(archive: Archive) -> list[list[object]]:
    """One line per quantity: cases, failed, worst ulp, worst mismatch rate, signed mean range.

    O and gradients that their numerics store in fp32 have lines of their own.
    """
    groups: dict[str, list[dict]] = {}
    for row in parity_rows(archive):
        groups.setdefault(_label(row), []).append(row)
    lines = []
    for label, mine in sorted(groups.items(), key=lambda x: "in fp32" in x[0]):
        means = [row["signed_mean_ulp"] for row in mine]
        lines.append(
            [
                label,
                len(mine),
                sum(row["result"] != "ok" for row in mine),
                f"{max(row['max_ulp'] for row in mine):g}",
                f"{max(row['mismatched'] for row in mine):.3%}",
                f"{min(means):+.2g} to {max(means):+.2g}",
            ]
        )
    return lines


def _label(row: Mapping) -> str:
    """`out`, or `out` in fp32 where that is what the case's numerics ask for."""
    site, n = row["site"], parse_numerics(row["case"].split(" ")[0])
    stored = {"out": n.output, "delta_output": n.delta_output}.get(site, n.gradients)
    wide = site in (*STORED, "delta_output") and (not stored or stored.format.fraction_bits >= 23)
    return f"`{site}` in fp32" if wide else f"`{site}`"


def by_case(archive: Archive) -> list[list[str]]:
    """One line per case: the worst of O and the gradients. In alphabetical order."""
    lines = []
    rows = [r for r in parity_rows(archive) if r["site"] in STORED]
    for case in sorted({row["case"] for row in rows}):
        mine = [row for row in rows if row["case"] == case]
        differ = max(row["mismatched"] for row in mine)
        lines.append([f"`{case}`", f"{max(r['max_ulp'] for r in mine):g}", f"{differ:.3%}"])
    return lines


def law_rows(archive: Archive) -> list[dict]:
    """The rows that compare the two backends in law: both draw, each its own random bits."""
    return [row for row in archive.rows if row["site"] == "law"]


def by_law(archive: Archive) -> list[list[str]]:
    """One line per numerics: result, ratios of variances, largest rms of z, over O, dQ, dK, dV."""
    lines = []
    rows = law_rows(archive)
    for text in sorted({row["case"].split(" ")[0] for row in rows}):
        mine = [row for row in rows if row["case"].startswith(f"{text} ")]
        spread = [row["spread"] for row in mine]
        worst = max(row["rms_z"] for row in mine)
        result = "ok" if all(row["result"] == "ok" for row in mine) else "FAILED"
        lines.append(
            [f"`{text}`", result, f"{min(spread):.2f} to {max(spread):.2f}", f"{worst:.2f}"]
        )
    return lines


def told(archive: Archive) -> str:
    """Where, when, with what: one sentence or two."""
    p = archive.provenance
    note = f" ({p['note']})" if p.get("note") else ""
    return (
        f"Archived: {p['gpu']}, driver {p['driver']}, torch {p['torch']}, triton {p['triton']}, "
        f"{p['date']}, code {p['commit'][:12]}. "
        f"{p['passed']} tests passed and {p['failed']} failed in {p['duration_s']:.0f} s{note}."
    )


def other_rows(archive: Archive) -> list[list[str]]:
    """What the run measured besides: errors against float64, rounding functions, crafted bias."""
    lines = []
    for row in sorted(archive.rows, key=lambda row: (row["site"], row["case"])):
        if "max_ulp" not in row and row["site"] != "law":
            numbers = {k: v for k, v in row.items() if k not in ("site", "case", "result")}
            told = ", ".join(f"{k.replace('_', ' ')} {_number(v)}" for k, v in numbers.items())
            lines.append([row["site"], row["case"], row["result"], told])
    return lines


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def compared_numerics(archive: Archive) -> list[Numerics]:
    """The distinct numerics compared in ulps or in law; a case's name starts with their text."""
    rows = (*parity_rows(archive), *law_rows(archive))
    return [parse_numerics(text) for text in dict.fromkeys(r["case"].split(" ")[0] for r in rows)]


def compared_dtypes(archive: Archive) -> list[str]:
    """Dtypes of inputs, besides bf16, in the parity cases; they end the case's name."""
    last = (row["case"].split(" ")[-1] for row in parity_rows(archive))
    return sorted({word for word in last if word.startswith("float")})


# -- the time of the kernel tests -----------------------------------------------------------------


def time_tests(load: float | None = None) -> dict:
    """Run `pytest -m "not slow and not gpu" tests/kernels`; seconds and counts by test file."""
    load = os.getloadavg()[0] if load is None else load
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu"]
        started = time.monotonic()
        done = subprocess.run(
            [*command, f"--junitxml={report}", "tests/kernels"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        used = os.times()  # of child processes, and theirs
        if done.returncode:
            raise RuntimeError(f"the tests failed; nothing is kept:\n{done.stdout[-1500:]}")
        rows = junit_rows(report.read_text())
    cores = os.cpu_count()
    source = {
        "machine": f"{cores}-core {device_name('cpu')}",
        "date": datetime.date.today().isoformat(),
        "duration_s": round(seconds, 1),
        "cpu_s": round(used.children_user + used.children_system, 1),
        "load_at_start": round(load, 1),
        "code": _commit(),
    }
    return {"provenance": source, "rows": rows}


def junit_rows(text: str) -> list[dict]:
    """Test file, its tests that passed and were skipped, and their seconds; longest first."""
    files: dict[str, dict] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = case.get("classname", "").split(".")[-1]
        row = files.setdefault(name, {"file": name, "passed": 0, "skipped": 0, "seconds": 0.0})
        row["skipped" if case.find("skipped") is not None else "passed"] += 1
        row["seconds"] = round(row["seconds"] + float(case.get("time", 0)), 2)
    return sorted(files.values(), key=lambda row: -row["seconds"])


def longest(archive: Archive | None = None, most: int = 8) -> list[list[object]]:
    """The longest test files of the newest archive, and the others together."""
    archive = archive or latest("kernel-tests")
    if archive is None:
        return []
    rows, rest = archive.rows[:most], archive.rows[most:]
    lines = [[f"`{r['file']}`", r["passed"], r["skipped"], f"{r['seconds']:.1f}"] for r in rows]
    sums = [sum(row[name] for row in rest) for name in ("passed", "skipped", "seconds")]
    return [*lines, [f"{len(rest)} others", *sums[:2], f"{sums[2]:.1f}"]] if rest else lines


def total_time(archive: Archive | None = None) -> str:
    """The whole time, the machine, and how busy it was."""
    archive = archive or latest("kernel-tests")
    if archive is None:
        return "Not measured yet: python -m book.parity_archive tests"
    p = archive.provenance
    return (
        f"Archived: {p['duration_s']:.0f} s in all on {p['machine']}, {p['date']}, "
        f"code {p['code']}, while {p['load_at_start']:g} processes shared the machine; the tests "
        f"themselves computed for {p['cpu_s']:.0f} s."
    )


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m book.parity_archive", description=__doc__)
    kinds = p.add_subparsers(dest="kind", required=True)
    gpu = kinds.add_parser("gpu", help="keep the table of a GPU test run")
    gpu.add_argument("raw", type=Path, help="what pytest --parity-json wrote")
    for name in ("driver", "commit", "date"):
        gpu.add_argument(f"--{name}", help="unless it is this machine's, this commit, today")
    gpu.add_argument("--duration", type=float, help="seconds of the run, unless the table says")
    for name in ("passed", "failed"):
        gpu.add_argument(f"--{name}", type=int, help=f"tests that {name}, unless the table says")
    gpu.add_argument("--note", help="anything a reader should know, such as a busy machine")
    kinds.add_parser("tests", help="time the quick kernel tests here")
    p.add_argument("--results", type=Path, default=RESULTS, help="where archives go")
    args = p.parse_args(argv)
    if args.kind == "tests":
        print(save(time_tests(), "kernel-tests", args.results))
        return 0
    try:
        raw = json.loads(args.raw.read_text())
        told = compact(
            raw,
            driver=args.driver or raw["provenance"].get("driver") or driver_version(),
            commit=args.commit or _commit(),
            date=args.date or datetime.date.today().isoformat(),
            duration_s=args.duration,
            passed=args.passed,
            failed=args.failed,
            note=args.note,
        )
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {args.raw}: {error}", file=sys.stderr)
        return 2
    print(save(told, "parity", args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
