"""Replaced token detection: a generator and a discriminator that are trained together (ELECTRA, Clark et al. 2020,
arXiv:2003.10555; DeBERTa-v3, He et al. 2021, arXiv:2111.09543).

The generator predicts masked tokens. At their positions, the discriminator reads tokens sampled from the generator's
predictions. It predicts for every token, including special ones, whether it differs from the text: a sample equal to
the original token counts as original. No gradient flows through the sampling.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import IGNORE_INDEX
from engine.ops import Embedding
from modelcenter.layers.dropout import name_sites
from modelcenter.models.base import Model
from modelcenter.models.discriminator import Discriminator
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput

SHARING = ("tied", "disentangled", "none")
TABLES = ("embed", "position", "token_type")
_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")


class DisentangledEmbedding(nn.Module):
    """The sum of a row of another net's table, which gets no gradient here, and a row of a table of differences.

    The other net's table is not a parameter of this module.
    """

    def __init__(self, shared: nn.Embedding, differences: Tensor):
        """differences: (rows, width), the initial values of this table."""
        super().__init__()
        self._shared = (shared,)
        self.delta = Embedding(*differences.shape, padding_idx=shared.padding_idx, _weight=differences)

    @property
    def shared(self) -> nn.Embedding:
        return self._shared[0]

    @property
    def embedding_dim(self) -> int:
        return self.delta.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            shared = self.shared(ids)
        return shared + self.delta(ids)


class ReplacedTokenPair(Model):
    """A generator (task "masked-lm") and a discriminator ("pretraining") as one model, whose loss is the generator's
    cross-entropy over the masked tokens + `discriminator_weight` times the discriminator's over all tokens.

    Their parameters have the prefixes `generator.` and `discriminator.`.

    Args:
        share_embeddings: "tied": the discriminator uses the generator's embedding tables and norm, which get the
            gradients of both, as in ELECTRA. "disentangled": each of its tables is the generator's, which gets no
            gradient from it, plus one of its own (DeBERTa-v3's gradient-disentangled sharing). "none": no sharing.

    Raises:
        ValueError: the nets have other tasks or different vocabularies, or their embeddings cannot be shared so.
    """

    tasks = ("pretraining",)
    head_prefixes: ClassVar[tuple[str, ...]] = ("generator.head.", "discriminator.head.")
    head_inputs = {"pretraining": ("labels",)}

    def __init__(
        self, generator: Any, discriminator: Any, share_embeddings: str = "none", discriminator_weight: float = 50.0
    ):
        _check_nets(generator, discriminator)
        super().__init__(discriminator.config, "pretraining")
        self.generator, self.discriminator = generator, discriminator
        self.share_embeddings, self.discriminator_weight = share_embeddings, discriminator_weight
        if share_embeddings not in SHARING:
            raise ValueError(f"share_embeddings: got {share_embeddings!r}, expected one of {', '.join(SHARING)}")
        if share_embeddings != "none":
            _check_tables(generator, discriminator, share_embeddings)
            _share(generator, discriminator, share_embeddings)

    @property
    def networks(self) -> tuple[Any, Any]:
        return self.generator, self.discriminator

    # -- initial values and parallelism --------------------------------------------------------------------------------

    @property
    def units(self) -> Any:
        return self.shard_units()

    def shard_units(self) -> list[nn.Module]:
        return [unit for net in self.networks for unit in net.shard_units()]

    def stage_homes(self) -> dict[str, Sequence[int]]:
        raise ValueError("two nets that are trained together cannot be split into stages; use pp_size=1")

    def tp_plan(self) -> dict[str, str]:
        plan = {f"generator.{name}": style for name, style in self.generator.tp_plan().items()}
        own = self.discriminator.tp_plan()
        words = own.pop("embed")
        if self.share_embeddings != "tied":
            own["embed.delta" if self.share_embeddings == "disentangled" else "embed"] = words
        return plan | {f"discriminator.{name}": style for name, style in own.items()}

    def word_tables(self) -> dict[str, nn.Embedding]:
        tables = {"generator.embed": self.generator.embed}
        match self.share_embeddings:
            case "none":
                tables["discriminator.embed"] = self.discriminator.embed
            case "disentangled":
                tables["discriminator.embed.delta"] = self.discriminator.embed.delta
        return tables

    def looked_up_tables(self) -> list[nn.Embedding]:
        return []

    @property
    def token_split(self) -> Any:
        return self.generator.token_split

    @token_split.setter
    def token_split(self, split: Any) -> None:
        for net in self.networks:
            net.token_split = split

    # -- the loss ------------------------------------------------------------------------------------------------------

    def loss_counts(self, batch: Batch) -> dict[str, int]:
        """{"generator": masked tokens, "discriminator": tokens}."""
        every = {**batch, "labels": torch.zeros_like(batch["input_ids"], dtype=torch.long)}
        counted = ((self.generator, batch), (self.discriminator, every))
        masked, tokens = (net.loss_counts(given)["loss"] for net, given in counted)
        return {"generator": masked, "discriminator": tokens}

    def empty_batch(self) -> dict[str, Any]:
        batch = self.generator.empty_batch()
        return {**batch, "draws": torch.zeros_like(batch["input_ids"])}

    def run(self, batch: Batch) -> ModelOutput:
        if self.training and not self._sites_named:
            name_sites(self)  # both nets at once: named separately, they would draw the same dropout masks
            self._sites_named = self.generator._sites_named = self.discriminator._sites_named = True
        counts = self.counts(batch)
        tokens = {name: batch[name] for name in _TOKENS if name in batch}
        asked = {"draws": batch["draws"], "output_logits": batch.get("output_logits", False)}
        masked = {"labels": batch["labels"], "loss_counts": {"loss": counts["generator"]}}
        generated = self.generator.run({**tokens, **masked, **asked})
        ids, replaced = _corrupted(batch, generated["sampled"])
        judged = {"input_ids": ids, "labels": replaced, "loss_counts": {"loss": counts["discriminator"]}}
        told = self.discriminator.run({**tokens, **judged})
        return ModelOutput(
            loss=generated.loss + self.discriminator_weight * told.loss,
            logits=told.logits,
            replaced=replaced,
            corrupted_ids=ids,
            generator_loss=generated.loss,
            discriminator_loss=told.loss,
            generator_logits=generated.logits,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        draws: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | str | None = None,
    ) -> ModelOutput:
        """Run both nets.

        Args:
            input_ids: (batch, seq), or packed (1, T) with cu_seqlens: the masked input of the generator.
            labels: as input_ids, the original token where the generator predicts it, -100 elsewhere.
            draws: as input_ids, random int64 from 0 to 2**53 - 1, which decide the sampled tokens
                (engine.loss.sample_classes); read where there is a label.
            loss_counts: as `Model.loss_counts`. output_logits: of the generator, as in Encoder.forward.
            The rest: as in Encoder.forward.

        Returns:
            loss, generator_loss and discriminator_loss (not weighted); logits: (batch, seq) the discriminator's logits
            that a token was replaced; replaced: whether it was, 1 or 0, -100 at padding; corrupted_ids: the input of
            the discriminator; generator_logits if requested.

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, labels=labels, draws=draws, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            loss_counts=loss_counts, num_items_in_batch=num_items_in_batch, output_logits=output_logits,
        )  # fmt: skip
        for name, what in (("input_ids", "tokens"), ("labels", "masked tokens"), ("draws", "random numbers")):
            if name not in batch:
                raise ValueError(f"{name}: replaced tokens are drawn from {what} of the batch; pass {name}")
        return self.run_checked(batch)


