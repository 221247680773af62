"""CPM-Bee (OpenBMB 2023), after OpenBMB/CPM-Live's bee_torch.py.

Its input is structured: a table gives the relations of its segments. Tokens with a meaning in one sample only (answers,
options, unknown words) have a second number, by which their embedding is rotated. Those of a batch form an external
table, which extends the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import ExtendedVocabulary
from engine.ops import Embedding, rotate
from modelcenter.layers.cache import KVCache
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.layers.segments import RelatedSegments, RelationBias
from modelcenter.models.cpm import CPM, CPMConfig, check_range, check_whole_numbers
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput

SHRINK = 1.05  # divisor of each sum of residual and branch
DISTANCE = 16  # rotary positions between two consecutive second numbers


@dataclass(kw_only=True)
class CPMBeeConfig(CPMConfig):
    """Fields of CPM-Bee. num_relations: number of kinds of relation between two segments."""

    model_type: ClassVar[str] = "cpmbee"

    num_buckets: int = 256
    num_relations: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % 2 == 0, "hidden_size", "an even number: embeddings are turned in pairs")
        self.require(self.tie_embeddings, "tie_embeddings", "true: the vocabulary's matrix is the embedding")
        self.require(self.num_relations >= 1, "num_relations", "at least 1, that between samples")


class SubIdRotary(nn.Module):
    """Embeddings (T, hidden_size) rotated by the second number (T,) of their tokens."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.angles = Rotary(hidden_size, 10000.0)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        nothing = x.new_empty(x.shape[0], 0)
        return rotate(x, nothing, *self.angles(number * DISTANCE, x.dtype), x.shape[1])[0]


