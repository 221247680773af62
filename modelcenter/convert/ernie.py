"""ERNIE's checkpoints: rules and config of transformers' `ernie` models, which are BERT's plus an embedding table of
task types. The config of a model without that table (`use_task_id` false) may still give its size."""

from dataclasses import replace

from modelcenter.convert import bert
from modelcenter.convert.rules import Rename, with_cross_attention, with_embedding

_TASKS = {
    name: replace(task, hf_class=task.hf_class.replace("BertLMHeadModel", "BertForCausalLM").replace("Bert", "Ernie"))
    for name, task in bert.TASKS.items()
}

ARCH = replace(
    bert.ARCH,
    model_type="ernie",
    prefix="ernie.",
    body=(Rename("embeddings.task_type_embeddings.weight", "task_type.weight"), *bert.BODY),
    tasks=with_cross_attention(with_embedding(_TASKS)),
    config=replace(
        bert.CONFIG,
        fields={
            **bert.CONFIG.fields,
            "use_task_id": "use_task_id",
            "task_type_vocab_size": "task_type_vocab_size",
        },
        ignored=frozenset(),
    ),
)
