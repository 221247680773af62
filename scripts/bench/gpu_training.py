"""A training step on a GPU in bf16, compared with Trainer's: utilisation, memory and time.

The cases:

- BERT-large and T5-large on rows of realistic, ragged lengths up to 512, packed here and padded in the peer; BERT-large
  also on four times as many rows, on full rows, with and without dropout, and within 11 GB of memory;
- both on four rows of 32 tokens, whose kernels take almost no time, to measure each side's Python overhead per step;
- a GPT with 1.3 billion parameters on full rows of 2,048 tokens (four, as many as the peer can hold, and twelve), with
  and without dropout, and on ragged rows; a Llama of that size on four full rows, with recompute="cheap", and on twelve
  without;
- the same GPT with its optimizer's states on the host, which measures the host's threads and the bus;
- a GPT with 13 billion parameters (40 layers, 5,120 wide, 512 tokens) and 8-bit moments, which takes 103 GB, and 29 GB
  for activations.

The peer is transformers' model as Trainer runs it: fp32 weights, bf16 autocast, SDPA, fused AdamW; if liger-kernel is
installed and supports the model (not GPT-2), also with its kernels. --compiled adds both sides under torch.compile.
The peer keeps up to three times as much of each layer, and both sides take as many rows as it can hold in 78 GiB.

A time is that of one step in an uninterrupted series, as in training, so that the host may be ahead of the GPU. In
results from before 27 November 2026, the host waited for the GPU after each step.

Each contender has its own process. The processes of a case import their packages at the same time, and then run one
after another. A GPU slows down as it warms up, so this project's fastest variant is measured before the peers and again
after them, and the ratios use the mean of both. Initial values are each side's own. Utilisation is the model's
arithmetic at real tokens (scripts/bench/lib/flops.py), relative to the rate that the GPU's manufacturer states, and to
the rate of bf16 products measured in the same run.

    python scripts/bench/gpu_training.py --output result.json [--cases bert-large gpt-1.3b]
"""

import argparse
import importlib
import importlib.util
import math
import re
import statistics
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, finish, fraction, gpu, keep, parse, parser, steps, summary, workloads
from scripts.bench.lib.prepared import Prepared, serve


class Case(NamedTuple):
    """A model, its rows, and its target."""

    model_type: str
    shape: dict[str, Any]
    rows: int
    length: int
    ragged: bool = False
    peer: bool = True
    states: str = ""  # "8 bits" or "host": the optimizer, with parameters in bf16
    liger: bool = False  # liger-kernel supports the model
    recompute: str = "none"
    cap_gb: float | None = None
    needs_gb: float = 0.0  # of the GPU's memory; 0: 78 GiB are enough
    utilisation: float | None = None
    speed: float | None = None  # target ratio to the best peer


BERT = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
GPT = {"n_layer": 24, "n_embd": 2048, "n_head": 16, "n_positions": 2048}
NO_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
              "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}  # fmt: skip
LLAMA = {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
         "intermediate_size": 5504, "max_position_embeddings": 2048, "vocab_size": 32000}  # fmt: skip
T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16,
      "decoder_start_token_id": 0}  # fmt: skip
