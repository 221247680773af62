"""Loading tokenizers by name: transformers' own, except CPM's (tokenization_cpm)."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter import registry
from modelcenter.hub.files.git_lfs import refuse_lfs_pointer
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.links import refuse_broken_link
from modelcenter.hub.files.names import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILES
from modelcenter.hub.files.pair_template_files import template_with_prompt, writes_pairs
from modelcenter.hub.remote.download import HubOptions, download_file, is_offline, is_reachable, not_cached_error
from modelcenter.hub.resolve import WEIGHT_SUFFIXES, local_directory, name_of, repo_of
from modelcenter.registry import ARCHITECTURES, model_type_of

VOCABULARY_FILE = "vocab.txt"
# Readers of the vocab.txt of a model without tokenizer files; CpmAntTokenizer is transformers' own.
_CPM_CLASSES = {
    "cpm1": "CPM1Tokenizer",
    "cpm2": "CPM2Tokenizer",
    "cpm3": "CpmAntTokenizer",
    "cpmbee": "CPMBeeTokenizer",
}
# Spellings in tokenizer_config.json -> class. The last is that of the code published with CPM-Bee.
_OWN_CLASSES = {name: name for name in _CPM_CLASSES.values() if name != "CpmAntTokenizer"} | {
    "CpmBeeTokenizer": "CPMBeeTokenizer"
}


@dataclass(frozen=True)
class _TokenizerFiles:
    """The location of a tokenizer's files. source: the argument for transformers, a directory or Hub id."""

    directory: Path | None  # None: on the Hub
    source: str
    options: HubOptions

    def find(self, name: str) -> Path | None:
        """A file of the directory or the repository; None if it does not exist."""
        if self.directory is None:
            return download_file(self.source, name, self.options)
        return self.directory / name if (self.directory / name).is_file() else None

    def held(self) -> list[Path]:
        """The tokenizer's files in the directory."""
        return [] if self.directory is None else _tokenizer_files(self.directory)

    def are_cached(self) -> bool:
        """Whether the cache has files of the repository's tokenizer."""
        offline = replace(self.options, local_files_only=True)
        return any(download_file(self.source, name, offline) is not None for name in TOKENIZER_FILES)


def load_tokenizer(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """transformers' AutoTokenizer, or one of CPM's, for a directory, a weight file, a name of `list_models`, a Hub id.

    A directory of CPM-1, CPM-2, CPM-3 or CPM-Bee needs only a vocab.txt.

    Args:
        kwargs: for transformers (revision, token, cache_dir, local_files_only, use_fast, ...).

    Raises:
        ValueError: the directory or model does not exist, or has no tokenizer.
    """
    from transformers import AutoTokenizer

    directory, source, pinned = _locate(name_or_path)
    if pinned is not None:
        kwargs.setdefault("revision", pinned)
    kwargs.setdefault("trust_remote_code", False)  # transformers would ask the user whether to run a model's code
    files = _TokenizerFiles(directory, source, _options(kwargs))
    if directory is None and files.are_cached() and not is_reachable(source, TOKENIZER_CONFIG_FILE, files.options):
        # transformers would search half a minute for each missing file
        kwargs["local_files_only"] = True
        files = replace(files, options=_options(kwargs))
    cpm_class = _cpm_class(files)
    config_file = None if cpm_class is not None else files.find(CONFIG_FILE)
    fields = {} if config_file is None else read_json(config_file)
    try:
        if cpm_class is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("trust_remote_code", "use_fast")}
            return cpm_class.from_pretrained(source, **kwargs)
        masks = _masks_of_pegasus(files) if model_type_of(fields) == "pegasus" and "mask_token" not in kwargs else None
        if masks is not None:
            kwargs |= {"mask_token": masks.sentence, "mask_token_sent": masks.token}  # in the order of their ids
        kwargs = {**_auto_arguments(files, fields, kwargs["trust_remote_code"]), **kwargs}
        made = _with_eos(AutoTokenizer.from_pretrained(source, **kwargs), fields)
        if writes_pairs(getattr(made, "chat_template", None)):
            made.chat_template = template_with_prompt(files.find, made.chat_template)
        return made if masks is None else masks.put_right(made)
    except Exception as error:  # the tokenizers library raises only this type; transformers KeyErrors and others
        for path in files.held():
            if path.suffix == ".json":
                read_json(path)  # reports a truncated file itself
        if config_file is not None:
            _check_config(fields, config_file)
        if directory is None and is_offline(files.options) and not files.are_cached():
            raise not_cached_error(source, "tokenizer", files.options) from error
        raise ValueError(_why_not_loaded(files, error, class_is_known=cpm_class is not None)) from error


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """tokenizer.save_pretrained, with an OSError if a file cannot be written.

    The tokenizers library, which writes tokenizer.json, raises an Exception that can be recognised only by its text. A
    tokenizer in Python is copied first, because CpmAntTokenizer loses its spaces and newlines when it writes them.
    """
    if not getattr(tokenizer, "is_fast", True):
        tokenizer = copy.deepcopy(tokenizer)
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        written = re.fullmatch(r"(.*) \(os error (\d+)\)", str(error))
        if type(error) is not Exception or written is None:
            raise
        raise OSError(int(written[2]), written[1], str(directory)) from error


