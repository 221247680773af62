"""MPNet's checkpoints: rules and config of transformers' `mpnet` models.

Files exist with and without the prefix `mpnet.`. Old ones hold the buffer `position_ids` and repeat the tied decoder
under `lm_head.decoder`. Those of sentence-transformers are bare models, whatever class their config names.
"""

from modelcenter.convert import bert, roberta
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap
from modelcenter.convert.rules import CROSS_ATTENTION, ArchMap, Rename, Rule, with_embedding

_LAYER = "encoder.layer.{i}"
BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.position_embeddings.weight", "position.weight"),
    Rename("embeddings.LayerNorm.*", "embed_norm.*"),
    Rename("encoder.relative_attention_bias.weight", "relative.weight"),
    Rename(f"{_LAYER}.attention.attn.q.*", "layers.{i}.attn.q.*"),
    Rename(f"{_LAYER}.attention.attn.k.*", "layers.{i}.attn.k.*"),
    Rename(f"{_LAYER}.attention.attn.v.*", "layers.{i}.attn.v.*"),
    Rename(f"{_LAYER}.attention.attn.o.*", "layers.{i}.attn.out.*"),
    Rename(f"{_LAYER}.attention.LayerNorm.*", "layers.{i}.attn_norm.*"),
    Rename(f"{_LAYER}.intermediate.dense.*", "layers.{i}.mlp.up.*"),
    Rename(f"{_LAYER}.output.dense.*", "layers.{i}.mlp.down.*"),
    Rename(f"{_LAYER}.output.LayerNorm.*", "layers.{i}.mlp_norm.*"),
)

PARTS = {name: part for name, part in roberta.HEADS.items() if name != CROSS_ATTENTION}
TASKS = {name: task for name, task in roberta.tasks("MPNet").items() if name != "causal-lm"}

CONFIG = ConfigMap(
    fields={hub: ours for hub, ours in bert.FIELDS.items() if ours != "type_vocab_size"},
    # transformers creates a table with this many rows but reads the first 32, or fails.
    required={**BIDIRECTIONAL, "relative_attention_num_buckets": (32,)},
)

ARCH = ArchMap(
    model_type="mpnet",
    prefix="mpnet.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=(r"embeddings\.position_ids",),
)
