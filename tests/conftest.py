"""Shared by all tests: one thread, a fixed seed, GPU tests only where there is a GPU, one table.

`--parity-json PATH` writes the table of measured differences that the end of a run prints, also
when pytest-xdist spreads the tests over processes.
"""

import json
import platform
import time

import pytest
import torch

from kernels.machine import driver_version

_ROWS = pytest.StashKey()
_STARTED = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--parity-json", default=None, help="write the parity table to this file")


def pytest_configure(config):
    config.stash[_ROWS] = []
    config.stash[_STARTED] = time.monotonic()
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers(config))


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu`, files without a GPU test stay unread: a GPU box may lack what they import."""
    if config.option.markexpr != "gpu":
        return None
    folder = collection_path.is_dir()
    files = collection_path.rglob("test_*.py") if folder else [collection_path]
    return None if any("mark.gpu" in file.read_text() for file in files) else True


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# -- the table ------------------------------------------------------------------------------------


@pytest.fixture
def parity_table(request):
    """Call with site, case, result and numbers: one row of the table at the end of the run."""

    def add(site: str, case: str, result: str, **numbers):
        request.config.stash[_ROWS].append(dict(site=site, case=case, result=result, **numbers))

    return add


class _Workers:
    """Rows of pytest-xdist's processes, gathered by the one that started them."""

    def __init__(self, config):
        self.config = config

    def pytest_testnodedown(self, node):
        self.config.stash[_ROWS] += getattr(node, "workeroutput", {}).get("parity_rows", [])


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity_rows"] = session.config.stash[_ROWS]


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_ROWS, [])
    path = config.getoption("--parity-json")
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
            told = dict(provenance=_provenance(terminalreporter, config), rows=rows)
            json.dump(told, file, indent=1, default=str)


def _short(value):
    return f"{value:.3g}" if isinstance(value, float) else value


def _provenance(reporter, config):
    counts = {name: len(reporter.stats.get(name, ())) for name in ("passed", "failed")}
    duration = round(time.monotonic() - config.stash[_STARTED], 1)
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = dict(torch=torch.__version__, triton=version, python=platform.python_version())
    return dict(gpu=gpu, driver=driver_version(), **versions, duration_s=duration, **counts)
