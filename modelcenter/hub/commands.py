"""The verbs `convert`, `verify` and `export`: their flags and their output."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from engine.memory import left_uncollected
from modelcenter.command_line.arguments import Parser, spelling


def _parser(verb: str, about: str) -> Parser:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"modelcenter {verb}", description=about, formatter_class=form)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _where_flags(parser: Parser) -> None:
    parser.add_argument("--config", metavar="NAME|FILE", help="config.json to use instead of the checkpoint's")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--token", help="Hub access token (default: HF_TOKEN, or the token of `hf auth login`)")
    parser.add_argument("--cache_dir", metavar="DIR", help="cache of downloads (default: huggingface_hub's)")
    parser.add_argument("--local_files_only", action="store_true", help="use cached Hub models only")


def _source_flags(parser: Parser) -> None:
    _where_flags(parser)
    parser.add_argument(
        "--prefix", default="", metavar="P", help="prefix of tensor names in the files, such as 'module.'"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="GLOB",
        help="tensors to leave out, or of heads that may be absent; can be repeated",
    )


@functools.cache
def _conversion() -> Any:
    """Import the package that converts, with its objects excluded from garbage collection, which in each worker and at
    exit would take half as long as the import."""
    with left_uncollected():
        from modelcenter.hub import conversion
    return conversion


def _work_flags(parser: Parser) -> None:
    parser.add_argument(
        "--dtype",
        metavar="D",
        help="convert floating-point tensors to float32, bfloat16 or float16 (default: unchanged)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of processes (default: one per processor, at most 8)"
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="largest size of one file (default: %(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="read all files back and compare their hashes")


def _layer_numbers(word: str) -> list[int]:
    """The numbers of one word of a flag: "0,2,4" or "3"."""
    try:
        return [int(number) for number in word.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected numbers of layers, such as 0,2,4") from None


def _kept(args: argparse.Namespace) -> Any:
    """The layers that the flags keep; None: all."""
    from modelcenter.convert.kept_layers import KeptLayers

    given = [getattr(args, name, None) for name in ("keep_layers", "keep_decoder_layers")]
    return KeptLayers.of(*([n for word in words for n in word] if words else None for words in given))


def _request(args: argparse.Namespace) -> Any:
    from modelcenter.hub.conversion.checkpoint import Request
    from modelcenter.hub.remote.download import HubOptions

    options = HubOptions(args.revision, args.token, args.cache_dir, args.local_files_only)
    prefix, ignore = getattr(args, "prefix", ""), tuple(getattr(args, "ignore", ()))
    return Request(args.config, prefix, ignore, options, _kept(args))


def _work(args: argparse.Namespace) -> dict[str, Any]:
    work = {name: getattr(args, name) for name in ("dtype", "workers", "max_shard_size", "verify")}
    return {**work, "request": _request(args), "progress": not args.json or sys.stderr.isatty()}


def _show(args: argparse.Namespace, result: Any, **more: Any) -> None:
    print(json.dumps({**asdict(result), **more}) if args.json else result)


def convert_main(argv: Sequence[str]) -> int:
    """Run the verb `convert`; returns the exit status."""
    about = (
        "Convert a checkpoint, tensor by tensor, with all its heads.\n\n"
        "SRC is a name from `modelcenter list`, a Hub name, a Hugging Face directory (safetensors or .bin), a\n"
        "distributed or training checkpoint, or a run folder. DST appears only once it is complete. To continue an\n"
        "interrupted conversion, run the same command again."
    )
    parser = _parser("convert", about)
    parser.add_argument("source", metavar="SRC", help="checkpoint to convert")
    parser.add_argument("target", metavar="DST", help="directory to write")
    parser.add_argument("--to", required=True, choices=("hf", "distributed"), help="format of DST")
    _source_flags(parser)
    for flag, of in (("--keep_layers", "; for an encoder-decoder, the encoder's"), ("--keep_decoder_layers", "")):
        whose = "a decoder's layers" if "decoder" in flag else "the layers"
        parser.add_argument(
            flag,
            nargs="+",
            type=_layer_numbers,
            metavar="N",
            help=f"keep only {whose} with these numbers, from 0, such as 0,2,4{of} (default: all)",
        )
    _work_flags(parser)
    args = parser.read(list(argv))
    convert = _conversion().convert
    _show(args, convert(args.source, args.target, args.to, **_work(args)))
    return 0


def export_main(
    argv: Sequence[str],
    export_adapter: Callable[..., str | None] | None = None,
    merge_adapter: Callable[..., str] | None = None,
) -> int:
    """Run the verb `export`.

    Args:
        export_adapter: `export_adapter(path, target, keep, unused, **options)` exports a run or checkpoint that trained
            an adapter and returns the text to print, or None for anything else. unused: given flags that only a
            conversion uses.
        merge_adapter: `merge_adapter(base, adapter, target, **options)` writes a base with a saved adapter merged into
            it and returns the text to print.
    """
    parser = _export_parser(named="--output" in {spelling(word).partition("=")[0] for word in argv})
    args = parser.read(list(argv))
    _check_adapter_flags(parser, args)
    export = _conversion().export
    from modelcenter.hub.run_folder import find_step

    source = find_step(args.source, args.step)
    path = Path(expanduser(source))
    done = {"source": args.source, "target": args.target, "format": "adapter" if args.keep_adapter else "hf"}
    message = None
    if args.adapter is not None and merge_adapter is not None:
        names = ("task", "labels", "dtype", "max_shard_size", "config", "prefix", "ignore")
        options = {name: getattr(args, name) for name in names}
        message = merge_adapter(source, args.adapter, args.target, options=_request(args).options, **options)
        done["adapter"] = args.adapter
    elif export_adapter is not None and path.is_dir():
        options = {} if args.keep_adapter else {"dtype": args.dtype, "max_shard_size": args.max_shard_size}
        message = export_adapter(
            path, Path(expanduser(args.target)), args.keep_adapter, _conversion_flags(parser, args), **options
        )
    if message is not None:
        print(json.dumps(done) if args.json else message)
        return 0
    if args.keep_adapter:
        raise ValueError(f"keep_adapter: {args.source} does not belong to a run with an adapter (--lora_rank)")
    _show(args, export(args.source, args.target, step=args.step, **_work(args)))
    return 0


def _export_parser(named: bool) -> Parser:
    """named: DST is given as --output, not as a positional argument."""
    about = (
        "Write a model as a Hugging Face directory.\n\n"
        "MODEL is a run folder or a checkpoint. For a run, this is its final model, its last checkpoint if it has no\n"
        "final model yet, or the checkpoint that --step names.\n\n"
        "With --adapter, MODEL is the base of a LoRA adapter, which is merged into it; it may also be a Hub name:\n"
        "  modelcenter export openai-community/gpt2 --adapter my-adapter --output merged"
    )
    parser = _parser("export", about)
    parser.add_argument("source", metavar="MODEL", help="run folder or checkpoint; with --adapter, the adapter's base")
    if not named:
        parser.add_argument("target", metavar="DST", help="directory to write; or --output DST")
    parser.add_argument("--output", dest="target", metavar="DST", required=named, help=argparse.SUPPRESS)
    parser.add_argument("--step", metavar="N|best|last", help="which checkpoint of a run (default: its final model)")
    _source_flags(parser)
    _work_flags(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--merge", action="store_true", help="for a run with an adapter: write the merged model (the default)"
    )
    how.add_argument(
        "--keep_adapter", action="store_true", help="for a run with an adapter: write only the adapter, for peft"
    )
    parser.add_argument(
        "--adapter",
        metavar="DIR|NAME",
        help="LoRA adapter in peft's format to merge into MODEL: a directory, or a Hub name (its main branch)",
    )
    parser.add_argument("--task", help="with --adapter: head of the model (default: what the adapter was trained for)")
    parser.add_argument(
        "--labels", nargs="+", metavar="NAME", help="with --adapter: names of its classes, in order, if it has a head"
    )
    return parser


def _check_adapter_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that only works with --adapter, or only without it."""
    idle = ["task", "labels"] if args.adapter is None else ["workers", "verify", "keep_adapter"]
    why = "--adapter merges in memory, in one process; leave it out"
    if args.adapter is None:
        why = "it works only with --adapter; give that too, or leave it out"
    for name in idle:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name}: {why}")


