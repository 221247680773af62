"""Other programs load what this project exports: transformers, peft, sentence-transformers, safetensors, ONNX and
onnxruntime, llama.cpp.

Small models of every architecture, with random parameters, are exported with a tokenizer. Each client then loads the
directories in a separate process, and its numbers are compared with those of the exported model. The clients run in a
separate environment, made in --env from the running interpreter's packages plus what is missing; the versions of torch,
transformers and numpy are pinned to the running ones. llama.cpp's converter needs an older transformers, so it has
another environment. The exit status is 1 if a client fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelcenter.hub.files.cross_encoder_files import ACTIVATIONS, activation_of, with_activation
from scripts.bench import lib
from scripts.bench.lib import environments, llama_cpp
from scripts.bench.lib.exports import (
    ARCHITECTURES,
    ENCODER_DECODERS,
    FOREIGN,
    TEXTS,
    Case,
    cases,
    inputs_of,
    make_exports,
    ours,
)

NEEDED = ("peft", "sentence-transformers", "onnx", "onnxruntime", "onnxscript")
PINNED = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub")

# -- clients: each returns {case: result}, and raises if a result is wrong -------------------------------------------


def difference(a: Any, b: Any, mask: Any = None, limit: float = 1e-4) -> float:
    """The largest difference between two tensors where `mask` is true.

    Raises:
        AssertionError: it exceeds `limit`, or the shapes differ.
    """
    import torch

    a, b = torch.as_tensor(a).float(), torch.as_tensor(b).float()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if mask is not None:
        a, b = a[mask], b[mask]
    worst = float((a - b).abs().max())
    assert worst <= limit, f"differs by {worst}"
    return worst


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of an export. (AutoTokenizer converts any tokenizer of a Qwen model to Qwen's own class.)"""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def real_places(out: Any, batch: dict[str, Any]) -> Any:
    """The mask of real tokens for an output with a value per token; else None."""
    mask = batch.get("attention_mask")
    return mask.bool() if mask is not None and out.shape[: mask.dim()] == mask.shape else None


AUTO = {
    "base": ("AutoModel", "last_hidden_state"),
    "masked-lm": ("AutoModelForMaskedLM", "logits"),
    "pretraining": ("AutoModelForPreTraining", "prediction_logits"),
    "causal-lm": ("AutoModelForCausalLM", "logits"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "logits"),
    "sequence-classification": ("AutoModelForSequenceClassification", "logits"),
    "token-classification": ("AutoModelForTokenClassification", "logits"),
    "question-answering": ("AutoModelForQuestionAnswering", "start_logits"),
    "multiple-choice": ("AutoModelForMultipleChoice", "logits"),
    "next-sentence-prediction": ("AutoModelForNextSentencePrediction", "logits"),
    "text-encoding": ("AutoModelForTextEncoding", "last_hidden_state"),
    "double-heads": ("GPT2DoubleHeadsModel", "logits"),  # no Auto class has it
}


