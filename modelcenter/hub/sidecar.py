"""Sidecar files: the files of a model other than the weights, such as its tokenizer, generation config and card."""

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelcenter.hub.files.described_tasks import dense_steps, described_task
from modelcenter.hub.files.embedding_files import USUAL_FILES, is_embedding_file, use_own_folders
from modelcenter.hub.files.names import TEMPLATES_FOLDER, TOKENIZER_FILES
from modelcenter.hub.files.pair_template_files import write_prompt
from modelcenter.hub.remote.download import HubOptions, UnreachableError, download_file, is_offline, list_files

log = logging.getLogger("modelcenter")


class SidecarFiles:
    """The sidecar files of a model in a directory or in a Hub repository.

    Files that cannot be downloaded, without a network or access, are left out with a warning, because the checkpoint to
    which they are copied is useful without them.

    Args:
        directory: where the files are, or are cached; None: nowhere.
        repo: the repository from which missing files are downloaded. options: for downloads; its revision is a commit.
    """

    def __init__(self, directory: Path | None, repo: str | None = None, options: HubOptions | None = None):
        self._directory, self._repo, self._options = directory, repo, options or HubOptions()
        self._listed: set[str] | None = None  # names of the repository's files, once they are listed

    def file(self, name: str) -> Path | None:
        """The path of a file, downloaded if necessary; None: it does not exist."""
        if self._directory is not None and (self._directory / name).is_file():
            return self._directory / name
        if self._repo is None:
            return None
        try:
            return download_file(self._repo, name, self._options, listed=name in (self._listed or ()))
        except ValueError as error:
            self._do_without(error)
            return None

    def tokenizer(self) -> dict[str, Path]:
        """The files of the tokenizer: {name in a model's directory: path}."""
        held = self._names()
        # No subfolders and no "..": the names that a mirror lists become local paths.
        templates = sorted(name for name in held if re.fullmatch(rf"{TEMPLATES_FOLDER}/[^/]+\.jinja", name))
        found = {name: self.file(name) for name in (*TOKENIZER_FILES, *templates) if name in held}
        return {name: path for name, path in found.items() if path is not None}

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer's files, if there are some, to a model's directory."""
        _copy(self.tokenizer(), target)
        write_prompt(self.file, target)

    def copy_embedding_files(self, target: Path, dense: bool = False) -> None:
        """Copy the files that describe embeddings, if there are some, to a model's directory, without weights.

        dense: include dense layers, creating the folders for their weights.
        """
        names = {name for name in self._names() if is_embedding_file(name)}
        if dense:
            names.update(f"{step.folder}/config.json" for step in dense_steps(described_task(self.file), self.file))
        found = {name: self.file(name) for name in names}
        _copy({name: path for name, path in found.items() if path is not None}, target)
        if dense:
            use_own_folders(target)

    def _names(self) -> set[str]:
        """The names of the files that may exist."""
        if self._repo is not None and self._listed is None and not is_offline(self._options):
            try:
                self._listed = set(list_files(self._repo, self._options))
            except UnreachableError as error:
                self._do_without(error)
            except ValueError:  # a mirror without listings is asked for each file
                self._listed = {*TOKENIZER_FILES, *USUAL_FILES}
        if self._listed is not None:
            return self._listed
        if self._directory is None:
            return set()
        paths = (*self._directory.glob("*"), *self._directory.glob("*/*"))
        return {path.relative_to(self._directory).as_posix() for path in paths if path.is_file()}

    def _do_without(self, error: ValueError) -> None:
        """Warn why nothing can be downloaded, and use only the cache from here on."""
        why = "the Hub cannot be reached" if isinstance(error, UnreachableError) else error
        log.warning("%s: using only the cached files of its tokenizer, card and so on: %s", self._repo, why)
        self._options = replace(self._options, local_files_only=True)


def _copy(files: Mapping[str, Path], target: Path) -> None:
    """Copy files into a directory. files: {name there: path}."""
    for name, path in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
