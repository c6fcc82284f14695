"""Make token files of text, and look at them.

  python -m mics.data prepare --from corpus/ --to /fsx/tokens --tokenizer tokenizer.json --validation 0.01
  python -m mics.data show /fsx/tokens/train.bin

Exit codes: 0 done; 2 the input cannot be used (one line on stderr says why); 130 stopped, nothing is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mics.data.files import find_files
from mics.data.prepare import Recipe, prepare
from mics.data.progress import Meter
from mics.data.tokenizer import vocabulary_of
from mics.errors import RunRefusedError

REFUSED = 2
STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.command == "prepare":
            _prepare(options)
        else:
            _show(options)
    except RunRefusedError as error:
        sys.stderr.write(f"mics: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("mics: stopped\n")
        return STOPPED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mics.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser(
        "prepare",
        help="text and JSON lines to token files",
        description="Read text files (each is one document) and .jsonl files (each line is one), also as .gz, and "
        "write FOLDER/train.bin with its index train.json. After each document stands an end-of-document token. The "
        "result does not depend on the number of workers, and FOLDER appears only once it is whole.",
    )
    make.add_argument("--from", dest="source", nargs="+", required=True, metavar="PATH", help="files and folders")
    make.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
    make.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|FILE",
        help="bytes (the default), or a tokenizer.json; that needs pip install 'micsctl[tokenizers]'",
    )
    make.add_argument("--end", metavar="TOKEN", help="the token after each document; default: the usual names")
    make.add_argument("--field", default="text", metavar="NAME", help="field of a JSON line with the text (text)")
    make.add_argument(
        "--validation", type=_share, default=0.0, metavar="SHARE", help="share of the documents for validation.bin (0)"
    )
    make.add_argument(
        "--workers", type=_positive, default=os.cpu_count(), metavar="N", help="processes; default: one for each core"
    )
    look = commands.add_parser(
        "show", help="what a corpus is", description="Print files, formats, tokens, documents and vocabulary."
    )
    look.add_argument("paths", nargs="+", metavar="PATH", help="files and folders, as in train.data")
    look.add_argument(
        "--check", action="store_true", help="read everything: compare checksums, find the largest token id"
    )
    return parser


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return share


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _prepare(options: argparse.Namespace) -> None:
    started = time.monotonic()
    vocabulary = vocabulary_of(options.tokenizer, options.end)
    recipe = Recipe(options.tokenizer, options.field, vocabulary, options.validation)
    meter = Meter(sys.stderr)
    files = find_files(options.source, os.environ, "--from")
    try:
        tallies = prepare(files, options.to, recipe, workers=options.workers, progress=meter.show)
    except OSError as error:
        raise RunRefusedError(str(error)) from error
    finally:
        meter.end()
    for part, tally in tallies.items():
        print(f"{options.to / part}.bin: {tally.tokens:,} tokens, {tally.documents:,} documents")
    print(f"vocabulary {vocabulary.size:,} ({vocabulary.tokenizer}), {time.monotonic() - started:.0f} s")


def _show(options: argparse.Namespace) -> None:
    from mics.data.formats import open_file
    from mics.data.show import check, describe

    pieces = [open_file(path) for path in find_files(options.paths, os.environ, "show")]
    for line in describe(pieces):
        print(line)
    if options.check:
        for piece in pieces:
            print(check(piece))


if __name__ == "__main__":
    sys.exit(main())
