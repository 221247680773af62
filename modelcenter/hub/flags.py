"""The flags of download, push and info. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from modelcenter.command_line.flags import Flags, flag

_what, _hub, _output = partial(flag, "what"), partial(flag, "hub"), partial(flag, "output")
_TOKEN = "of the Hub, for private and gated models; none: HF_TOKEN, or that of `hf auth login`, which leave no trace"


# fmt: off
@dataclass(kw_only=True)
class DownloadConfig(Flags):
    """Flags of download."""

    name: str | None = _what(None, "Hub name, or a name of `modelcenter list`", positional=True)
    revision: str | None = _hub(None, "branch, tag or commit; none: the preset's, or main", "model_revision")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    cache_dir: str | None = _output(None, "cache to download into; none: huggingface_hub's (HF_HOME)")
    local_dir: str | None = _output(None, "directory to download into, in place of the cache")
    all: bool = _output(False, "every file of the repository, not only config, weights in one format and tokenizer")
    json: bool = _output(False, "print one JSON object")


@dataclass(kw_only=True)
class PushConfig(Flags):
    """Flags of push."""

    dir: str | None = _what(None, "Hugging Face directory, or the folder of a run, whose model/ it then is",
        positional=True)
    repo_id: str | None = _what(None, "OWNER/NAME of the repository, made if there is none", positional=True)
    private: bool | None = _hub(None, "a new repository is private; none: as its owner's settings say",
        "hub_private_repo")
    revision: str | None = _hub(None, "branch to commit to, made if there is none; none: main", "hub_revision")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    message: str = _hub("Upload model", "of the commit", "commit_message")
    json: bool = _output(False, "print one JSON object")


@dataclass(kw_only=True)
class InfoConfig(Flags):
    """Flags of info."""

    name: str | None = _what(None, "name of `modelcenter list`, Hub name, directory, run or distributed checkpoint",
        positional=True)
    gpus: int = _what(8, "GPUs over which the ZeRO levels of the table shard")
    revision: str | None = _hub(None, "branch, tag or commit; none: the preset's, or main", "model_revision")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    cache_dir: str | None = _hub(None, "huggingface_hub's cache; none: that of HF_HOME")
    json: bool = _output(False, "print one JSON object")
    # fmt: on
