"""Prepare a corpus ahead of time: `python -m gpt2.prepare --preset mini`.

Training prepares what it needs by itself; this command does it alone, for a large corpus or for
another machine. It runs on all cores, shows progress, and continues after any interruption when
the same command is given again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .build import build_corpus
from .config import ConfigParser, add_arguments, config_from_args
from .data import Corpus, load_corpus, source_plan
from .schema import RunConfig

_EXAMPLES = """examples:
  python -m gpt2.prepare --preset mini
  python -m gpt2.prepare --corpus 'files:texts/**/*.txt' --tokenizer bpe:4096
  python -m gpt2.prepare --preset paper --out data/owt      then train with --corpus bin:data/owt
"""


def prepare(config: RunConfig, out=None, cache_dir="data", progress: bool = True) -> Corpus:
    """Build (or find) and check the corpus of a config; returns it loaded.

    out: a folder of its own, which `bin:FOLDER` and nanoGPT can read; None: the cache.
    Raises what `load_corpus` raises.
    """
    if out is None:
        return load_corpus(config, cache_dir, progress)
    if config.corpus.startswith("bin:"):
        raise ValueError(
            f"corpus={config.corpus} is prepared already; leave --out away to check it"
        )
    plan, open_source = source_plan(config)
    build_corpus(open_source, plan, out, progress)
    return load_corpus(config.at(corpus=f"bin:{out}"), cache_dir, progress)


def describe(corpus: Corpus) -> str:
    """A few lines that say what a corpus holds."""
    info, folder = corpus.info, corpus.folder
    lines = [
        f"{folder.path}: {info['source']}, tokenizer {info['tokenizer']}, "
        f"{info['vocabulary']:,} ids ({folder.dtype})"
    ]
    for split in ("train", "held_out"):
        counts = [f"{n:,} {what}" for what, n in info[split].items() if n is not None]
        lines.append(f"  {split.replace('_', ' '):9} {', '.join(counts)}")
    return "\n".join([*lines, f"  sha256    {corpus.sha256}"])


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0, or 2 after a sentence on stderr."""
    parser = ConfigParser(
        prog="python -m gpt2.prepare", description=__doc__.split("\n\n")[1], epilog=_EXAMPLES
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder to write [in the cache]")
    parser.add_argument("--cache", metavar="DIR", default="data", help="cache of corpora [data]")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_arguments(parser, groups=("data",))
    args = parser.parse_args(arguments)
    try:
        corpus = prepare(config_from_args(args), args.out, args.cache, progress=not args.quiet)
    except (ValueError, OSError, ImportError) as error:
        print(f"gpt2.prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpt2.prepare: interrupted; the same command continues", file=sys.stderr)
        return 130
    print(describe(corpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