def _locate(name_or_path: str | os.PathLike[str]) -> tuple[Path | None, str, str | None]:
    """(directory, source, commit): a directory, checked to hold a tokenizer, or a Hub repository."""
    name = name_of(name_or_path)
    folder = Path(expanduser(name))
    if folder.is_file() and folder.name.endswith(WEIGHT_SUFFIXES):
        folder = folder.parent
        name = str(folder)
    # A directory with a tokenizer need not contain a model.
    directory = folder if (folder / TOKENIZER_CONFIG_FILE).is_file() else local_directory(name)
    if directory is None:
        return None, *repo_of(name)
    for file_name in TOKENIZER_FILES:
        refuse_broken_link(directory / file_name)
    held = _tokenizer_files(directory)
    if not held:
        # for some families, transformers would make one without words
        raise ValueError(
            f"{directory} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); put one there with "
            "tokenizer.save_pretrained"
        )
    for path in held:
        refuse_lfs_pointer(path)
    return directory, str(directory), None


def _tokenizer_files(directory: Path) -> list[Path]:
    return [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]


def _auto_arguments(files: _TokenizerFiles, fields: Mapping[str, Any], trust_remote_code: bool) -> dict[str, Any]:
    """Arguments for AutoTokenizer that it would get wrong by itself. fields: of the config in the same directory."""
    from transformers.utils import is_mistral_common_available

    arguments: dict[str, Any] = {}
    if not trust_remote_code and (config := _config_that_transformers_lacks(fields)) is not None:
        arguments["config"] = config
    if is_mistral_common_available() and files.find("tokenizer.json") is not None:
        # of two forms of a vocabulary, transformers prefers Mistral's own, which lacks what training needs
        arguments["mistral_format"] = False
    if model_type_of(fields) == "albert":
        arguments |= _albert_arguments(files)
    return arguments