OURS, PEER = "modelcenter", "transformers"
AGAIN = ", again"
IN_A_ROW = 3  # steps between two synchronisations
CASES = {
    "bert-large": Case("bert", BERT, 64, 512, ragged=True, utilisation=0.5, speed=1.5),
    "bert-large, 256 rows": Case("bert", BERT, 256, 512, ragged=True, peer=False, utilisation=0.5),
    "bert-large, full rows": Case("bert", BERT, 64, 512, utilisation=0.5),
    "bert-large, full rows, no dropout": Case("bert", BERT | NO_DROPOUT["bert"], 64, 512, peer=False, utilisation=0.5),
    "bert-large, 11 GB": Case("bert", BERT, 8, 512, peer=False, cap_gb=11.0),
    "bert-large, 4 short rows": Case("bert", BERT, 4, 32, speed=1.0),
    # The peer keeps 188 kB per token and layer: 8 rows would take 105 GB, these take 63.
    "gpt-1.3b": Case("gpt2", GPT, 4, 2048, speed=1.15),
    "gpt-1.3b, 12 rows": Case("gpt2", GPT, 12, 2048, peer=False, utilisation=0.55),
    "gpt-1.3b, 12 rows, no dropout": Case("gpt2", GPT | NO_DROPOUT["gpt2"], 12, 2048, peer=False, utilisation=0.55),
    "gpt-1.3b, ragged": Case("gpt2", GPT, 8, 2048, ragged=True, speed=2.0),  # the longest has 813 tokens
    # Liger's kernels keep little; "cheap" keeps less, and is still faster.
    "llama-1.3b": Case("llama", LLAMA, 4, 2048, liger=True, speed=1.15, recompute="cheap"),
    "llama-1.3b, 12 rows": Case("llama", LLAMA, 12, 2048, peer=False, utilisation=0.55),
    "gpt-1.3b, states on the host": Case("gpt2", GPT, 8, 2048, peer=False, states="host"),
    "t5-large": Case("t5", T5, 32, 512, ragged=True, speed=2.5),  # set from the first run: 2.6 to 3.0
    "t5-large, 4 short rows": Case("t5", T5, 4, 32, speed=1.0),
    "gpt-13b, 8-bit states": Case("gpt2", {"n_layer": 40, "n_embd": 5120, "n_head": 40, "n_positions": 512}, 8, 512,
                                  peer=False, states="8 bits", needs_gb=132.0, utilisation=0.35),
}  # fmt: skip
TASKS = {"bert": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq-lm"}
SMALL: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128},
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_head": 2},
    "llama": {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
              "intermediate_size": 128},
    "t5": {"vocab_size": 320, "d_model": 64, "d_ff": 128, "num_heads": 2, "num_decoder_layers": 1},
}  # fmt: skip


def main() -> None:
    p = gpu.add_flags(parser(__doc__, rounds=8))
    usual = [name for name in CASES if "13b" not in name]
    p.add_argument("--cases", nargs="+", choices=CASES, default=usual, help=f"(default: {', '.join(usual)})")
    p.add_argument(
        "--compiled", action="store_true", help="also measure both sides under torch.compile, which takes minutes"
    )
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parse(p)
    if args.child:
        (case,) = (CASES[name] for name in args.cases)
        import_all(case)
        serve(lambda told: measure(args, case, *told))
        return
    limits = gpu.limits(args.device)
    from modelcenter.training.monitoring.flops import published_peak as by_name

    rate = by_name(gpu.name(args.device))
    promised = rate and rate / 1e12  # dense bf16 TFLOP/s
    numbers: dict[str, Any] = {"device": gpu.name(args.device), "promised_tflops": promised, **limits}
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in args.cases:
        case, done = CASES[name], list(rows)
        memory = gpu.memory_gb(args.device)
        if case.needs_gb > memory and not args.quick:  # it would run out of memory after minutes
            notes.append(f"{name}: left out, it needs {case.needs_gb:.0f} GB and this GPU has {memory:.0f}")
            continue
        found: dict[str, Any] = {}
        numbers[name] = found
        with prepared(args, name) as processes:
            for turn in turns(case, args.compiled, found):
                notes += take_turn(processes, name, turn, found)
                rows = [*done, *table(name, case, settled(found), limits["bf16_gemm_tflops"], promised)]
                keep(args, "gpu_training", numbers, rows, notes, limits=limits)
    finish(args, "gpu_training", numbers, rows, notes, limits=limits)


