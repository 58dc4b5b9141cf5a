"""Sphinx extension: formulas on every page, with MathJax from an installed package.

The pages must work with no network. MathJax comes as one file whose glyphs are paths, so that
nothing else is ever loaded. Sphinx alone would leave it out of pages whose only formulas are those
of captions.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

PACKAGE = "sphinx-mathjax-offline"
FILE = "tex-svg-full.js"


def mathjax() -> Path:
    """The installed file. Raises FileNotFoundError with the remedy."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise FileNotFoundError(
            f"{PACKAGE} is not installed, and formulas need it; "
            "run: pip install -r requirements.txt"
        )
    return Path(spec.origin).parent / "static" / "mathjax" / FILE


def setup(app) -> dict:
    """Called by Sphinx."""
    source = mathjax()
    app.set_html_assets_policy("always")
    app.config.mathjax_path = f"mathjax/{FILE}"

    def put(app, error):
        if error is None:
            target = Path(app.outdir) / "_static" / "mathjax" / FILE
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    app.connect("build-finished", put)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
