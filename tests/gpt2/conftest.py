"""Lets the test files of this folder import `trainer_helpers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