def _corrupted(batch: Batch, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the discriminator, and whether each token differs from the text: 1 or 0, -100 at padding.

    sampled: as the input, the sampled token where there is a label, -100 elsewhere.
    """
    ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
    drawn = sampled != IGNORE_INDEX
    text = torch.where(labels != IGNORE_INDEX, labels, ids)
    corrupted = torch.where(drawn, sampled, text)
    replaced = (corrupted != text).long()
    if mask is not None and batch.get("cu_seqlens") is None:
        replaced = replaced.masked_fill(mask == 0, IGNORE_INDEX)
    return corrupted, replaced


def _check_nets(generator: Any, discriminator: Any) -> None:
    """Raise ValueError for nets that cannot be trained together."""
    for name, net, task in (("generator", generator, "masked-lm"), ("discriminator", discriminator, "pretraining")):
        if net.task != task:
            raise ValueError(f"{name}: got a model of task {net.task!r}, expected {task!r}")
    if not isinstance(discriminator, Discriminator):
        raise ValueError(
            f"discriminator: got a {type(discriminator).__name__}, whose pretraining is another; expected an Electra "
            "or a DebertaV2"
        )
    words = generator.config.vocab_size, discriminator.config.vocab_size
    if words[0] != words[1]:
        raise ValueError(
            f"generator: it has {words[0]} words and the discriminator {words[1]}; its tokens are what the "
            "discriminator reads, so they need one vocabulary"
        )


def _shapes(net: Any) -> dict[str, tuple[int, ...] | None]:
    tables = {name: getattr(net, name, None) for name in TABLES}
    return {name: None if table is None else tuple(table.weight.shape) for name, table in tables.items()}


def _check_tables(generator: Any, discriminator: Any, how: str) -> None:
    """Raise ValueError for tables that differ in shape."""
    found, wanted = _shapes(generator), _shapes(discriminator)
    for name in TABLES:
        if found[name] != wanted[name]:
            raise ValueError(
                f"share_embeddings: {how} needs tables of one shape, but {name} of the generator is {found[name]} and "
                f"that of the discriminator {wanted[name]}; make them equal (embedding_size), or give none"
            )
    if how == "tied" and generator.config.norm_eps != discriminator.config.norm_eps:
        raise ValueError(
            f"share_embeddings: tied shares the norm of the embeddings, but norm_eps of the generator is "
            f"{generator.config.norm_eps} and that of the discriminator {discriminator.config.norm_eps}; give none"
        )


@torch.no_grad()
def _share(generator: Any, discriminator: Any, how: str) -> None:
    """Share the generator's embeddings with the discriminator, in place. With "tied" both take the discriminator's
    values; otherwise the discriminator's embeddings keep their values."""
    for name in TABLES:
        shared, own = getattr(generator, name, None), getattr(discriminator, name, None)
        if shared is None or own is None:
            continue
        if how == "tied":
            shared.weight.copy_(own.weight)
            setattr(discriminator, name, shared)
        else:
            setattr(discriminator, name, DisentangledEmbedding(shared, own.weight - shared.weight))
    if how == "tied":
        generator.embed_norm.load_state_dict(discriminator.embed_norm.state_dict())
        discriminator.embed_norm = generator.embed_norm
