"""Shared by all tests: one thread and a fixed seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
