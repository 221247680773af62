"""Tokenise texts into a folder that pretraining maps into memory.

The data are files (jsonl, txt, csv, tsv, parquet; gz, bz2, xz or zst of them), folders or patterns of these, or a Hub
data set; they are read as a stream, so their size does not matter. The folder is complete or absent.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from modelcenter.command_line.arguments import Parser
from modelcenter.data.streams import open_rows
from modelcenter.data.token_files import is_tokens


def main(argv: Sequence[str]) -> None:
    """`modelcenter preprocess`. Raises ValueError for wrong data, tokenizer or folder."""
    p = Parser(prog="modelcenter preprocess", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", metavar="DATA", nargs="+", help="files, directories or glob patterns, or a Hub data set")
    p.add_argument("--tokenizer", required=True, help="Hub name or directory of the tokenizer")
    p.add_argument("--output", required=True, metavar="FOLDER", help="folder to create")
    p.add_argument("--text_column", help="column with the text (default: detected by name and content)")
    p.add_argument("--data_config", help="configuration of a Hub data set")
    p.add_argument("--split", default="train", help="split of the data (default: %(default)s)")
    p.add_argument(
        "--document", choices=("line", "paragraph", "file"), default="line",
        help="what counts as a document in a txt file: each line, lines up to the next empty one, or the whole file "
        "(default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--no_eos", action="store_true", help="do not put an end token after each document")
    p.add_argument(
        "--workers", type=int, default=0, help="processes that tokenise (default: 0, the tokenizer's threads)"
    )
    p.add_argument("--limit", type=int, help="stop after this many documents")
    args = p.read(list(argv))
    for name, least in (("workers", 0), ("limit", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            p.error(f"--{name}: got {value}, expected at least {least}")
    tokens = next((path for path in args.data if is_tokens(path)), None)
    if tokens is not None:
        raise ValueError(f"{tokens}: holds tokens already; pretraining reads it as --train_data {tokens}")
    source = open_rows(args.data, args.data_config, args.split, args.document)

    # Imported here, so that mistakes in the flags and the data take no time.
    from modelcenter.data.pretraining.preprocess import preprocess
    from modelcenter.hub.tokenizer import load_tokenizer

    began = time.perf_counter()
    show = _Progress() if sys.stderr.isatty() else None
    with _terminable():
        file = preprocess(
            source,
            load_tokenizer(args.tokenizer),
            args.output,
            text_column=args.text_column,
            eos=not args.no_eos,
            workers=args.workers,
            limit=args.limit,
            progress=show,
        )
    about, seconds = file.about, time.perf_counter() - began
    skipped = f", {about['skipped']:,} empty rows skipped" if about["skipped"] else ""
    size = "2" if about["dtype"] == "<u2" else "4"
    print(
        f"{args.output}: {about['documents']:,} documents, {about['tokens']:,} tokens of {size} bytes{skipped}; "
        f"{about['tokens'] / seconds:,.0f} tokens a second"
    )


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM, as schedulers send it, end the work like an error, so that nothing half-written stays."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, documents: int, tokens: int) -> None:
        if time.perf_counter() - self.last > 0.5:
            self.last = time.perf_counter()
            print(f"\r{documents:,} documents, {tokens:,} tokens", end="\r", file=sys.stderr, flush=True)
