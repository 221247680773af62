"""The two networks of replaced token detection: finding or creating, joining, saving and exporting them."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import engine
import modelcenter
from engine.checkpoint import load_model
from engine.shards import show_own_parameters
from engine.tensors import local_tensor, with_local
from modelcenter import registry
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.convert.rules import ArchMap
from modelcenter.hub.files.json_files import read_json, write_json
from modelcenter.hub.files.names import CONFIG_FILE, GENERATOR, GENERATOR_FILE, RUN_FILE, TOKENIZER_FILES
from modelcenter.hub.tokenizer import load_tokenizer
from modelcenter.models.base import Model
from modelcenter.models.replaced_tokens import TABLES, DisentangledEmbedding, ReplacedTokenPair
from modelcenter.training.config import ReplacedTokensConfig

log = logging.getLogger("modelcenter")

# The relative size of a generator if neither --generator nor --generator_size is given.
SIZES = {"electra": 0.25, "deberta-v2": 0.5}
_SEED_OF_GENERATOR = 0x6E4  # added to the run's seed: networks of equal size would start with equal layers


def generator_fields(config: Any, size: float | None) -> dict[str, Any]:
    """The fields of a generator's config that differ from its discriminator's.

    ELECTRA's generator has a fraction of the attention heads, each as wide as the discriminator's, and feed-forward
    layers that are narrower by the same fraction: in its paper 1/4 for small and large, and 1/3 for base. DeBERTa-v3's
    has a fraction of the layers, of the same width: 1/2 in its published configurations.

    Args:
        config: the discriminator's. size: the fraction; None: the family's.
    """
    share = SIZES[config.model_type] if size is None else size
    if config.model_type == "deberta-v2":
        return {"num_layers": max(1, round(config.num_layers * share))}
    heads = max(1, round(config.num_heads * share))
    return {
        "num_heads": heads,
        "hidden_size": config.hidden_size // config.num_heads * heads,
        "intermediate_size": math.ceil(config.intermediate_size * heads / config.num_heads),
    }


def joined_nets(cfg: ReplacedTokensConfig, discriminator: Model, load: Callable[..., Model]) -> ReplacedTokenPair:
    """The model to train: the discriminator with the generator that the flags name or describe.

    Args:
        load: `load(name or config, task, **options)`, which is modelcenter.from_pretrained or from_config with the
            options that the flags give for every model.

    Raises:
        ValueError: there is no generator, or it does not fit.
    """
    options = {"seed": cfg.seed + _SEED_OF_GENERATOR, **cfg.generator_config}
    source: Any = cfg.generator
    if source is None and not cfg.from_scratch:
        beside = Path(str(cfg.model)).parent / GENERATOR
        if not (beside / CONFIG_FILE).is_file():
            raise ValueError(
                "--generator is needed: the Hub name or directory of a masked language model with the vocabulary of "
                f"{cfg.model}; only with --from_scratch one is created"
            )
        cfg.generator = source = str(beside)
    if source is None:
        fields = generator_fields(discriminator.config, cfg.generator_size)
        source = discriminator.config.replace(**fields)
    with flag_in_errors("generator"):
        generator = load(source, "masked-lm", **options)
    if cfg.add_tokens and not cfg.from_scratch:
        generator.resize_token_embeddings(discriminator.config.vocab_size)
    if cfg.share_embeddings != "none":
        _agree_on_tables(cfg, generator, discriminator)
    return ReplacedTokenPair(generator, discriminator, cfg.share_embeddings, cfg.discriminator_weight).eval()


@torch.no_grad()
def _agree_on_tables(cfg: ReplacedTokensConfig, generator: Model, discriminator: Model) -> None:
    """Let new networks start with the generator's embeddings, so that differences start at zero. For loaded ones, warn
    if tied tables differ, since the discriminator's are used then."""
    for name in TABLES:
        one, other = getattr(generator, name, None), getattr(discriminator, name, None)
        if one is None or other is None or one.weight.shape != other.weight.shape:
            continue  # ReplacedTokenPair reports what does not fit
        if cfg.from_scratch:
            other.weight.copy_(one.weight)
        elif cfg.share_embeddings == "tied" and not torch.equal(one.weight, other.weight) and engine.rank() == 0:
            log.warning(
                "share_embeddings: tied, but the tables %r of %s and %s differ: both models start with the latter's",
                name,
                cfg.generator,
                cfg.model,
            )