class CPMBee(CPM):
    """CPM-Bee with the head of `task`."""

    config_class = CPMBeeConfig
    structured = True  # reads the batches of data.structured
    # In the order of RelatedSegments.values. By default a sample has one segment.
    input_defaults = {
        "context": 0,
        "span": 0,
        "segment": 0,
        "sample_ids": 0,
        "num_segments": 1,
        "segment_rel_offset": 0,
    }

    config: CPMBeeConfig

    def __init__(self, config: CPMBeeConfig, task: str = "base"):
        super().__init__(config, task)
        c = config
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.sub_rotary = SubIdRotary(c.hidden_size)
        self.relative = RelationBias(c.num_buckets, c.num_heads, c.max_distance, c.num_relations)
        self.layers = self.make_layers(scaled=True, shrink=SHRINK)
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head = self.lm_head(task, scaled=True)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        c = self.config
        ctx, ids, number = self.pack(batch), batch.get("input_ids"), batch.get("input_id_sub")
        if ids is not None and (more := batch.get("ext_table_ids")) is not None and more.numel():
            # Input ids from vocab_size on are also rows of the table, because generation feeds back its predictions.
            place = (ids - c.vocab_size).clamp(min=0)
            of_table = batch["ext_table_sub"][place]
            number = torch.where(ids < c.vocab_size, of_table.new_zeros(()) if number is None else number, of_table)
            ids = torch.where(ids < c.vocab_size, ids, more[place])
        values = self.gathered(ctx, self.token_segments(batch, ctx))
        relations = batch.get("segment_rel")
        if relations is None:
            relations = values.new_zeros(ctx.shape[0], 1)
        if relations.shape[0] > 1:  # one table per row, concatenated
            row = torch.arange(ctx.shape[0], device=values.device)[:, None].expand(ctx.shape)
            values[:, 5] += self.gathered(ctx, ctx.unpad(row)) * relations.shape[1]
        self.set_attention_bias(ctx, RelatedSegments(values, relations.flatten().long()))
        if ids is None:
            return ctx.unpad(self.given_embeds(batch, c.hidden_size)), ctx
        x = self.look_up(self.embed, ctx.unpad(ids), ids) * c.hidden_size**-0.5
        return x if number is None else self.sub_rotary(x, ctx.unpad(number)), ctx

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        if self.task == "base" or batch.get("ext_table_ids") is None:
            return super().end(x, ctx, batch)
        more = self.sub_rotary(self.embed(batch["ext_table_ids"]), batch["ext_table_sub"])
        table, counts = ExtendedVocabulary(self.embed.weight, more), self.counts(batch)["loss"]
        out = self.head(x, ctx, batch, counts, table, self.wants_logits(batch))
        return self.ordered(out)

    def looked_up_tables(self) -> list[nn.Embedding]:
        return []  # the head also multiplies by rows of the table, for the external table

    def check_inputs(self, batch: Batch) -> None:
        for name in ("input_id_sub", "segment_rel", "ext_table_ids", "ext_table_sub"):
            if name in batch:
                check_whole_numbers(name, batch[name])
        super().check_inputs(batch)
        self._check_table(batch)
        ids, number = batch.get("input_ids"), batch.get("input_id_sub")
        if ids is not None and number is not None and number.shape != ids.shape:
            raise ValueError(f"input_id_sub: got shape {tuple(number.shape)}, expected {tuple(ids.shape)}")
        if ids is not None or "inputs_embeds" in batch:
            self._check_relations(batch)

    def _check_table(self, batch: Batch) -> None:
        ids, number, words = batch.get("ext_table_ids"), batch.get("ext_table_sub"), self.config.vocab_size
        if ids is None and number is None:
            return
        if ids is None or number is None or ids.dim() != 1 or ids.shape != number.shape:
            raise ValueError("ext_table_ids, ext_table_sub: pass both, of one shape (n,), or neither")
        check_range("ext_table_ids", ids, 0, words - 1, "vocab_size")
        if "input_ids" in batch:
            check_range("input_ids", batch["input_ids"], 0, words + len(ids) - 1, "vocab_size and ext_table_ids")

    def check_segments(self, batch: Batch) -> None:
        """Raise ValueError for a segment whose relations are not in the table, or for relations out of range."""
        relations = batch.get("segment_rel")
        if relations is None:
            raise ValueError("segment: pass segment_rel, too, the relations of the segments")

    def _check_relations(self, batch: Batch) -> None:
        c = self.config
        relations, shape = batch.get("segment_rel"), batch.get("input_ids", batch.get("inputs_embeds")).shape
        if relations is None:
            for name in ("num_segments", "segment_rel_offset"):
                if name in batch:
                    raise ValueError(f"{name}: pass segment_rel, too, the relations of the segments")
            return
        if relations.dim() != 2 or relations.shape[0] not in (1, shape[0]) or not relations.shape[1]:
            raise ValueError(
                f"segment_rel: got shape {tuple(relations.shape)}, expected the relations of each of the {shape[0]} "
                "rows of input_ids, (rows, size)"
            )
        if relations.device.type != "cpu" or not shape[1]:
            return
        if int(relations.min()) < 0 or int(relations.max()) > c.num_relations:
            raise ValueError(
                f"segment_rel: got {int(relations.min())} to {int(relations.max())}, expected 0 (the same segment) to "
                f"{c.num_relations} (num_relations)"
            )
        segment, count, first = (
            batch.get(name, torch.tensor(self.input_defaults[name]))
            for name in ("segment", "num_segments", "segment_rel_offset")
        )
        size = relations.shape[1]
        if bool(((segment < 0) | (segment >= count) | (first < 0) | (first + count * count > size)).any()):
            raise ValueError(
                "segment: expected 0 to num_segments - 1, with num_segments squared relations from segment_rel_offset "
                f"on among the {size} of segment_rel"
            )

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        input_id_sub: Tensor | None = None,
        length: Tensor | None = None,
        context: Tensor | None = None,
        span: Tensor | None = None,
        sample_ids: Tensor | None = None,
        segment: Tensor | None = None,
        num_segments: Tensor | None = None,
        segment_rel: Tensor | None = None,
        segment_rel_offset: Tensor | None = None,
        ext_table_ids: Tensor | None = None,
        ext_table_sub: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Run the model; arguments that are not named here are those of the other CPM.

        Args:
            input_id_sub: as input_ids, the second number of a token. None: 0.
            sample_ids: as input_ids, number of the sample. Tokens of sample 0 attend to all samples, others only to
                their own. None: 0.
            segment, num_segments, segment_rel_offset: as input_ids, the number of the segment, the number of segments
                in its sample, and the offset of their relations in the row of segment_rel, in which the relation of a
                to b is at offset + a * num_segments + b. None: 0, 1 and 0.
            segment_rel: (batch, size), or one row for all: 0: the same segment, else the kind of relation. A packed
                input is one row.
            ext_table_ids, ext_table_sub: (n,) tokens and their second numbers, which extend the vocabulary: entry i has
                token, label and logit vocab_size + i.
            labels: as input_ids; the model shifts them (CPM-Live's targets are already shifted).

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, input_id_sub=input_id_sub, length=length,
            context=context, span=span, sample_ids=sample_ids, segment=segment, num_segments=num_segments,
            segment_rel=segment_rel, segment_rel_offset=segment_rel_offset, ext_table_ids=ext_table_ids,
            ext_table_sub=ext_table_sub, inputs_embeds=inputs_embeds, labels=labels, past_key_values=past_key_values,
            cache=cache, use_cache=use_cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, loss_counts=loss_counts,
            num_items_in_batch=num_items_in_batch, output_logits=output_logits, logits_to_keep=logits_to_keep,
            output_hidden_states=output_hidden_states,
        )  # fmt: skip
        return self.run_checked(batch)

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        return super().init_spec() | {"embed.weight": ("normal", 0.02)}