def take_turn(processes: Prepared, name: str, turn: tuple[str, str], found: dict[str, Any]) -> list[str]:
    """Add the result of a turn of a case to `found`. Returns notes: a failure, or the time of a second measurement."""
    who = ", ".join(turn)
    first = found.get(who)
    key = f"{who}{AGAIN if first else ''}"
    print(f"{name}, {key}: started", file=sys.stderr, flush=True)  # names the contender, if this hangs
    try:
        found[key] = processes.run(turn)
    except RuntimeError as error:  # such as a lack of memory or of a kernel: the rest is still measured
        print(error, file=sys.stderr, flush=True)
        return [f"{name}, {key}: {reason(str(error))[:300]}"]
    print(f"{name}, {key}: {summary(found[key])}", file=sys.stderr, flush=True)
    if not first:
        return []
    return [f"{name}: a step of {who} took {first['ms']} ms before the peers and {found[key]['ms']} ms after them"]


def turns(case: Case, compiled: bool, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The turns of a case: this project, the peers, and again this project's fastest variant in `found`."""
    ways = ["plain", "compiled"] if compiled else ["plain"]
    liger = ["Liger"] if case.liger and importlib.util.find_spec("liger_kernel") else []
    our_ways = [f"recompute {case.recompute}" if case.recompute != "none" else "plain", *ways[1:]]
    for how in our_ways:
        yield OURS, how
    if not case.peer:
        return
    for how in (*ways, *liger):
        yield PEER, how
    if measured := [how for how in our_ways if f"{OURS}, {how}" in found]:
        yield OURS, min(measured, key=lambda how: found[f"{OURS}, {how}"]["ms"])


def prepared(args: Any, name: str) -> Prepared:
    """A process for each turn of a case."""
    flags = ["--cases", name, "--device", args.device, "--rounds", str(args.rounds), "--child"]
    case = CASES[name]
    count = len(list(turns(case, args.compiled, {}))) + case.peer  # this project again
    return Prepared([__file__, *flags, *(["--quick"] if args.quick else [])], count, args.threads)


def import_all(case: Case) -> None:
    """Import what either side needs for a case, without touching the GPU."""
    for name in ("torch", "engine.parallel.shard", "modelcenter.hub.load", "modelcenter.compare"):
        importlib.import_module(name)
    importlib.import_module(f"transformers.models.{case.model_type}.modeling_{case.model_type}")


def reason(said: str) -> str:
    """The line with the error; others may follow it, such as a warning about a process group that was not destroyed."""
    lines = said.strip().splitlines()
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def table(
    name: str, case: Case, found: dict[str, Any], measured: float, promised: float | None
) -> list[dict[str, Any]]:
    """found: the result of `settled` for the contenders that finished."""
    ours, theirs = ({who: one for who, one in found.items() if who.startswith(side)} for side in (OURS, PEER))
    rows = []
    for who, one in found.items():
        rate = one["gflop"] / one["ms"]
        rows.append(fraction(f"{name}: {who}", rate / measured, "measured bf16 products", None))
        if promised is not None:
            target = case.utilisation if one["ms"] == least(ours, "ms") else None
            rows.append(fraction(f"{name}: {who}", rate / promised, "promised bf16 products", target))
    for who, one in theirs.items() if ours else ():
        target = case.speed if one["ms"] == least(theirs, "ms") else None
        rows.append(against(f"step, {name}", who, least(ours, "ms"), one["ms"], "ms", target))
        if one["peak_gb"]:
            target = 1 / 0.75 if one["peak_gb"] == least(theirs, "peak_gb") else None
            rows.append(against(f"peak memory, {name}", who, least(ours, "peak_gb"), one["peak_gb"], "GB", target))
    return rows


def settled(found: Mapping[str, Any]) -> dict[str, Any]:
    """The results of `measure` by variant; for one measured twice, the mean of both times and the larger memory."""
    result = {}
    for who, one in found.items():
        if not who.endswith(AGAIN):
            both = [one, found.get(who + AGAIN, one)]
            ms, peak = ([each[key] for each in both] for key in ("ms", "peak_gb"))
            result[who] = {**one, "ms": statistics.fmean(ms), "peak_gb": max(peak)}
    return result


def least(found: dict[str, Any], key: str) -> float:
    return min((one[key] for one in found.values()), default=math.inf)


def measure(args: Any, case: Case, who: str, how: str) -> dict[str, Any]:
    """Measure one side in one variant: {"ms": of a step, "gflop": of a step, "peak_gb", "parameters", "tokens",
    "losses"}."""
    import torch
    import transformers

    from scripts.bench.lib import flops

    transformers.utils.logging.set_verbosity_error()
    if case.cap_gb is not None and args.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case.cap_gb * 1e9 / whole)
    task, shape = TASKS[case.model_type], dict(case.shape)
    count, length = case.rows, case.length
    if args.quick:
        shape = workloads.one_layer(shape) | SMALL[case.model_type]
        count, length = 2, 16
    config = transformers.AutoConfig.for_model(case.model_type, **shape)
    every = 7 if case.model_type == "bert" else 1
    rows = workloads.labelled_rows(task, lengths(count, length, case.ragged), every, config.vocab_size)
    sizes = workloads.row_sizes(rows, config.is_encoder_decoder)
    step, parameters = (our_step if who == OURS else peer_step)(args.device, how, case, config, task, rows)
    losses = [float(step()) for _ in range(3)]

    def several() -> None:
        for _ in range(IN_A_ROW):
            step()

    ms = steps.median_ms(gpu.synchronised({how: several}, args.device), args.rounds, warmup=1)[how] / IN_A_ROW
    return {
        "ms": round(ms, 2),
        "gflop": flops.training(config, sizes, task) / 1e9,
        "peak_gb": gpu.peak_gb(args.device),
        "parameters": parameters,
        "tokens": sum(row.tokens + row.target for row in sizes),
        "losses": [round(x, 4) for x in losses],
    }