def load_theirs(case: Case) -> Any:
    """The model loaded by the Auto class; checks that no tensor is missing or left over."""
    import transformers

    model, info = getattr(transformers, AUTO[case[1]][0]).from_pretrained(case[2], output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"loading says {wrong}"
    return model.eval()


def transformers_auto(folder: Path) -> dict[str, Any]:
    import torch

    found = {}
    for case in cases(folder):
        name, task, directory = case
        if task == "embedding":  # sentence-transformers loads these
            continue
        tokenizer = load_tokenizer(directory)
        batch, key = inputs_of(name, task, tokenizer), AUTO[task][1]
        theirs = load_theirs(case)
        with torch.no_grad():
            out = theirs(**batch)[key]
        own = ours(folder, name, task)["logits" if key == "prediction_logits" else key]
        found[f"{name} {task}"] = difference(own, out, real_places(out, batch))
    return found


PIPELINES = {
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "causal-lm": "text-generation",
    "base": "feature-extraction",
    "question-answering": "question-answering",
    "seq2seq-lm": "text2text-generation",
}


def transformers_pipeline(folder: Path) -> dict[str, Any]:
    """Compare pipeline() with its defaults with the exported logits."""
    found: dict[str, Any] = {}
    for case in cases(folder):
        name, task, _ = case
        if task in PIPELINES and not (name in ENCODER_DECODERS and task == "base"):
            found[f"{name} {PIPELINES[task]}"] = of_pipeline(folder, case)
    return found


def of_pipeline(folder: Path, case: Case) -> Any:
    """The difference between a pipeline's numbers and those of the model here, or why they are not compared."""
    import torch
    import transformers
    from transformers.pipelines import SUPPORTED_TASKS

    name, task, directory = case
    which = PIPELINES[task]
    if "roberta" in name and task == "causal-lm":
        return "not compared: its generate counts RoBERTa's positions from 0, its forward from pad_token_id + 1"
    if which not in SUPPORTED_TASKS:
        return f"transformers {transformers.__version__} has no such pipeline"
    run = transformers.pipeline(which, model=str(directory), tokenizer=load_tokenizer(directory), device="cpu")
    own, text = ours(folder, name, task), TEXTS[1]
    if which == "feature-extraction":
        return difference(torch.tensor(run(text)[0]), own["last_hidden_state"][-1], limit=1e-3)
    if which == "text-classification":
        scores = {row["label"]: row["score"] for row in run(text, top_k=None)}
        return difference([scores[f"LABEL_{i}"] for i in range(len(scores))], own["logits"][1].softmax(-1))
    if which == "token-classification":
        rows = run(text, ignore_labels=[])
        expected = own["logits"][1].softmax(-1).max(-1).values[[row["index"] for row in rows]]
        return difference([row["score"] for row in rows], expected)
    if which == "fill-mask":
        rows = run("the film was [MASK]", top_k=3)
        with torch.no_grad():
            logits = load_theirs(case)(**tokens_of(run, "the film was [MASK]")).logits
        return difference([row["score"] for row in rows], logits[0, 4].softmax(-1).topk(3).values)
    return generated(run, directory)


def generated(run: Any, directory: Path) -> str:
    """Check that a pipeline generates the same tokens as the model here."""
    import modelcenter as mc

    prompt = "the film was"
    (answer,) = run(prompt, max_new_tokens=6, do_sample=False, return_tensors=True)
    theirs = answer["generated_token_ids"]
    ids = tokens_of(run, prompt)["input_ids"]
    mine = mc.from_pretrained(str(directory)).generate(ids, max_new_tokens=6, eos_token_id=None)
    assert list(theirs) == mine[0].tolist()[: len(theirs)], f"{theirs} and {mine.tolist()}"
    return "the same tokens"


def tokens_of(run: Any, text: str) -> Any:
    batch = run.tokenizer(text, return_tensors="pt")
    batch.pop("token_type_ids", None)
    return batch


def safetensors_files(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open
    from safetensors.numpy import load_file

    files = tensors = 0
    for path in sorted(folder.rglob("*.safetensors")):
        values = load_file(path)
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}, opened.metadata()
            assert sorted(opened.keys()) == sorted(values)
            for name in opened.keys():
                difference(opened.get_tensor(name), values[name], limit=0)
        files, tensors = files + 1, tensors + len(values)
    assert files, "no file was found"
    return {"files": files, "tensors": tensors}


def peft_adapters(folder: Path) -> dict[str, Any]:
    """Train a LoRA, save it, load it into the export again, and merge it: the logits must be the same."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    found = {}
    wanted = (
        ("bert", "sequence-classification", "SEQ_CLS", None),
        ("gpt2", "causal-lm", "CAUSAL_LM", None),
        ("llama", "causal-lm", "CAUSAL_LM", None),
        ("t5", "seq2seq-lm", "SEQ_2_SEQ_LM", None),
    )
    for name, task, kind, targets in wanted:
        directory = folder / name / task
        tokenizer = load_tokenizer(directory)
        batch = inputs_of(name, task, tokenizer)
        labels = torch.tensor([0, 1]) if kind == "SEQ_CLS" else batch["input_ids"]
        torch.manual_seed(0)
        model = get_peft_model(
            load_theirs((name, task, directory)), LoraConfig(task_type=kind, r=4, target_modules=targets)
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(4):
            loss = model(**batch, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0], losses
        model.eval()
        adapter = folder.parent / "adapters" / name
        model.save_pretrained(str(adapter))
        again = PeftModel.from_pretrained(load_theirs((name, task, directory)), adapter).eval()
        with torch.no_grad():
            trained = model(**batch, labels=labels).logits
            worst = difference(again(**batch, labels=labels).logits, trained)
            merged = again.merge_and_unload()
            worst = max(worst, difference(merged(**batch, labels=labels).logits, trained, limit=1e-3))
        found[f"{name} {task}"] = worst
    return found


# Embedding settings of an export for the task "embedding"; {}: the model's defaults.
EMBEDDING_SETTINGS: tuple[dict[str, Any], ...] = (
    {"pooling": "cls"},
    {"pooling": "last", "similarity": "dot"},
    {"pooling": "mean", "similarity": "dot", "query_prompt": "the great plot ", "document_prompt": "a movie "},
    {"pooling": "mean", "normalize": False, "max_length": 8},
    {"pooling": "max", "dense": ["24:gelu", "40:identity"]},
    {"pooling": "cls+mean_sqrt_len", "dense": [{"width": 20, "bias": False, "residual": True}], "similarity": "dot"},
    {"pooling": "weighted_mean+mean", "include_prompt": False, "query_prompt": "the great plot "},
)


def sentence_transformers_models(folder: Path) -> dict[str, Any]:
    """Compare mean-pooled embeddings of bare encoders with the mean of the exported hidden states, embeddings of every
    export for embeddings with those of the exported model, and both with the model that sentence-transformers saves,
    loaded here."""
    import sentence_transformers

    import modelcenter as mc

    found = {}
    for name in ("bert", "roberta", "xlm-roberta"):
        directory = folder / name / "base"
        model = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
        mask = inputs_of(name, "base", load_tokenizer(directory))["attention_mask"][..., None]
        hidden = ours(folder, name, "base")["last_hidden_state"]
        expected = (hidden * mask).sum(1) / mask.sum(1)
        found[name] = difference(model.encode(TEXTS), expected)
    for name, task, directory in cases(folder):
        if task == "embedding":
            found[f"{name} {task}"] = both_ways(directory, ours(folder, name, task)["embeddings"])
    start = folder / "bert" / "embedding"
    tokenizer = load_tokenizer(start)
    for number, settings in enumerate(EMBEDDING_SETTINGS):
        model = mc.from_pretrained(str(start), "embedding", embedding=settings)
        directory = folder.parent / f"embedding settings {number}"
        model.save_pretrained(directory, tokenizer=tokenizer)
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        prompts = {role: settings.get(f"{role}_prompt", "") for role in ("query", "document")}
        found[f"bert, {shown}"] = max(
            both_ways(directory, own_embeddings(model, tokenizer, prompt), role, settings.get("similarity", "cosine"))
            for role, prompt in prompts.items()
        )
    for name, task, directory in cases(folder):
        if task == "sequence-classification":
            activation = ACTIVATIONS[len(found) % len(ACTIVATIONS)]
            found[f"{name} reranker, {activation}"] = reranker_both_ways(directory, activation)
    return found


def reranker_both_ways(directory: Path, activation: str) -> float:
    """The differences between the scores of a classifier with one label, exported as a reranker, in
    sentence-transformers' CrossEncoder and here, and between these and the scores of what CrossEncoder saves."""
    import sentence_transformers
    import torch

    import modelcenter as mc

    tokenizer = load_tokenizer(directory)
    model = mc.from_pretrained(str(directory), num_labels=1, ignore_mismatched_sizes=True)
    if getattr(model.config, "type_vocab_size", 0) < 2:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.head.parameters():  # some are new, and too small for a difference to show
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.config.extra = with_activation(model.config.extra, activation)
    model.config.pad_token_id = tokenizer.pad_token_id  # which marks where the text of a decoder ends

    def scores(model: Any) -> Any:
        batch = tokenizer([TEXTS[0]] * len(TEXTS), list(TEXTS), padding=True, return_tensors="pt")
        with torch.no_grad():
            out = model.eval()(**batch).logits[:, 0]
        return out if activation_of(model.config.extra) == "identity" else out.sigmoid()

    expected = scores(model)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as again:
        model.save_pretrained(first, tokenizer=tokenizer)
        theirs = sentence_transformers.CrossEncoder(first, device="cpu")
        if type(theirs.tokenizer) is not type(tokenizer):  # see load_tokenizer
            theirs[0].processor = tokenizer
        worst = difference(theirs.predict([(TEXTS[0], text) for text in TEXTS]), expected)
        theirs.save_pretrained(again)
        read = mc.from_pretrained(again)
        assert (read.task, activation_of(read.config.extra)) == ("sequence-classification", activation)
        return max(worst, difference(scores(read), expected))


def both_ways(directory: Path, expected: Any, role: str = "document", similarity: str = "cosine") -> float:
    """The differences between sentence-transformers' embeddings of an export and those of the exported model, and
    between these and the embeddings, here, of what sentence-transformers saves."""
    import sentence_transformers

    import modelcenter as mc

    model = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    tokenizer = load_tokenizer(directory)
    if type(model.tokenizer) is not type(tokenizer):  # see load_tokenizer
        model[0].processor = tokenizer
    encode = {"query": model.encode_query, "document": model.encode_document}[role]
    worst = difference(encode(TEXTS), expected)
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again)
        read, tokenizer = mc.from_pretrained(again), load_tokenizer(Path(again))
    assert read.task == "embedding", f"read as {read.task}"
    settings = read.config.embedding
    said = (model.similarity_fn_name, settings.similarity)
    assert said == (similarity, similarity), f"{similarity} there, but {said} here"
    prompt = settings.query_prompt if role == "query" else settings.document_prompt
    return max(worst, difference(own_embeddings(read, tokenizer, prompt), expected))