def _albert_arguments(files: _TokenizerFiles) -> dict[str, Any]:
    """From the vocab.txt of Chinese ALBERTs, transformers' ALBERT tokenizer reads no words; and from version 5 on it
    omits the token types, which tell the texts of a pair apart."""
    path = files.find(TOKENIZER_CONFIG_FILE)
    settings = read_json(path) if path is not None else {}
    arguments: dict[str, Any] = {}
    if "model_input_names" not in settings:
        arguments["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    others = ("tokenizer.json", "spiece.model")
    if "tokenizer_class" not in settings and not any(files.find(name) is not None for name in others):
        arguments["tokenizer_type"] = "bert"
    return arguments


@dataclass(frozen=True)
class _PegasusMasks:
    """The mask tokens for a sentence and for a token, in the order of their ids in the vocabulary."""

    sentence: str
    token: str

    def put_right(self, tokenizer: Any) -> Any:
        """The tokenizer, which was built with the two masks exchanged, with each under its own name."""
        tokenizer.mask_token = self.token
        tokenizer.add_special_tokens({"extra_special_tokens": [self.sentence]}, replace_extra_special_tokens=False)
        tokenizer.init_kwargs |= {"mask_token": self.token, "mask_token_sent": self.sentence}
        return tokenizer


def _masks_of_pegasus(files: _TokenizerFiles) -> _PegasusMasks | None:
    """The masks of a SentencePiece model without tokenizer.json; None for other files.

    From such a model, transformers 5 makes a vocabulary with the mask of tokens before that of sentences; if the files
    name only the former, it omits the latter, so that all later ids are too small by one.
    """
    if files.find("tokenizer.json") is not None or files.find("spiece.model") is None:
        return None
    named: dict[str, Any] = {"mask_token_sent": "<mask_1>", "mask_token": "<mask_2>"}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG_FILE):
        if (path := files.find(name)) is not None:
            said = {key: value for key, value in read_json(path).items() if key in named}
            named |= {key: value["content"] if isinstance(value, dict) else value for key, value in said.items()}
    return None if None in named.values() else _PegasusMasks(named["mask_token_sent"], named["mask_token"])


def _why_not_loaded(files: _TokenizerFiles, error: Exception, class_is_known: bool) -> str:
    """The text that explains to the user why `error` prevented the tokenizer from loading."""
    if message := _lacks_packages(files):
        return f"no tokenizer could be loaded from {files.source}: {message}"
    why = " ".join(str(error).split())
    why = f"no tokenizer could be loaded from {files.source}: {why}{'' if why.endswith('.') else '.'}"
    if class_is_known or isinstance(error, ImportError):  # the error names what it needs
        return why
    return (
        f"{why} A vocabulary alone does not identify its tokenizer: tokenizer_config.json names the class, and some "
        "have none in transformers. A file of newer versions needs newer versions here: pip install -U tokenizers "
        "transformers"
    )


def _lacks_packages(files: _TokenizerFiles) -> str | None:
    """The packages missing for a tokenizer that is only a SentencePiece model; None if it is another or all are
    installed. Without them, transformers takes such a file for one of tiktoken, and asks for that."""
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    available = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    missing = [package for package, installed in available.items() if not installed]
    if not missing:
        return None
    files = replace(files, options=replace(files.options, local_files_only=True))  # existing files are cached by now
    held = [name for name in TOKENIZER_FILES if files.find(name) is not None]
    models = [name for name in held if name.endswith(".model")]
    if not models or "tokenizer.json" in held:
        return None
    return (
        f"{models[0]} is read by the packages sentencepiece and protobuf, but {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'modelcenter[sentencepiece]'"
    )


