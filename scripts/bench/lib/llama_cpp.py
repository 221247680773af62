"""llama.cpp's converter to GGUF: install it, run it on the exports, and compare its files with the exports.

The converter is not a package. It is extracted from the source archive of llama-cpp-python, which contains all of
llama.cpp, with its library for GGUF files and its list of requirements. It runs in a separate environment, because it
needs an older transformers than this project does; a client in that environment finds it next to the environment.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from scripts.bench.lib import environments, exports

PACKAGE, SCRIPT, VERSION = "llama-cpp-python", "convert_hf_to_gguf.py", "version.txt"
PARTS = ("conversion", "gguf-py", "requirements")
REFUSED = "BPE pre-tokenizer was not recognized"
Array = Any  # numpy's


# -- installation ----------------------------------------------------------------------------------------------------


def environment(folder: Path) -> str:
    """The interpreter of an environment with the converter's requirements; the converter is next to it.

    Raises:
        CalledProcessError: pip fails.
        ValueError: the archive has no converter.
    """
    source = folder / "source"
    if not (source / VERSION).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Nothing is compiled: pip only asks the archive's build tools for its name and version.
            command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
            print(f"downloading the source archive of {PACKAGE}", file=sys.stderr, flush=True)
            subprocess.run([*command, "--no-binary", PACKAGE, "-d", scratch, PACKAGE], check=True)
            (archive,) = Path(scratch).glob("*.tar.gz")
            extract_converter(archive, source)
    return environments.environment(folder / "env", requirements(source) + ("xllamacpp",), environments.PINNED)


def extract_converter(archive: Path, folder: Path) -> None:
    """Extract the converter and what it imports from llama-cpp-python's source archive.

    Raises:
        ValueError: the archive does not have exactly one converter.
    """
    with tarfile.open(archive) as held:
        files = [(PurePosixPath(member.name), member) for member in held.getmembers() if member.isfile()]
        roots = [path.parent for path, _ in files if path.name == SCRIPT]
        if len(roots) != 1:
            raise ValueError(f"{archive.name}: {len(roots)} files are named {SCRIPT}, expected one")
        for path, member in files:
            inside = path.relative_to(roots[0]) if path.is_relative_to(roots[0]) else PurePosixPath()
            taken = inside.suffix in (".py", ".txt") and ".." not in inside.parts
            content = held.extractfile(member) if taken else None
            if content is not None and (len(inside.parts) == 1 or inside.parts[0] in PARTS):
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                (folder / inside).write_bytes(content.read())
    (folder / VERSION).write_text(archive.name.removesuffix(".tar.gz").rpartition("-")[2])


def requirements(source: Path, name: str = "requirements-convert_hf_to_gguf.txt") -> tuple[str, ...]:
    """The converter's requirements, except torch and numpy, which are the running ones, and gguf, which is next to it.

    The upper bound on protobuf is dropped, because the newest wheels of sentencepiece need a newer one.
    """
    found: list[str] = []
    for line in (source / "requirements" / name).read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r"):
            found += requirements(source, Path(line.split()[1]).name)
        elif line and not line.startswith("-") and re.split(r"[^\w-]", line)[0] not in ("torch", "numpy", "gguf"):
            found.append(line.partition(",<")[0] if line.startswith("protobuf") else line)
    return tuple(found)


def versions(python: str) -> dict[str, str]:
    """Versions of the converter and of the packages it runs with, as seen by an environment's interpreter."""
    of = Path(python).parents[2] / "source" / VERSION
    beside = environments.versions(python, "transformers", "xllamacpp")
    return {PACKAGE: of.read_text()} | {f"{name} with llama.cpp": version for name, version in beside.items()}


# -- conversion and comparison, in that environment ------------------------------------------------------------------


def converter() -> Any:
    """The converter as a module, with its own version of gguf."""
    source = Path(sys.prefix).parent / "source"
    sys.path[:0] = [path for path in (str(source), str(source / "gguf-py")) if path not in sys.path]
    return importlib.import_module(Path(SCRIPT).stem)


