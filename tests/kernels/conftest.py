"""Kernel tests run in three ways: plainly, in Triton's interpreter, and on a GPU.

`interpreted` tests run where TRITON_INTERPRET was set before Python started (a plain run starts
one such process for all of them). `gpu` tests need a CUDA device. `--parity-json PATH` writes the
table of measured differences that the end of the run prints.
"""

import json
import os
import platform

import pytest
import torch

_ROWS = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--parity-json", default=None, help="write the parity table to this file")


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: runs in Triton's interpreter only")
    config.stash[_ROWS] = []


def pytest_collection_modifyitems(config, items):
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    usable = torch.cuda.is_available() and not interpreting
    kept, dropped = [], []
    for item in items:
        if item.get_closest_marker("interpreted") and not interpreting:
            dropped.append(item)
            continue
        if item.get_closest_marker("gpu") and not usable:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture
def parity_table(request):
    """Call with site, case, result and numbers: one row of the table at the end of the run."""

    def add(site: str, case: str, result: str, **numbers):
        request.config.stash[_ROWS].append(dict(site=site, case=case, result=result, **numbers))

    return add


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_ROWS, [])
    path = config.getoption("--parity-json", default=None)
    if rows:
        terminalreporter.section("parity: site x case")
        for row in rows:
            numbers = {k: v for k, v in row.items() if k not in ("site", "case", "result")}
            told = "  ".join(f"{k}={_short(v)}" for k, v in numbers.items())
            terminalreporter.write_line(
                f"{row['site']:<14} {row['case']:<56} {row['result']:<6} {told}"
            )
    if path:
        with open(path, "w") as file:
            json.dump(dict(provenance=_provenance(), rows=rows), file, indent=1, default=str)


def _short(value):
    return f"{value:.3g}" if isinstance(value, float) else value


def _provenance():
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict(gpu=gpu, torch=torch.__version__, triton=version, python=platform.python_version())
