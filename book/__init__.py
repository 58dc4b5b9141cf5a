"""The book: chapters, figures, widgets and the build. Uses `gpt2` and `kernels`.

A chapter may be started from any folder (JupyterLab, papermill, `make book`), so it takes its
folders from here: `book.RUNS` for training runs, `book.DATA` for corpora, `book.RESULTS` for
archived evidence.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
DATA = ROOT / "data"
RESULTS = ROOT / "book" / "results"
