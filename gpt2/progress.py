"""Progress of a run: a bar on a terminal, a few plain lines everywhere else.

Notebooks and logs get at most about `LINES` lines a run, so that papermill's output stays small.
"""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LINES = 20
SECONDS = 5.0  # between two plain lines at least


class Progress:
    """Call `update` after each flush of a trainer; `say` for single sentences."""

    def __init__(self, total: int, start: int, enabled: bool, name: str = ""):
        self.total, self.start, self.enabled, self.name = total, start, enabled, name
        self.bar = None
        self._last, self._printed = start, time.monotonic()
        if enabled and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)

    def say(self, sentence: str) -> None:
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.write(sentence)
        else:
            print(sentence, flush=True)

    def update(self, step: int, text: str) -> None:
        """step: updates done; text: loss, speed and so on."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.n = step
            self.bar.set_postfix_str(text)
            return
        now = time.monotonic()
        enough = step - self._last >= self.total / LINES and now - self._printed >= SECONDS
        if enough or step >= self.total:
            left = (self.total - step) * (now - self._printed) / max(1, step - self._last)
            tail = f"  {left:.0f} s left" if step < self.total else ""
            print(f"{self.name}step {step}/{self.total}  {text}{tail}", flush=True)
            self._last, self._printed = step, now

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def speed_text(tokens_per_s: float) -> str:
    """'912 tokens/s', '52.3 k tokens/s', '1.94 M tokens/s'."""
    for size, unit, digits in ((1e6, " M", 2), (1e3, " k", 1)):
        if tokens_per_s >= size:
            return f"{tokens_per_s / size:.{digits}f}{unit} tokens/s"
    return f"{tokens_per_s:.0f} tokens/s"
