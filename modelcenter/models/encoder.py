"""The heads, inputs and outputs that encoders share, and the body of BERT, RoBERTa, DistilBERT and ELECTRA."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import SoftTargets
from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.cache import KVCache
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import (
    DenseCausalLM,
    ExtractiveQA,
    MaskedLM,
    MultipleChoice,
    SequenceClassifier,
    TokenClassifier,
)
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.base import Model
from modelcenter.models.cross_attention import CrossAttentionMixin
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.multiple_choice import TOKEN_INPUTS, count_choices, flatten_choices
from modelcenter.models.outputs import ModelOutput
from modelcenter.models.sparse_embedding import SparseEmbeddingMixin


@dataclass(kw_only=True)
class EncoderConfig(ModelConfig):
    """Fields of every encoder; sizes count elements, dropouts are probabilities."""

    if TYPE_CHECKING:  # every encoder has it, as a field or as a property

        @property
        def norm_eps(self) -> float: ...

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_positions: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pad_token_id: int | None = 0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require_probabilities("dropout", "attention_dropout")
        self.require_token("pad_token_id", self.vocab_size)

    # Defaults for architectures without these fields.
    @property
    def type_vocab_size(self) -> int:
        return 0

    @property
    def use_task_id(self) -> bool:
        return False

    @property
    def is_decoder(self) -> bool:
        return False

    @property
    def cross_attention(self) -> bool:
        return False

    @property
    def embedding_size(self) -> int:
        """The width of the embeddings; if it is not hidden_size, a projection follows them."""
        return self.hidden_size

    @property
    def head_act(self) -> str:
        """The activation in the head over the vocabulary."""
        return self.hidden_act

    @property
    def head_dropout(self) -> float:
        """The dropout before a classifier."""
        return self.dropout


@dataclass(kw_only=True)
class BertStyleConfig(EncoderConfig):
    """Fields of BERT and of the architectures that have all of its fields: RoBERTa, ELECTRA.

    is_decoder: a token attends only to itself and the tokens before it, as next-token prediction needs.
    cross_attention: it also attends to an encoder's hidden states, which the caller gives.
    """

    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    classifier_dropout: float | None = None
    is_decoder: bool = False
    cross_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("classifier_dropout")
        decides = self.is_decoder or not self.cross_attention
        self.require(decides, "is_decoder", "True beside cross_attention: an encoder has none")
        if self.is_decoder or self.extra.get("is_causal"):
            self.require_extra(f"is_decoder={self.is_decoder}", {"is_causal": self.is_decoder})

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout


class Encoder(SparseEmbeddingMixin, CrossAttentionMixin):
    """Base of encoders. Parameter names in the body do not depend on the task.

    With `is_decoder` they are decoders, and support task causal-lm.
    """

    tasks: ClassVar[tuple[str, ...]] = (
        "base",
        "embedding",
        "multi-vector",
        "masked-lm",
        "sparse-embedding",
        "causal-lm",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "multiple-choice",
    )
    head_prefixes = ("head.", "pooler.")
    bounded = True
    # Tasks that have BERT's pooler, a dense layer on the first token.
    pooled_tasks: ClassVar[tuple[str, ...]] = (
        "base",
        "embedding",
        "multi-vector",
        "sequence-classification",
        "multiple-choice",
    )

    # Whether the model accepts token_type_ids, even if its table of types has one row or none.
    tells_types: ClassVar[bool] = True

    embed_norm: nn.Module
    position: Embedding | None  # None: positions enter in attention only

    config: EncoderConfig

    def __init__(self, config: EncoderConfig, task: str = "base"):
        super().__init__(config, task)
        self.make_body()
        self.pooler = Linear(config.hidden_size, config.hidden_size) if task in self.pooled_tasks else None
        self.head = self.make_head("masked-lm" if task == "sparse-embedding" else task)

    def make_body(self) -> None:
        """Build the embeddings and the layers."""
        c, narrow = self.config, self.config.embedding_size
        self.embed = Embedding(c.vocab_size, narrow, padding_idx=c.pad_token_id)
        self.position = Embedding(c.max_positions, narrow)
        self.token_type = Embedding(c.type_vocab_size, narrow) if self.tells_types else None
        self.embed_norm = LayerNorm(narrow, c.norm_eps)
        self.embed_dropout = Dropout(c.dropout)
        self.project_in = self.make_projection()
        self.layers = self.make_layers()

    def make_projection(self) -> nn.Module | None:
        """The projection of embeddings to hidden_size; None: they have that width."""
        narrow, width = self.config.embedding_size, self.config.hidden_size
        return Linear(narrow, width) if narrow != width else None

    def make_layers(self) -> nn.ModuleList:
        return nn.ModuleList(self.make_block() for _ in range(self.config.num_layers))

    def make_block(self) -> nn.Module:
        """One of the layers."""
        c, width = self.config, self.config.hidden_size
        return PostNormBlock(
            SelfAttention(width, c.num_heads, c.attention_dropout, causal=c.is_decoder),
            MLP(width, c.intermediate_size, c.hidden_act),
            width,
            c.norm_eps,
            c.dropout,
            CrossAttention(width, c.num_heads, c.attention_dropout) if c.cross_attention else None,
        )

    def make_head(self, task: str) -> nn.Module | None:
        """The head of `task`; None: it has none."""
        c = self.config
        match task:
            case "masked-lm" | "causal-lm":
                kind = MaskedLM if task == "masked-lm" else DenseCausalLM
                return kind(c.hidden_size, c.vocab_size, c.head_act, c.norm_eps, c.tie_embeddings, c.embedding_size)
            case "sequence-classification":
                return SequenceClassifier(c.hidden_size, c.num_labels, c.head_dropout, c.problem_type)
            case "token-classification":
                return TokenClassifier(c.hidden_size, c.num_labels, c.head_dropout)
            case "question-answering":
                return ExtractiveQA(c.hidden_size)
            case "multiple-choice":
                return MultipleChoice(c.hidden_size, c.head_dropout)
            case "embedding":
                return self.make_embedding_head()
            case "multi-vector":
                return self.make_token_head()
        return None

    @property
    def units(self) -> nn.ModuleList:
        return self.layers

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(self.with_position_ids(batch))
        x = self.input_states(batch, ctx, self)
        self.attend_to_encoder(batch, ctx)
        return x, ctx

    def input_states(self, batch: Batch, ctx: Packed, owner: Model) -> Tensor:
        """(T, hidden_size): the input of the first unit; owner: this model, or the model of which it is a side."""
        x = self.embed_dropout(self.embed_norm(self.summed_embeddings(batch, ctx, owner)), ctx)
        return x if self.project_in is None else self.project_in(x)

    def summed_embeddings(self, batch: Batch, ctx: Packed, owner: Model) -> Tensor:
        """(T, embedding_size): the embeddings of tokens, positions and types, summed; owner: as in `input_states`."""
        if self.position is not None:
            self.check_positions(batch, ctx, self.config.max_positions)
        type_states = self.type_states(batch, ctx)
        x = owner.embedded(batch, ctx, self.embed)
        if self.position is not None:
            x = x + self.look_up(self.position, ctx.positions, ctx.positions, "position_ids", "max_positions")
        return x if type_states is None else x + type_states

    def type_states(self, batch: Batch, ctx: Packed) -> Tensor | None:
        """(T, embedding_size): the embeddings of the token types; None: the model has none."""
        if self.token_type is None:
            return None
        given = batch.get("token_type_ids")
        types = torch.zeros_like(ctx.positions) if given is None else ctx.unpad(given, name="token_type_ids")
        return self.look_up(self.token_type, types, types, "token_type_ids", "type_vocab_size")

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        match self.task:
            case "masked-lm" | "causal-lm":
                return self.head.reads(ctx, batch, self.wants_logits(batch))
            case "sequence-classification" | "multiple-choice":
                return ctx.first_tokens()
            case "embedding":
                return self.pooled_tokens(ctx, batch)
        return None

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        if self.task == "embedding":
            return ModelOutput(embeddings=self.embeddings(x, ctx, batch))
        if self.task == "multi-vector":
            return self.token_vectors(x, ctx)
        if self.task == "sparse-embedding":
            return ModelOutput(embeddings=self.sparse_embeddings(x, ctx))
        pooled = None if self.pooler is None else torch.tanh(self.pooler(ctx.select(x, ctx.first_tokens())))
        if self.task == "base":
            return ModelOutput(last_hidden_state=ctx.repad(x), pooler_output=pooled)
        out = self.run_head(x, pooled, ctx, batch, self.counts(batch))
        return self.ordered(out)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The outputs of the head for final hidden states x (T, hidden_size) and pooled states (n, hidden_size)."""
        head = self.head
        match self.task:
            case "masked-lm" | "causal-lm":
                return head(x, ctx, batch, counts["loss"], self.embed.weight, self.wants_logits(batch))
            case "sequence-classification":
                return head(ctx.select(x, ctx.first_tokens()) if pooled is None else pooled, batch, counts, ctx)
            case "multiple-choice":
                read = ctx.select(x, ctx.first_tokens()) if pooled is None else pooled
                return head(read, batch, counts, self._choices(ctx, batch), ctx)
        return head(x, ctx, batch, counts)

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        if self.lm_prefix is not None:
            head = self.get_submodule(self.lm_prefix)
            own = ("bias", "weight")  # weight is None if it is tied to the embedding
            plan |= {f"{self.lm_prefix}.{name}": "vocab" for name in own if getattr(head, name) is not None}
        return plan

    @property
    def lm_prefix(self) -> str | None:
        """The name of the head over the vocabulary; None: the task has none."""
        return "head" if self.task in ("masked-lm", "sparse-embedding", "causal-lm") else None

    def _choices(self, ctx: Packed, batch: Batch) -> Tensor | int:
        """How many consecutive sequences are the choices of an example: a number for all, or one for each."""
        labels, given = batch.get("labels"), batch.get("num_choices")
        if given is not None and not isinstance(given, Tensor) and ctx.num_sequences % given:
            raise ValueError(f"num_choices: got {given} for {ctx.num_sequences} sequences; every example needs as many")
        if given is not None and ctx.num_sequences:
            return given
        if labels is None or not labels.numel():
            if ctx.num_sequences == 0:
                return 1
            raise ValueError(
                "packed multiple-choice input needs labels or num_choices: they tell how many choices an example has"
            )
        if ctx.num_sequences % labels.numel():
            raise ValueError(
                f"got {ctx.num_sequences} sequences for {labels.numel()} labels; every example needs as many"
            )
        return ctx.num_sequences // labels.numel()

    def _check_inputs(self, batch: Batch) -> None:
        """Raise ValueError for inputs that this model does not use, or a task that its config does not support."""
        is_decoder = self.config.is_decoder
        if self.task == "causal-lm":  # checked only here, so that checkpoints without is_decoder can be converted
            self.config.require(is_decoder, "is_decoder", "True for causal-lm: else a token sees the one it predicts")
        of_decoders = [name for name in ("use_cache", "logits_to_keep", "output_log_probs") if batch.get(name)]
        of_decoders += ["past_key_values"] if "past_key_values" in batch else []
        if of_decoders and not is_decoder:
            raise ValueError(
                f"{of_decoders[0]}: this model is an encoder, not a decoder (is_decoder is false); leave it out"
            )
        if "task_type_ids" in batch and not self.config.use_task_id:
            raise ValueError(
                f"task_type_ids: this {type(self).__name__} has no table of types of tasks, which only an ERNIE with "
                "use_task_id has; leave them out"
            )
        if not self.tells_types and "token_type_ids" in batch:
            raise ValueError(
                f"token_type_ids: {type(self).__name__} does not tell types of tokens apart; leave them out (a "
                "tokenizer gives none with return_token_type_ids=False)"
            )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        encoder_cu_seqlens: Tensor | None = None,
        encoder_max_seqlen: int | None = None,
        num_choices: Tensor | int | None = None,
        prompt_lengths: Tensor | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | str | None = None,
        logits_to_keep: int = 0,
        output_log_probs: bool = False,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model.

        Args:
            input_ids: (batch, seq), or packed (1, T) with cu_seqlens; multiple choice: (batch, choices, seq).
            attention_mask: (batch, seq), 1 at tokens and 0 at padding. token_type_ids, position_ids: as input_ids.
            task_type_ids: as input_ids, for an ERNIE with use_task_id; default 0.
            global_attention_mask: as input_ids, for a Longformer: 1 at tokens with global attention, else 0; None: see
                there.
            inputs_embeds: (batch, seq, embedding_size) in place of input_ids.
            encoder_hidden_states: (batch, encoder seq, hidden_size), or packed (1, T, hidden_size) with
                encoder_cu_seqlens: what a decoder with cross_attention attends to; a cache keeps them. Without them
                tokens attend to their own text only. encoder_attention_mask: (batch, encoder seq), 1 at tokens.
            labels: (batch, seq) for token tasks, (batch,) for classification; -100: none. causal-lm predicts label
                t + 1 from token t; the model shifts the labels.
            start_positions, end_positions, next_sentence_label, sentence_order_label: (batch,).
            past_key_values, use_cache, logits_to_keep, output_log_probs: for decoders, as in Decoder.forward.
            cu_seqlens: (sequences + 1,) int32 offsets of packed input. max_seqlen: tokens of the longest sequence;
                None: computed from cu_seqlens.
            num_choices: for packed multiple choice, the number of consecutive sequences per example, or (batch,) one
                number for each; None: inferred from the labels.
            prompt_lengths: (sequences,), for embeddings: how many tokens at the start of each are not pooled.
            loss_counts: {term: items} of the whole global batch, see Model.loss_counts. num_items_in_batch: the same
                from HF Trainer, for a loss with one term; if labels are lists, it counts every number.
            soft_targets: a teacher's predictions at the labels of a language model. They take a share of the loss, and
                the output also has label_loss and teacher_loss.
            output_logits: None: no vocabulary logits in training with labels.
                "labelled": (labels, vocab_size), only those of the tokens with a label, in order.

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            task_type_ids=task_type_ids, global_attention_mask=global_attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask, labels=labels,
            next_sentence_label=next_sentence_label, sentence_order_label=sentence_order_label,
            start_positions=start_positions, end_positions=end_positions, past_key_values=past_key_values, cache=cache,
            use_cache=use_cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, encoder_cu_seqlens=encoder_cu_seqlens,
            encoder_max_seqlen=encoder_max_seqlen, num_choices=num_choices, prompt_lengths=prompt_lengths,
            loss_counts=loss_counts, num_items_in_batch=num_items_in_batch, output_logits=output_logits,
            logits_to_keep=logits_to_keep, output_log_probs=output_log_probs,
            output_hidden_states=output_hidden_states, soft_targets=soft_targets,
        )  # fmt: skip
        self._check_inputs(batch)
        if self.task == "multiple-choice" and cu_seqlens is None:
            batch["num_choices"] = count_choices(batch)
            batch |= flatten_choices(batch, TOKEN_INPUTS)
        return self.run_checked(batch)


# The tasks of encoders that are never decoders.
READING_TASKS = tuple(task for task in Encoder.tasks if task != "causal-lm")
# Those of families without question answering and multiple choice in transformers.
CLASSIFYING_TASKS = tuple(task for task in READING_TASKS if task not in ("question-answering", "multiple-choice"))