def _check_config(fields: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for a value of the wrong type in the config of a known family: transformers also reads it for
    the tokenizer, and fails with an unrelated error."""
    kind = model_type_of(fields)
    if str(kind) in ARCHITECTURES:
        spec = registry.get(kind, fields.get("architectures"))
        try:
            spec.arch_map().config.check_values(fields, spec.config_class())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _config_that_transformers_lacks(fields: Mapping[str, Any]) -> Any:
    """The tokenizer's fields of a config whose family only we have, as a transformers config: otherwise transformers
    would warn of a model that it cannot use. None: transformers can read the config itself."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = str(model_type_of(fields))
    if kind not in ARCHITECTURES or kind in CONFIG_MAPPING:
        return None
    return PreTrainedConfig(**{name: fields[name] for name in ("tokenizer_class", "auto_map") if name in fields})


def _with_eos(tokenizer: Any, fields: Mapping[str, Any]) -> Any:
    """The tokenizer. For a composed encoder-decoder, tokens that begin and separate texts, if it has no others (as
    BERT's), also begin and end generated texts. fields: of the config in the same directory."""
    if tokenizer.eos_token is None and tokenizer.sep_token is not None and model_type_of(fields) == "encoder-decoder":
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.cls_token
    return tokenizer


def _cpm_class(files: _TokenizerFiles) -> Any:
    """The tokenizer class of a CPM model; None if transformers' AutoTokenizer knows it."""
    path = files.find(TOKENIZER_CONFIG_FILE)  # fails immediately if the name does not exist, or without a network
    settings = read_json(path) if path is not None else {}
    name = _OWN_CLASSES.get(settings.get("tokenizer_class", ""))
    if name is None and not settings and (directory := files.directory) is not None:
        bare = (directory / VOCABULARY_FILE).is_file() and (directory / CONFIG_FILE).is_file()
        config = read_json(directory / CONFIG_FILE) if bare else {}
        if str(config.get("model_type")) in ARCHITECTURES:
            name = _CPM_CLASSES.get(registry.get(config["model_type"], config.get("architectures")).model_type)
    if name is None:
        return None
    if name not in _OWN_CLASSES:
        import transformers

        return getattr(transformers, name)
    from modelcenter.hub import tokenization_cpm

    found = getattr(tokenization_cpm, name)
    found.register_for_auto_class("AutoTokenizer")  # save_pretrained also writes its code, for transformers
    return found


def _options(kwargs: Mapping[str, Any]) -> HubOptions:
    known = ("revision", "token", "cache_dir", "local_files_only")
    return HubOptions(**{name: kwargs[name] for name in known if kwargs.get(name) is not None})


def mark_prompts(tokenizer: Any, prompts: Sequence[str]) -> bool:
    """Make a tokenizer see each of these prompts, such as "[unused0] ", as one token where its vocabulary has it;
    returns whether it did not. As MultiVectorEncoder of sentence-transformers does with PyLate's and Stanford's models,
    which put the token's id before a text.
    """
    added, vocabulary, marked = tokenizer.added_tokens_encoder, tokenizer.get_vocab(), []
    for prompt in prompts:
        for word in (prompt, *prompt.split(None, 1)[:1]):
            if word.strip() and (word in added or word in vocabulary):
                if tokenizer.tokenize(word) != [word]:
                    marked.append(word)
                break
    if marked:
        from transformers import AddedToken

        tokenizer.add_tokens([AddedToken(word, normalized=False, special=True) for word in marked], special_tokens=True)
    return bool(marked)


def add_tokens(tokenizer: Any, model: Any, tokens: Sequence[str], *, pad_to_multiple_of: int | None = None) -> int:
    """Add words to a tokenizer, and rows for them to a model that is not sharded yet; returns the number of new words.

    A model that already has enough rows (many tables are padded) is not changed.

    Args:
        tokenizer: transformers' (load_tokenizer); it is modified. Save it with the model.
        model: one of ours; see Model.resize_token_embeddings.

    Raises:
        ValueError: a token is empty or repeated, or the model cannot be resized.
    """
    wrong = [token for token in tokens if not isinstance(token, str) or not token.strip()]
    if wrong or len(set(tokens)) != len(tokens):
        what = repr(wrong[0]) if wrong else repr(next(token for token in tokens if list(tokens).count(token) > 1))
        raise ValueError(f"add_tokens: got {what}{'' if wrong else ' twice'}, expected distinct, non-empty words")
    before = len(tokenizer)
    tokenizer.add_tokens(list(tokens))
    fit_vocabulary(model, tokenizer, pad_to_multiple_of=pad_to_multiple_of)
    return len(tokenizer) - before


def fit_vocabulary(model: Any, tokenizer: Any, *, pad_to_multiple_of: int | None = None) -> bool:
    """Add rows to a model if it has fewer than its tokenizer has tokens; returns whether it did."""
    if len(tokenizer) <= model.config.vocab_size:
        return False
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of)
    return True
