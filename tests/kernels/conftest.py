"""Kernel tests run in three ways: plainly, in Triton's interpreter, and on a GPU.

`interpreted` tests run where TRITON_INTERPRET was set before Python started (a plain run starts
one such process for all of them). `gpu` tests need a CUDA device.
"""

import contextlib
import os

import pytest
import torch


@pytest.fixture
def fault(monkeypatch):
    """`with fault(owner, name, replacement): check()`: with it put in, the check has to fail."""

    @contextlib.contextmanager
    def put_in(owner, name, replacement):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            with pytest.raises(AssertionError):
                yield

    return put_in


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: runs in Triton's interpreter only")


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