def _conversion_flags(parser: Parser, args: argparse.Namespace) -> list[str]:
    """The flags given to `export` that the export of an adapter does not use."""
    names = "config prefix ignore verify workers revision token cache_dir local_files_only".split()
    names += ["dtype", "max_shard_size"] if args.keep_adapter else []
    return [f"--{name}" for name in names if getattr(args, name) != parser.get_default(name)]


def verify_main(argv: Sequence[str]) -> int:
    """Run the verb `verify`; returns the exit status, 1 if anything differs."""
    about = (
        "Compare two checkpoints of any format, exactly. Both are read as Hugging Face tensors. Tensors that are\n"
        "renamed, or that hold no values of their own, are listed. The exit status is 1 if anything differs."
    )
    parser = _parser("verify", about)
    parser.add_argument("first", metavar="A", help="a checkpoint")
    parser.add_argument("second", metavar="B", help="the checkpoint to compare it with")
    _where_flags(parser)
    parser.add_argument("--target_revision", help="revision of B (default: that of --revision)")
    args = parser.read(list(argv))
    from modelcenter.hub.verify import verify

    request = _request(args)
    options = replace(request.options, revision=args.target_revision or args.revision)
    second = replace(request, options=options)
    result = verify(args.first, args.second, request=request, second_request=second, progress=not args.json)
    _show(args, result, same=result.same)
    return 0 if result.same else 1