def lengths(count: int, most: int, ragged: bool) -> list[int]:
    """Lengths that all equal `most`, or distributed like those of real texts truncated at `most`: log-normal, a third
    of it on average."""
    import torch

    if not ragged:
        return [most] * count
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(0.7).exp().mul(most / 4)
    return [min(most, max(4, int(n))) for n in draws]


def moved(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}


def our_step(device: str, how: str, case: Case, config: Any, task: str, rows: Any) -> tuple[Callable[[], Any], int]:
    """(a step, the number of parameters)"""
    import torch

    import engine
    import modelcenter as mc
    from modelcenter.compare import pack_rows

    engine.init_distributed(device=device)
    precision = "bf16-params" if case.states else "bf16"
    recompute = "none" if how == "compiled" else case.recompute
    policy = engine.Policy(precision=precision, recompute=recompute, compile=how == "compiled")
    with unittest.mock.patch("engine.init.init_parameters_", draw_):
        model = mc.from_config(config.to_dict(), task, policy=policy).train()
    batch = pack_rows(task, rows)  # on the host, as in the loop; the step counts its labels there and moves it
    batch["row_ids"] = torch.arange(len(rows))
    kinds = {"8 bits": engine.optim.AdamW8bit, "host": engine.optim.AdamOffloadOptimizer}
    return steps.engine_step(model, batch, kinds.get(case.states)), model.num_parameters()


def draw_(model: Any, seed: int) -> None:
    """Initial values, drawn on the device: on the host, where `from_config` draws them, a billion take a minute."""
    import torch

    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)().detach()
        if parameter.ndim > 1:
            local.normal_(0.0, 0.02)
        else:
            local.fill_(float(name.endswith("norm.weight")))


def peer_step(device: str, how: str, case: Case, config: Any, task: str, rows: Any) -> tuple[Callable[[], Any], int]:
    """As `our_step`."""
    import torch

    from modelcenter.compare import pad_rows

    with torch.device(device):
        model = workloads.auto_class(task).from_config(config).train()
    if how == "Liger":
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, {})
    if case.model_type == "t5":
        # cuDNN's attention, which torch prefers on some GPUs, has no gradient for a bias: the step would raise.
        torch.backends.cuda.enable_cudnn_sdp(False)
    batch = moved(pad_rows(task, rows), device)
    run = torch.compile(model) if how == "compiled" else model

    def loss_of() -> Any:
        with torch.autocast(device, torch.bfloat16):
            return run(**batch).loss

    return steps.torch_step(model, loss_of), sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