def own_embeddings(model: Any, tokenizer: Any, prompt: str) -> Any:
    """The embeddings of the texts by a model of this project."""
    import torch

    most = min(model.config.embedding.max_length or sys.maxsize, tokenizer.model_max_length)
    texts = [prompt + text for text in TEXTS]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if prompt and not model.config.embedding.include_prompt:
        length = len(tokenizer(prompt)["input_ids"]) - 1  # without the token that ends it
        inputs["prompt_lengths"] = torch.full((len(texts),), length)
    with torch.no_grad():
        return model.eval()(**inputs).embeddings


def onnx_export(folder: Path) -> dict[str, Any]:
    """Export the loaded model with torch.onnx.export and dynamic sizes, and run it in onnxruntime."""
    import onnx
    import onnxruntime
    import torch

    found = {}
    wanted = [("bert", task) for task in ("base", "masked-lm", "sequence-classification", "question-answering")]
    wanted += [("roberta", "token-classification"), ("gpt2", "causal-lm"), ("llama", "causal-lm")]
    for name, task in wanted:
        directory = folder / name / task
        batch = inputs_of(name, task, load_tokenizer(directory))
        model = load_theirs((name, task, directory))
        model.config.use_cache = False
        path = folder.parent / f"{name}-{task}.onnx"
        names = list(batch)
        key = AUTO[task][1]

        class Bare(torch.nn.Module):
            def __init__(self, inner: Any, names: list[str], key: str):
                super().__init__()
                self.inner, self.names, self.key = inner, names, key

            def forward(self, *values: Any) -> Any:
                return self.inner(**dict(zip(self.names, values, strict=True)))[self.key]

        one = tuple(batch.values())
        rows, places = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("places", min=2, max=40)
        torch.onnx.export(
            Bare(model, names, key),
            one,
            str(path),
            input_names=names,
            output_names=[key],
            dynamo=True,
            dynamic_shapes=(tuple({0: rows, 1: places} for _ in names),),
        )
        onnx.checker.check_model(str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        out = session.run(None, {n: v.numpy() for n, v in batch.items()})[0]
        expected = ours(folder, name, task)[key]
        found[f"{name} {task}"] = difference(out, expected, real_places(expected, batch))
    return found


LLAMA_CPP = "llama.cpp"
CLIENTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "transformers AutoModel": transformers_auto,
    "transformers pipeline": transformers_pipeline,
    "safetensors": safetensors_files,
    "peft": peft_adapters,
    "sentence-transformers": sentence_transformers_models,
    "onnx": onnx_export,
    LLAMA_CPP: llama_cpp.check,
}


