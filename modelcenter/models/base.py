"""The model protocol: a model is `begin`, a list of units, and `end`.

    x, ctx = self.begin(batch)
    for unit in self.units:
        x = unit(x, ctx)
    return self.end(self.finish(x), ctx, batch)

x holds the hidden states (T, hidden_size) of all tokens of the batch, without padding; ctx is a layers.packing.Packed.
Sharding, recomputation, compilation and pipelining need nothing else from a model.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from modelcenter.config import ModelConfig
from modelcenter.layers.packing import Packed
from modelcenter.models import vocabulary
from modelcenter.models.embedding import EmbeddingMixin
from modelcenter.models.inputs import Batch, GivenCounts, ModelInputs
from modelcenter.models.multi_vector import MultiVectorMixin
from modelcenter.models.outputs import ModelOutput
from modelcenter.models.trainer_protocol import TrainerProtocol

# (hidden states (T, hidden_size), batch) -> hidden states.
UnitCall = Callable[[Tensor, Packed], Tensor]
# Tasks whose heads may be tied to the embedding.
VOCABULARY_TASKS = ("masked-lm", "sparse-embedding", "causal-lm", "seq2seq-lm", "pretraining", "double-heads")
# If `end` reads more than this share of the tokens, selecting them in the last unit costs more than it saves.
_MOST_READ = 0.8


class Model(TrainerProtocol, EmbeddingMixin, MultiVectorMixin, ModelInputs):
    """Base of all architectures: `Bert(config, task="sequence-classification")`, on CPU or under torch.device("meta").

    A subclass sets `config_class`, `tasks` and `head_prefixes`, builds its modules and implements `begin`, `end` and
    `units`. It overrides `loss_counts` and `init_spec` where they differ. Its forward names the inputs and passes them
    to `run_checked`.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    # Parameters with these prefixes belong to heads: a checkpoint may lack them if the caller gives the task.
    head_prefixes: ClassVar[tuple[str, ...]] = ("head.",)
    is_encoder_decoder: ClassVar[bool] = False
    # Positions come from a table, so a sequence has at most config.max_tokens tokens (`check_positions`).
    bounded: ClassVar[bool] = False
    # Generation reads a text again, without its cache, when it grows beyond this many tokens.
    rereads_beyond: float = math.inf
    embed: nn.Embedding
    # Where the model was loaded from: the Hub id or directory, and the commit.
    base_name: str | None = None
    base_revision: str | None = None
    # The head, or None if the task has none; its arguments depend on the task.
    head: Any
    # The adapter that modelcenter.adapters attached (adapters.state.AdapterState).
    adapter: Any = None
    # Whether an adapter was merged into the weights, so that they differ from those of `base_name`.
    holds_merged: bool = False
    # Parameters that are never trained, whatever an adapter asks for: transformers holds them as buffers.
    constants: frozenset[str] = frozenset()
    # Why prompt tuning on this model would differ from peft's; None: no reason is known.
    refuses_prompts: str | None = None
    # The parameters that modelcenter.adapters.freeze froze: Lora leaves their layers as they are.
    frozen: frozenset[str] = frozenset()
    # Set by engine.shard where this rank is a stage of a pipeline (engine.parallel.pipeline).
    pipeline: Any = None

    def __init__(self, config: ModelConfig, task: str = "base"):
        super().__init__()
        if not isinstance(config, self.config_class):
            raise ValueError(f"config: got {type(config).__name__}, expected {self.config_class.__name__}")
        if task not in self.tasks:
            raise ValueError(f"task: got {task!r}, {type(self).__name__} has {', '.join(self.tasks)}")
        self.config, self.task = config, task
        self.tuned_prompt = None
        self.generation_config = {}
        # Generation settings that the model was loaded with: the defaults of `generate`.
        self.generation_defaults: dict[str, Any] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def units(self) -> nn.ModuleList:
        """The modules applied to the hidden states in turn: `x = unit(x, ctx)`, both (T, hidden_size)."""
        raise AttributeError(f"{type(self).__name__} defines no `units`")

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        """The inputs of the units: hidden states (T, hidden_size) for the first, and the context for each."""
        raise AttributeError(f"{type(self).__name__} defines no `begin`")

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        """The outputs of the task (loss, logits, ...), from the final hidden states (T, hidden_size)."""
        raise AttributeError(f"{type(self).__name__} defines no `end`")

    def finish(self, x: Tensor) -> Tensor:
        """Apply what follows the last unit and belongs to the hidden states, such as a final norm."""
        return x

    def run_checked(self, batch: dict[str, Any]) -> ModelOutput:
        """`run`, after checking the inputs that every forward has.

        Raises ValueError as `run`, and for logits_to_keep, output_hidden_states and inputs of other heads.
        """
        self.refuse_inputs_of_other_heads(batch)
        self.refuse_idle_mask(batch)
        if (kept := batch.get("logits_to_keep", 0)) not in (0, 1):
            raise ValueError(f"logits_to_keep: got {kept}, expected 0 (all tokens) or 1 (the last)")
        if not isinstance(value := batch.get("output_hidden_states", False), bool):
            raise ValueError(f"output_hidden_states: got {value!r}, expected True (of all layers) or False")
        return self.run(batch)

    def run(self, batch: Batch) -> ModelOutput:
        """Run the protocol; under pipeline parallelism, this rank's part of it."""
        stage, all_states = self.pipeline, bool(batch.get("output_hidden_states"))
        part = range(len(self.units)) if stage is None else stage.part
        if stage is None or stage.first:
            x, ctx = self.begin(batch)
            states = [x]
        else:
            ctx = stage.context(self, batch)
            states = stage.receive(self._stage_shapes(ctx, part.start, all_states))
        last = stage is None or stage.last
        outputs = self._output_tokens(ctx, batch) if last and not all_states else None
        states = self.run_units(self.unit_calls(part), states, ctx, all_states, outputs)
        if ctx.cache is not None and (stage is None or stage.leaves):
            ctx.cache.end()
        if not last:
            return stage.hand_over(states, self._stage_shapes(ctx, part.stop, all_states))
        x = states[-1] = self.finish(states[-1])
        out = self.end(x, ctx, batch)
        if ctx.cache is not None:
            out["past_key_values"] = ctx.cache
        if all_states:
            out["hidden_states"] = tuple(ctx.repad(state) for state in states)
            out["last_hidden_state"] = ctx.repad(x)  # after transformers' outputs, which callers may index by number
        return out

    def unit_calls(self, part: range) -> Sequence[UnitCall]:
        """The callables of the units with these indices."""
        units = self.units
        return [units[i] for i in part]

    def run_units(
        self,
        units: Sequence[UnitCall],
        states: list[Tensor],
        ctx: Packed,
        all_states: bool,
        outputs: Tensor | None = None,
    ) -> list[Tensor]:
        """Apply `units` in turn to the last of `states`, (T, hidden_size) each.

        Args:
            all_states: return `states` followed by the output of each unit; False: only the last output.
            outputs: indices of the tokens whose final states are used; the last unit computes no others. None: all.
        """
        split, x = self.token_split, states[-1]
        states = [*states] if all_states else []
        x = x if split is None else split.to_units(x)
        for i, unit in enumerate(units):
            x = unit(x, ctx if outputs is None or i < len(units) - 1 else ctx.with_outputs(outputs))
            if all_states:
                states.append(x if split is None else split.from_units(x, last=False))
        x = x if split is None else split.from_units(x)
        return [*states[:-1], x]

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        """(m,) ascending indices of the tokens whose final hidden states `end` uses; None: all.

        The last unit computes no others. Overridden where `end` reads fewer than all.
        """
        return None

    def _output_tokens(self, ctx: Packed, batch: Batch) -> Tensor | None:
        """The indices that `reads` returns, if the last unit saves time by them; else None."""
        if ctx.max_seqlen <= 1 or self.token_split is not None:
            return None
        read = self.reads(ctx, batch)
        return None if read is None or read.numel() > _MOST_READ * ctx.num_tokens else read

    def _stage_shapes(self, ctx: Packed, units: int, all_states: bool) -> list[tuple[int, int]]:
        """Shapes of the hidden states that a stage sends to the next, after `units` units."""
        return [(ctx.num_tokens, self.config.hidden_size)] * (units + 1 if all_states else 1)

    # -- losses and outputs --------------------------------------------------------------------------------------------

    def wants_logits(self, batch: Batch) -> bool | str:
        """Whether a head over the vocabulary returns logits: by default not in training with labels; "labelled": those
        of the tokens with a label only."""
        requested = batch.get("output_logits")
        return not (self.training and batch.get("labels") is not None) if requested is None else requested

    def loss_counts(self, batch: Batch) -> dict[str, int]:
        """{term of the loss: number of supervised items in this batch}, computed from the labels only."""
        head: Any = getattr(self, "head", None)
        if not hasattr(head, "counts"):
            raise ValueError(f"task {self.task!r} has no head, so no loss; load the model with a task")
        return head.counts(batch)

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """The divisor of each term of the loss: the caller's global count, else this batch's own."""
        if (given := batch.get("loss_counts")) is not None:
            return GivenCounts(given, self.task)
        own = self.loss_counts(batch)
        if (total := batch.get("num_items_in_batch")) is not None:
            labels, head = batch.get("labels"), self.head
            if len(own) != 1:
                raise ValueError(
                    f"num_items_in_batch: the loss of task {self.task!r} has the terms {', '.join(own)}; pass "
                    "loss_counts={term: count} instead"
                )
            width = head.label_width(labels) if labels is not None and hasattr(head, "label_width") else 1
            return dict.fromkeys(own, total if width == 1 else total / width)
        return own

    def empty_batch(self) -> dict[str, Any]:
        """A batch without tokens, for a rank that has no rows left while others still train."""
        device = next(self.parameters()).device
        ids = torch.zeros(1, 0, dtype=torch.long, device=device)
        ends = torch.zeros(1, dtype=torch.int32, device=device)
        return {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": 0, **self._no_labels(ids)}

    def _no_labels(self, none: Tensor) -> dict[str, Tensor]:
        """Empty labels in the form that the head expects; none: (1, 0) token ids."""
        head: Any = getattr(self, "head", None)
        if head is None:
            return {}
        match self.task:
            case "masked-lm" | "causal-lm" | "seq2seq-lm" | "token-classification":
                return {"labels": none}
            case "question-answering":
                return {"start_positions": none[0], "end_positions": none[0]}
            case "sequence-classification" | "next-sentence-prediction":
                return {"labels": head.empty_labels(none.device)}
            case "multiple-choice":
                return {"labels": none[0]}
        return {}

    def ordered(self, out: Mapping[str, Any]) -> ModelOutput:
        """The outputs of a head, in the order of transformers' outputs for the task."""
        order = ["loss", "logits", "seq_relationship_logits", "sop_logits", "start_logits", "end_logits", "log_probs"]
        order += ["label_loss", "teacher_loss", "label_states", "sampled"]
        if self.task == "question-answering":
            order = ["loss", "start_logits", "end_logits", "logits"]
        return ModelOutput((name, out[name]) for name in order if name in out)

    # -- initial values and parallelism --------------------------------------------------------------------------------

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """How parameters are initialised: {name: ("normal", std) | ("zeros",) | ("ones",) | ...}, see engine.init."""
        spec: dict[str, tuple[Any, ...]] = {}
        std = getattr(self.config, "initializer_range", 0.02)
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name.endswith("bias"):
                    spec[name] = ("zeros",)
                else:
                    spec[name] = ("ones",) if parameter.dim() == 1 else ("normal", std)
        return spec

    def stage_homes(self) -> dict[str, Sequence[int]]:
        """{name of a module outside the units: indices of the units on whose pipeline stages it is kept}.

        Modules defined before the units belong to `begin` and the first stage; those defined after them belong to
        `end` and the last stage, which also needs the embedding table if the head is tied to it. `begin` may only call
        these modules. A module whose results all units read has the indices range(len(self.units)).

        Raises ValueError if the units are not in one list.
        """
        names = [name for name, module in self._modules.items() if module is not None]
        lists = {i: found for i, name in enumerate(names) if isinstance(found := self._modules[name], nn.ModuleList)}
        if [set(found) for found in lists.values()] != [set(self.units)]:
            raise ValueError(
                f"{type(self).__name__} cannot be split into stages: its units are not one list; use pp_size=1"
            )
        (at,), last = lists, len(self.units) - 1
        homes: dict[str, Sequence[int]] = {name: [0] if i < at else [last] for i, name in enumerate(names) if i != at}
        return homes | ({"embed": [0, last]} if self.ties_head else {})

    @property
    def ties_head(self) -> bool:
        """Whether the head shares the embedding table."""
        return getattr(self.config, "tie_embeddings", False) and self.task in VOCABULARY_TASKS

    def tp_plan(self) -> dict[str, str]:
        """{name of modules or parameters: how tensor parallelism splits them} (engine.parallel.tensor.STYLES)."""
        plan = {
            "embed": "vocab",
            "layers.*.attn.q": "colwise",
            "layers.*.attn.k": "colwise",
            "layers.*.attn.v": "colwise",
            "layers.*.attn.out": "rowwise",
            "layers.*.mlp.gate": "colwise",
            "layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise",
        }
        if not any(name.endswith(".mlp.gate") for name, _ in self.named_modules()):
            del plan["layers.*.mlp.gate"]
        return plan

    def shard_units(self) -> list[nn.Module]:
        """The modules whose parameters are gathered one module at a time when the model is sharded."""
        return list(self.units)

    def looked_up_tables(self) -> list[nn.Embedding]:
        """Embedding tables that are only looked up, never multiplied by, so that ranks may keep different rows."""
        return [] if self.ties_head else list(self.word_tables().values())

    # -- conveniences --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of the whole model, however it is sharded."""
        if self.pipeline is not None:
            if exclude_embeddings:
                raise ValueError("exclude_embeddings: the embeddings of a pipeline are on one of its stages")
            return self.pipeline.num_parameters(only_trainable)
        tables = [m.weight for m in self.modules() if exclude_embeddings and isinstance(m, nn.Embedding)]
        left_out = set(map(id, tables))
        return sum(
            p.numel() for p in self.parameters() if id(p) not in left_out and (p.requires_grad or not only_trainable)
        )

    def resize_token_embeddings(
        self, size: int | None = None, pad_to_multiple_of: int | None = None, *, seed: int = 0
    ) -> nn.Embedding:
        """Resize the vocabulary: the table, a head's own matrix and bias, and config.vocab_size.

        Existing rows do not change. New rows start as transformers' do by default: at the mean of the old rows plus
        noise with 1e-9 of their variance (per column), drawn with `seed`. A smaller vocabulary drops the last rows.

        Args:
            size: the number of tokens; None: the present one.
            pad_to_multiple_of: round the size up to a multiple of this number.

        Returns:
            The input embedding table.

        Raises:
            ValueError: the size is invalid, the config refuses it (a padding token beyond it), or the model is sharded.
        """
        return vocabulary.resize(self, size, pad_to_multiple_of, seed)

    def word_tables(self) -> dict[str, nn.Embedding]:
        """{name: table of token embeddings}."""
        return {"embed": self.embed}

    def is_head(self, name: str) -> bool:
        """Whether a parameter belongs to a task head rather than to the body."""
        return name.startswith(self.head_prefixes)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], task: str | None = None, **kwargs: Any) -> Self:
        """See modelcenter.from_pretrained; the checkpoint must be of this architecture."""
        from modelcenter.hub.load import load_model

        return load_model(name_or_path, task, architecture=cls.config_class.model_type, **kwargs)

    @classmethod
    def from_config(cls, config: Any, task: str | None = None, *, seed: int = 0, **kwargs: Any) -> Self:
        """See modelcenter.from_config."""
        from modelcenter.hub.load import build_model

        return build_model(config, task, seed=seed, architecture=cls.config_class.model_type, **kwargs)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """See modelcenter.generation.generate.generate."""
        from modelcenter.generation.generate import generate

        return generate(self, input_ids, attention_mask, *args, **kwargs)

    def set_generation_defaults(self, settings: Mapping[str, Any]) -> None:
        """See modelcenter.generation.settings.set_defaults."""
        from modelcenter.generation.settings import set_defaults

        set_defaults(self, settings)

    def save_pretrained(self, path: str | os.PathLike[str], format: str = "hf", **kwargs: Any) -> None:
        """See modelcenter.hub.save.save_pretrained."""
        from modelcenter.hub.save import save_pretrained

        save_pretrained(self, path, format, **kwargs)

    def write_texts(self, path: Any) -> None:
        """See modelcenter.hub.save.write_own_texts; engine.save_checkpoint calls it."""
        from modelcenter.hub.save import write_own_texts

        write_own_texts(self, path)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """See modelcenter.hub.save.push_to_hub."""
        from modelcenter.hub.save import push_to_hub

        return push_to_hub(self, repo_id, **kwargs)
