"""Compare a model with another implementation of it: loss, logits, gradients, and the first layer that differs.

`modelcenter compare CHECKPOINT` runs a checkpoint here and in transformers; `modelcenter compare A B` runs two
checkpoints here. The parity tests (modelcenter.testing) use the same functions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from modelcenter import registry
from modelcenter.command_line.arguments import Parser
from modelcenter.compare.checkpoints import compare_checkpoints


def main(argv: Sequence[str]) -> int:
    """`modelcenter compare`; returns the exit status: 0 equal, 1 different. Raises ValueError for wrong flags."""
    parser = Parser(prog="modelcenter compare", description=__doc__)
    parser.add_argument("first", metavar="A", help="run or checkpoint: Hub name, directory or distributed checkpoint")
    parser.add_argument(
        "second", metavar="B", nargs="?", help="another checkpoint (default: A, exported and run in transformers)"
    )
    parser.add_argument("--data", help="file with texts (txt, json, jsonl, csv, tsv, parquet; default: random tokens)")
    parser.add_argument("--task", choices=registry.TASKS, help="head to compare (default: the one in the checkpoint)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest allowed difference (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.read(list(argv))
    from modelcenter.hub.run_folder import find_step

    first = str(find_step(args.first, None))
    second = None if args.second is None else str(find_step(args.second, None))
    result = compare_checkpoints(first, second, data=args.data, task=args.task, tolerance=args.tolerance)
    if args.json:
        print(json.dumps({**asdict(result), "equal": result.equal}))
    else:
        print(result)
    return 0 if result.equal else 1
