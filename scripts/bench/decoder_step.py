"""A decoder's training step, compared with LitGPT and transformers: a Llama with grouped queries.

All contenders start from the same weights (LitGPT's own conversion of the directory that transformers saved) and train
on rows of equal length, so that there is no padding, in fp32: forward, loss, backward, clipping and fused AdamW. LitGPT
runs as its fine-tuning scripts do and, with --compile, compiled as its pretraining scripts do, in an environment
installed from PyPI. Contenders take turns in separate processes; their losses over the steps must agree.

    python scripts/bench/decoder_step.py --output result.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import (
    against,
    child,
    environments,
    finish,
    fraction,
    machine,
    median,
    parse,
    parser,
    steps,
    take_turns,
)

STEPS = 8  # in a turn; the first two are not timed


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--hidden", type=int, default=768, help="width (default: 768)")
    p.add_argument("--layers", type=int, default=6, help="(default: 6)")
    p.add_argument("--rows", type=int, default=8, help="rows of 256 tokens (default: 8)")
    p.add_argument("--compile", action="store_true", help="also measure LitGPT compiled, which takes minutes")
    p.add_argument("--child", help=argparse.SUPPRESS)  # the contender to measure in this process
    p.add_argument("--work", help=argparse.SUPPRESS)  # folder of the weights
    args = parse(p, hidden=128, layers=2, rows=2)
    if args.child:
        work = Path(args.work)
        print(json.dumps(make(work, args) if args.child == "make" else measure(args.child, work)))
        return
    python = environments.python_of("litgpt")
    names = ["modelcenter", "transformers", "litgpt", *(["litgpt_compiled"] if args.compile else [])]
    with tempfile.TemporaryDirectory() as folder:
        facts = child([__file__, "--child", "make", "--work", folder, *shape(args)], args.threads)

        def contender(name: str) -> Callable[[int], dict]:
            words = [__file__, "--child", name, "--work", folder, *shape(args)]
            return lambda turn: child(words, args.threads, python if name.startswith("litgpt") else sys.executable)

        results = take_turns({name: contender(name) for name in names}, args)
    losses = {name: found[-1]["losses"] for name, found in results.items()}
    apart = max(abs(a - b) for name in names for a, b in zip(losses[name], losses["modelcenter"], strict=True))
    if apart > 1e-2:
        raise SystemExit(
            f"the contenders do not train the same model: their losses differ by up to {apart:.4f}: {losses}"
        )
    ms = {name: median(found, "ms") for name, found in results.items()}
    what = f"Llama step, {args.hidden} wide"
    rows = [against(what, name.replace("_", ", "), ms["modelcenter"], ms[name], "ms") for name in names[1:]]
    rows += [
        against(f"{what}, peak memory", name.replace("_", ", "), median(results["modelcenter"], "peak_mb"),
                median(results[name], "peak_mb"), "MB") for name in names[1:]
    ]  # fmt: skip
    rate = machine.limits()["gemm_gflops"]
    rows += [fraction(f"{what}: {name}", facts["gflop"] / (ms[name] / 1000) / rate, "fp32 products") for name in names]
    numbers = {"ms": ms, "losses": losses, "losses_apart": apart, **facts}
    finish(args, "decoder_step", numbers, rows, packages=environments.versions(python, "litgpt", "lightning"))


def shape(args: Any) -> list[str]:
    return ["--hidden", str(args.hidden), "--layers", str(args.layers), "--rows", str(args.rows)]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """The median milliseconds of a step, and the loss of each step."""
    import torch

    ids = torch.load(folder / "ids.pt")
    step = {"modelcenter": our_step, "transformers": transformers_step}.get(name, litgpt_step)(folder, ids, name)
    times, losses = [], []
    for turn in range(STEPS):
        began = time.perf_counter()
        losses.append(step().item())
        if turn >= 2:
            times.append(1000 * (time.perf_counter() - began))
    return {"ms": statistics.median(times), "losses": [round(x, 5) for x in losses]}


def make(folder: Path, args: Any) -> dict[str, float]:
    """Save the weights and rows for all contenders; returns facts about a step."""
    import torch
    import transformers

    from scripts.bench.lib import flops

    hidden, heads = args.hidden, args.hidden // 64
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30016, hidden_size=hidden, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2), intermediate_size=hidden * 8 // 3 // 64 * 64, rms_norm_eps=1e-5,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "start")
    ids = torch.randint(1, 30000, (args.rows, 256))
    torch.save(ids, folder / "ids.pt")
    gflop = flops.training(config, [flops.Row(256, 0, 255)] * args.rows, "causal-lm") / 1e9
    return {"gflop": gflop, "parameters": model.num_parameters()}


def our_step(folder: Path, ids: Any, name: str) -> Callable[[], Any]:
    import engine

    engine.memory.prepare_torch()
    import torch

    import modelcenter as mc

    engine.memory.keep_freed_memory()
    model = mc.from_pretrained(str(folder / "start")).train()
    ends = torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32)
    batch = {
        "input_ids": ids.reshape(1, -1), "labels": ids.reshape(1, -1), "cu_seqlens": ends, "max_seqlen": ids.shape[1],
    }  # fmt: skip
    return steps.engine_step(model, batch)


def transformers_step(folder: Path, ids: Any, name: str) -> Callable[[], Any]:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder / "start", dtype="float32").train()
    return steps.torch_step(model, lambda: model(input_ids=ids, labels=ids).loss)


def litgpt_step(folder: Path, ids: Any, name: str) -> Callable[[], Any]:
    import torch
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy
    from safetensors.torch import load_file

    hf = json.loads((folder / "start" / "config.json").read_text())
    config = Config(
        block_size=512,
        vocab_size=hf["vocab_size"],
        padded_vocab_size=hf["vocab_size"],
        n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"],
        n_embd=hf["hidden_size"],
        n_query_groups=hf["num_key_value_heads"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
        intermediate_size=hf["intermediate_size"],
        rope_base=10000,
    )
    state: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, state, load_file(folder / "start" / "model.safetensors"))
    model = GPT(config).train()
    model.load_state_dict(state)
    run = torch.compile(model) if name.endswith("compiled") else model
    # The loss is computed at once, not in LitGPT's chunks of 128, which save memory but cost time.
    return steps.torch_step(model, lambda: chunked_cross_entropy(run(ids)[:, :-1], ids[:, 1:], chunk_size=0))


if __name__ == "__main__":
    main()