def convert(directory: Path, out: Path) -> bool:
    """Write a GGUF file in float32 with the converter's `main`. Returns whether it accepted the tokenizer.

    It recognises WordPiece and byte-level tokenizers by how the published ones encode one text, and refuses any other
    vocabulary. Such a model is converted with another vocabulary, on which no tensor depends.

    Raises:
        NotImplementedError, ...: the converter refuses for another reason.
    """
    script, before = converter(), sys.argv
    sys.argv = [SCRIPT, str(directory), "--outtype", "f32", "--outfile", str(out)]
    try:
        script.main()
    except NotImplementedError as error:
        if REFUSED not in str(error):
            raise
    else:
        return True
    finally:
        sys.argv = before
    import torch

    write_sentencepiece(directory / "tokenizer.model")
    config = json.loads((directory / "config.json").read_text())
    of = script.get_model_class(config["architectures"][0])
    model = of(directory, script.gguf.LlamaFileType.ALL_F32, out)
    model.set_vocab = model._set_vocab_sentencepiece
    if "type_vocab_size" in config:  # also written by the method that reads BERT's vocabulary
        model.gguf_writer.add_token_type_count(config["type_vocab_size"])
    with torch.inference_mode():
        model.write()
    return False


def halves(value: Array, heads: int) -> Array:
    """Undo llama.cpp's order of query or key rows, in which channels that are rotated together are adjacent.

    transformers has each head's even channels before its odd ones.
    """
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def by_heads(value: Array, heads: int) -> Array:
    """Undo llama.cpp's order of q, k and v, which has all heads of each. GPT-NeoX keeps q, k and v of a head
    together."""
    return value.reshape(3, heads, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


def transposed(value: Array, _: int) -> Array:
    return value.T


# model_type: (pattern of tensors, function that undoes the converter's change, config field that it takes).
Undo = tuple[str, Callable[[Array, int], Array], str]
_LLAMA: tuple[Undo, ...] = (
    (r"\.q_proj\.", halves, "num_attention_heads"),
    (r"\.k_proj\.", halves, "num_key_value_heads"),
)
UNDO: dict[str, tuple[Undo, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "minicpm": _LLAMA,
    "gpt2": ((r"\.c_(attn|proj|fc)\.weight$", transposed, "n_head"),),
    "gpt_neox": ((r"\.query_key_value\.", by_heads, "num_attention_heads"),),
}
# Tensors that llama.cpp does not use: it has its own pooling and no masked LM. Without the pooler, a BERT classifier
# has other scores there.
LEFT_OUT = {
    "BertModel": r"pooler\.",
    "RobertaModel": r"pooler\.",
    "XLMRobertaModel": r"pooler\.",
    "BertForMaskedLM": r"cls\.",
    "BertForSequenceClassification": r"bert\.pooler\.",
}


def compare(
    config: Mapping[str, Any], tensors: Mapping[str, Array], written: Mapping[str, Array], name_of: Callable
) -> list[str]:
    """The names of exported tensors that the converter leaves out; all others must be in the GGUF file, bit for bit.

    Args:
        config: of the export. tensors: of the export. written: {name in the GGUF file: array in the order of torch's
            dimensions}. name_of: the GGUF name of an exported tensor, or None, as gguf's TensorNameMap says.

    Raises:
        AssertionError: a tensor is missing, differs, or is only in the GGUF file.
    """
    import numpy as np

    of, left_out, seen = config["model_type"], [], set()
    for name, value in tensors.items():
        there = name_of(re.sub(r"^(bert|roberta)\.", "", name))
        if there not in written:
            assert re.match(LEFT_OUT.get(config["architectures"][0], "(?!)"), name), f"{name} is not in the GGUF file"
            left_out.append(name)
            continue
        seen.add(there)
        back = written[there]
        for pattern, undo, field in UNDO.get(of, ()):
            if re.search(pattern, name):
                back = undo(back, config[field])
        if of in ("roberta", "xlm-roberta") and name.endswith("position_embeddings.weight"):
            value = value[config["pad_token_id"] + 1 :]  # llama.cpp counts positions from 0; the rows before are unused
        assert back.shape == value.shape, f"{name} has shape {value.shape}, but {back.shape} in the GGUF file"
        differing = int(np.sum(back != value))
        assert not differing, f"{name}: {differing} of {value.size} elements differ in the GGUF file"
    extra = sorted(set(written) - seen)
    assert not extra, f"only in the GGUF file: {extra[:4]}"
    return left_out


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(fields, tensors) of a GGUF file, by gguf's reader."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    # GGUF lists dimensions from the last to the first; the reader's data has torch's order.
    return fields, {tensor.name: tensor.data.copy() for tensor in reader.tensors}


# -- inference -------------------------------------------------------------------------------------------------------


def serve(path: Path, encoder: bool) -> Any:
    """A model in llama.cpp, from xllamacpp's wheels: in float32, one sequence at a time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 64, 1, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if encoder:
        params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    return xllamacpp.Server(params)


def answers(path: Path, ids: list[int], own: Mapping[str, Any], limit: float) -> float:
    """The largest difference between llama.cpp's outputs for a text and the exported model's.

    Outputs are log-probabilities of the next token, or the normalised mean of an encoder's states.

    Args:
        ids: the text. own: the exported model's outputs for it, each (seq, ...). limit: 1e-4, or 2e-3 with GELU, for
            which llama.cpp has a table in half precision.

    Raises:
        AssertionError: the difference exceeds the limit.
    """
    import torch

    encoder = "logits" not in own
    server = serve(path, encoder)
    if encoder:
        expected = torch.nn.functional.normalize(own["last_hidden_state"].mean(0), dim=0)
        found = torch.tensor(server.handle_embeddings({"input": ids})["data"][0]["embedding"])
    else:
        expected = own["logits"][-1].log_softmax(-1)
        asked = {"prompt": ids, "n_predict": 1, "n_probs": len(expected), "temperature": 0.0}
        first = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]
        found = torch.full_like(expected, torch.inf)
        for row in first["top_logprobs"]:
            found[row["id"]] = row["logprob"]
    assert found.shape == expected.shape, f"llama.cpp gives {tuple(found.shape)}, expected {tuple(expected.shape)}"
    worst = float((found - expected).abs().max())
    assert worst <= limit, f"llama.cpp's answer differs by {worst}"
    return worst


# -- the client ------------------------------------------------------------------------------------------------------

# The files in which converters look for a SentencePiece vocabulary, by family; other families use transformers' files.
VOCABULARIES = {name: "tokenizer.model" for name in ("llama", "mistral", "minicpm", "minicpm3", "qwen2", "qwen3")}
VOCABULARIES |= {name: "spiece.model" for name in exports.ENCODER_DECODERS}
VOCABULARIES["xlm-roberta"] = "sentencepiece.bpe.model"


def write_sentencepiece(path: Path) -> None:
    """Write a SentencePiece vocabulary smaller than that of any export."""
    import sentencepiece

    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(exports.TEXTS),
            model_writer=file,
            model_type="unigram",
            vocab_size=24,
            minloglevel=2,
        )


def check(folder: Path) -> dict[str, Any]:
    """Convert every export whose class the converter knows, compare every tensor, and compare llama.cpp's outputs."""
    from safetensors.numpy import load_file

    gguf = converter().gguf
    # The converter imports it: {class of transformers: the converter's module}.
    register = sys.modules["conversion"].TEXT_MODEL_MAP
    found, problems = {}, []
    ids = exports.word_tokenizer()(exports.TEXTS[1])["input_ids"]
    for directory in sorted(path.parent for path in folder.glob("*/*/config.json")):
        name, task = directory.parts[-2:]
        config = json.loads((directory / "config.json").read_text())
        if config["architectures"][0] not in register:
            continue
        place = folder.parent / "gguf" / name / task
        shutil.copytree(directory, place)
        for path in place.glob("tokenizer*"):
            path.unlink()
        if name in VOCABULARIES:
            write_sentencepiece(place / VOCABULARIES[name])
        else:
            exports.word_tokenizer().save_pretrained(place)
        try:
            accepted = convert(place, place / "model.gguf")
            fields, written = read(place / "model.gguf")
            arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[fields["general.architecture"]]
            table = gguf.get_tensor_name_map(arch, 8)
            tensors = {key: value for path in place.glob("*.safetensors") for key, value in load_file(path).items()}
            left_out = compare(config, tensors, written, lambda key, table=table: gguf_name(table, key))
            results = [f"{len(written)} tensors, bit for bit"]
            results += [f"without {', '.join(left_out)}"] if left_out else []
            results += [] if accepted else ["refused only for its tokenizer"]
            if task == "causal-lm" or (task == "base" and name in exports.ENCODERS):
                own = {key: value[1] for key, value in exports.ours(folder, name, task).items()}
                limit = 2e-3 if "gelu" in str(config.get("hidden_act", config.get("activation_function"))) else 1e-4
                results.append(f"answers differ by {answers(place / 'model.gguf', ids, own, limit):.1e}")
            found[f"{name} {task}"] = "; ".join(results)
        except Exception as error:  # the other exports are still tried
            problems.append(f"{name} {task}: {type(error).__name__}: {error}")
    assert not problems, "; ".join(problems)
    return found


def gguf_name(table: Any, name: str) -> str | None:
    """The name of an exported tensor in a GGUF file; a model without a head is looked up with the prefix `model.`."""
    suffixes = (".weight", ".bias")
    return table.get_name(name, suffixes) or table.get_name(f"model.{name}", suffixes)
