"""Generators and discriminators small enough for a test, and the same nets in transformers."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from deberta_reference import TheirDiscriminator
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.compare import hub_gradients, parameters_by_file_name
from modelcenter.models.replaced_tokens import ReplacedTokenPair
from modelcenter.testing import randomize_
from modelcenter.training.replaced_tokens import save_nets

SIZES: dict[str, dict[str, Any]] = {
    "electra": {"num_layers": 2, "hidden_size": 24, "embedding_size": 20, "num_heads": 4, "intermediate_size": 40},
    "deberta-v2": {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "intermediate_size": 40},
}
GENERATOR = {
    "electra": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24},
    "deberta-v2": {"num_layers": 1},
}
STILL = {"dropout": 0.0, "attention_dropout": 0.0}


def nets(family: str, dropout: float = 0.0, **changes: Any) -> tuple[Any, Any]:
    """A generator and a discriminator, every parameter random."""
    still = {"dropout": dropout, "attention_dropout": dropout}
    sizes = SIZES[family] | still | changes
    made = (
        mc.from_config(f"tiny/{family}", "masked-lm", policy=False, **sizes | GENERATOR[family]),
        mc.from_config(f"tiny/{family}", "pretraining", policy=False, **sizes),
    )
    for seed, net in enumerate(made):
        randomize_(net, seed)
    return made


def joined(family: str, share: str, weight: float = 50.0, **changes: Any) -> ReplacedTokenPair:
    return ReplacedTokenPair(*nets(family, **changes), share, weight).eval()


def rows_of_tokens(lengths: tuple[int, ...], seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows with masks at some tokens, and draws for all."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        text = torch.randint(5, 131, (length,), generator=rng)
        chosen = torch.rand(length, generator=rng) < 0.4
        chosen[length // 2] = True
        draws = torch.randint(0, 2**53, (length,), generator=rng)
        rows.append(
            {
                "input_ids": torch.where(chosen, 4, text),
                "labels": torch.where(chosen, text, -100),
                "draws": draws,
            }
        )
    return rows


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    ends = np.cumsum([0, *(len(row["draws"]) for row in rows)])
    batch: dict[str, Any] = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    longest = max(len(row["draws"]) for row in rows)
    return batch | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32), "max_seqlen": longest}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    def pad(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["draws"]) for row in rows], True, 0)
    return {
        "input_ids": pad("input_ids", 0),
        "attention_mask": mask,
        "labels": pad("labels", -100),
        "draws": pad("draws", 0),
    }


def in_transformers(pair: ReplacedTokenPair, folder: Any) -> tuple[Any, Any]:
    """(generator, discriminator), saved and loaded by transformers."""
    save_nets(pair, folder / "model", None, None)
    return _loaded(pair.generator, folder / "generator"), _loaded(pair.discriminator, folder / "model")


def _loaded(net: Any, folder: Any) -> Any:
    import transformers
    from safetensors.torch import load_file

    if net.config.model_type == "deberta-v2" and net.task == "pretraining":
        theirs = TheirDiscriminator(transformers.DebertaV2Model.from_pretrained(folder))
        head = {k: v for k, v in load_file(folder / "model.safetensors").items() if k.startswith("mask_predictions.")}
        missing, unexpected = theirs.load_state_dict(head, strict=False)
        assert not unexpected and all(name.startswith("deberta.") for name in missing)
        return theirs.eval()
    name = net.config.model_type
    kind = {"masked-lm": "MaskedLM", "pretraining": "PreTraining"}[net.task]
    family = "Electra" if name == "electra" else "DebertaV2"
    return getattr(transformers, f"{family}For{kind}").from_pretrained(folder).eval()


def their_loss(generator: Any, discriminator: Any, batch: dict[str, Any], corrupted: Tensor) -> dict[str, Tensor]:
    """The losses of ELECTRA's and DeBERTa-v3's code for tokens that are already drawn."""
    mask, labels = batch["attention_mask"], batch["labels"]
    guesses = generator(batch["input_ids"], attention_mask=mask).logits
    text = torch.where(labels >= 0, labels, batch["input_ids"])
    told = discriminator(corrupted, attention_mask=mask).logits
    costs = F.binary_cross_entropy_with_logits(told, (corrupted != text).float(), reduction="none")
    first = F.cross_entropy(guesses[labels >= 0], labels[labels >= 0])
    second = (costs * mask).sum() / mask.sum()
    return {"generator": first, "discriminator": second, "guesses": guesses.detach(), "told": told.detach()}


def drawn(guesses: Tensor, batch: dict[str, Any]) -> Tensor:
    """The discriminator's input, sampled from the generator's logits token by token in fp64."""
    labels = batch["labels"]
    ids = torch.where(labels >= 0, labels, batch["input_ids"])
    for place in (labels >= 0).nonzero().tolist():
        ends = guesses[tuple(place)].double().softmax(-1).cumsum(-1)
        target = batch["draws"][tuple(place)].item() / 2.0**53
        ids[tuple(place)] = int((ends <= target).sum())
    return ids


def gradients(pair: ReplacedTokenPair, found: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of generator and discriminator by names of their checkpoints; if the discriminator's table is a sum
    with differences, those of the differences.

    found: gradients by names of the pair, with a tied table once.
    """
    plain = nets(pair.config.model_type, tie_embeddings=pair.generator.config.tie_embeddings)
    named = []
    for net, prefix in zip(plain, ("generator.", "discriminator."), strict=True):
        own = {name.replace(".delta.", "."): g for name, g in found.items()}
        grads = {n: own.get(prefix + n, own.get(f"generator.{n}")) for n, _ in net.named_parameters()}
        named.append(hub_gradients(net, grads))
    return named[0], named[1]


def their_gradients(theirs: Any, ours: Any) -> dict[str, Tensor]:
    """The gradients of a net of transformers by names of its checkpoint."""
    named = parameters_by_file_name(theirs, ours)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