def nets_of_run(cfg: ReplacedTokensConfig, source: str, load: Callable[..., Model], policy: Any) -> Model:
    """Both networks of a finished run, for an evaluation.

    Args:
        source: the discriminator's folder. load, policy: see Task.trained_model.

    Raises:
        ValueError: there is no generator beside it.
    """
    beside = Path(source).parent / GENERATOR
    if not (beside / CONFIG_FILE).is_file():
        family = load(policy=False).config.model_type
        raise ValueError(
            f"model: in pretraining, {family} detects replaced tokens, and its evaluation needs the generator that "
            f"replaces them; there is none in {beside}. Give the folder of a run of `pretrain replaced-tokens`"
        )
    discriminator, generator = load(policy=False), load(source=str(beside), policy=False)
    pair = ReplacedTokenPair(generator, discriminator, "none", cfg.discriminator_weight)
    pair.load_report = discriminator.load_report
    engine.shard(pair, policy=policy)
    return pair.eval()


# -- saving and exporting ----------------------------------------------------------------------------------------------


def save_nets(
    pair: ReplacedTokenPair, target: Path, tokenizer: Any = None, card: Any = None, beside: bool = True, **how: Any
) -> None:
    """Write both networks as Hugging Face directories. Collective.

    Args:
        target: the discriminator's directory. beside: put the generator's, `generator`, beside it; False: inside it.
        card: the discriminator's. how: further arguments of save_pretrained.
    """
    with _plain_embeddings(pair):
        pair.discriminator.save_pretrained(target, tokenizer=tokenizer, card=card, **how)
    place = target.parent if beside else target
    text = f"The generator that {target.name}, a discriminator, was pretrained with."
    pair.generator.save_pretrained(place / GENERATOR, tokenizer=tokenizer, card={"text": text}, **how)


@contextmanager
def _plain_embeddings(pair: ReplacedTokenPair) -> Iterator[None]:
    """Inside, each table of the discriminator that is the generator's plus a difference is one plain table."""
    net = pair.discriminator
    parts = {name: table for name in TABLES if isinstance(table := getattr(net, name, None), DisentangledEmbedding)}
    show_own_parameters(pair)
    try:
        for name, table in parts.items():
            shared, delta = table.shared.weight, table.delta.weight
            whole = torch.nn.Module()
            total = (local_tensor(shared) + local_tensor(delta)).detach()
            whole.register_parameter("weight", torch.nn.Parameter(with_local(delta, total), requires_grad=False))
            setattr(net, name, whole)
        yield
    finally:
        for name, table in parts.items():
            setattr(net, name, table)


def write_generator_config(pair: ReplacedTokenPair, folder: Path) -> None:
    """Write the generator's configuration into a checkpoint, which holds both networks. On rank 0."""
    net = pair.generator
    arch: ArchMap = registry.get(net.config.model_type).arch_map()
    dtype = str(net.dtype).removeprefix("torch.")
    write_json(folder / GENERATOR_FILE, arch.config.write(net.config, arch.tasks[net.task].hf_class, dtype))


def holds_nets(path: Path) -> bool:
    """Whether a path is a checkpoint of replaced token detection."""
    return (path / GENERATOR_FILE).is_file() and (path / RUN_FILE).is_file()


def export_nets(path: Path, target: Path, keep_adapter: bool, idle: Sequence[str], **options: Any) -> str:
    """Write both networks of a checkpoint: the discriminator as the Hugging Face directory `target`, the generator as
    one inside it. In one process.

    Args:
        idle: flags that were given but have no effect here. options: arguments of save_pretrained.

    Returns:
        A message that says what was written.

    Raises:
        ValueError: the target exists, or flags would have no effect.
    """
    if keep_adapter or idle:
        name = "keep_adapter" if keep_adapter else idle[0]
        raise ValueError(f"{name}: {path} has two models without adapters, which are built in memory; leave it out")
    if target.exists():
        raise ValueError(f"{target} exists; give a new directory")
    pair = load_nets(path)
    has_tokenizer = any((path / name).is_file() for name in TOKENIZER_FILES)
    save_nets(pair, target, load_tokenizer(path) if has_tokenizer else None, None, beside=False, **options)
    return f"{target}: the discriminator of {path}; {target / GENERATOR}: its generator"


def load_nets(path: Path) -> ReplacedTokenPair:
    """The networks of a checkpoint, in one process."""
    run: Mapping[str, Any] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))

    def build(file: str, task: str) -> Model:
        values = read_json(path / file)
        return modelcenter.from_config(values, task, policy=False, dtype=values.get("dtype", "float32"))

    generator, discriminator = build(GENERATOR_FILE, "masked-lm"), build(CONFIG_FILE, "pretraining")
    pair = ReplacedTokenPair(generator, discriminator, run["flags"]["share_embeddings"])
    load_model(path, pair)
    return pair