# -- the run ---------------------------------------------------------------------------------------------------------


def run_client(python: str, name: str, folder: Path, threads: int) -> dict[str, Any]:
    command = [python, __file__, "--client", name, "--work", str(folder), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=lib.ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"ok": False, "why": done.stderr.strip().splitlines()[-1:] or ["no output"]}
    return json.loads(lines[-1])


def one_client(name: str, folder: Path, threads: int) -> None:
    """Run one client, in its environment, and print a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    try:
        result = {"ok": True, **CLIENTS[name](folder)}
    except Exception as error:
        traceback.print_exc()
        result = {"ok": False, "why": f"{type(error).__name__}: {error}"[:500]}
    print("\n" + json.dumps(result))


def main() -> None:
    parser = lib.parser(__doc__, rounds=1)
    parser.add_argument("--env", help="environment (default: made in the user's cache folder)")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, help="clients to run (default: all)")
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = lib.parse(parser, only=["safetensors"])
    if args.client:
        one_client(args.client, Path(args.work), args.threads)
        return
    place = environments.cache_dir() / "clients" if args.env is None else Path(args.env)
    wanted = args.only or list(CLIENTS)
    pythons = dict.fromkeys(wanted, "")
    if set(wanted) - {LLAMA_CPP}:
        pythons = dict.fromkeys(wanted, environments.environment(place, NEEDED, PINNED))
    packages = environments.versions(next(iter(pythons.values())) or sys.executable, *PINNED, *NEEDED)
    if LLAMA_CPP in wanted:
        pythons[LLAMA_CPP] = llama_cpp.environment(place.with_name(f"{place.name}-llama.cpp"))
        packages |= llama_cpp.versions(pythons[LLAMA_CPP])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "exports"
        make_exports(folder)
        numbers = {name: run_client(python, name, folder, args.threads) for name, python in pythons.items()}
    notes = [f"{name}: {'ok' if result['ok'] else 'failed'}" for name, result in numbers.items()]
    exports = len(ARCHITECTURES + FOREIGN)
    lib.finish(args, "clients", numbers, notes=notes, packages=packages, exports=exports)
    failed = [name for name, result in numbers.items() if not result["ok"]]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
