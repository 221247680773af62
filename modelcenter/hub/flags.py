"""The flags of download, push and info. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from modelcenter.command_line.flags import Flags, flag

_what, _hub, _output = partial(flag, "what"), partial(flag, "hub"), partial(flag, "output")
_TOKEN = (
    "Hub access token, for private and gated models; if not given, HF_TOKEN or the token of `hf auth login`, which, "
    "unlike this flag, leave no trace in the shell history"
)


# fmt: off
@dataclass(kw_only=True)
class DownloadConfig(Flags):
    """Flags of download."""

    name: str | None = _what(None, "Hub name, or a name from `modelcenter list`", positional=True)
    revision: str | None = _hub(None, "branch, tag or commit; if not given, the preset's, or main", "model_revision")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    cache_dir: str | None = _output(None, "cache directory to download into; if not given, huggingface_hub's (HF_HOME)")
    local_dir: str | None = _output(None, "directory to download into, instead of the cache")
    all: bool = _output(False, "download every file of the repository, instead of only config, tokenizer and weights "
        "in one format")
    json: bool = _output(False, "print one JSON object")


@dataclass(kw_only=True)
class PushConfig(Flags):
    """Flags of push."""

    dir: str | None = _what(None, "Hugging Face directory, or a run folder, of which model/ is pushed", positional=True)
    repo_id: str | None = _what(None, "OWNER/NAME of the repository, created if it does not exist", positional=True)
    private: bool | None = _hub(None, "make a new repository private; if not given, the owner's settings decide",
        "hub_private_repo")
    revision: str | None = _hub(None, "branch to commit to, created if it does not exist; main if not given",
        "hub_revision")
    create_pr: bool = _hub(False, "open a pull request instead of committing to the branch")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    message: str = _hub("Upload model", "commit message", "commit_message")
    json: bool = _output(False, "print one JSON object")


@dataclass(kw_only=True)
class InfoConfig(Flags):
    """Flags of info."""

    name: str | None = _what(None, "name from `modelcenter list`, Hub name, directory, run or distributed checkpoint",
        positional=True)
    gpus: int = _what(8, "number of GPUs that the ZeRO levels of the table shard over")
    revision: str | None = _hub(None, "branch, tag or commit; if not given, the preset's, or main", "model_revision")
    token: str | None = _hub(None, _TOKEN, "hub_token")
    cache_dir: str | None = _hub(None, "cache directory of huggingface_hub; that of HF_HOME if not given")
    json: bool = _output(False, "print one JSON object")
    # fmt: on
