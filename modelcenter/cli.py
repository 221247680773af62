"""The command line: `modelcenter VERB`. It only dispatches; --help, list and info import no torch."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from engine.memory import left_uncollected
from modelcenter._version import __version__
from modelcenter.registry import nearest


def _finetune(argv: Sequence[str]) -> None:
    """TASK [flags]: fine-tune a model"""
    _train("finetune", argv)


def _pretrain(argv: Sequence[str]) -> None:
    """TASK [flags]: train a model on text, from random or pretrained weights"""
    _train("pretrain", argv)


def _train(verb: str, argv: Sequence[str]) -> None:
    from modelcenter.training.tasks import tasks_of

    tasks = tasks_of(verb)
    names = ", ".join(tasks)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: modelcenter {verb} TASK [flags]\n\nTASK: {names}\n{verb} TASK --help lists its flags.")
        if not argv:
            raise ValueError(f"{verb}: which task? One of {names}")
        return
    if argv[0] not in tasks:
        raise ValueError(f"{verb}: unknown task {argv[0]!r}.{nearest(argv[0], tasks)} Tasks: {names}")
    _script(tasks[argv[0]].script).main(argv[1:], f"modelcenter {verb} {argv[0]}")


def _predict(argv: Sequence[str]) -> None:
    """RUN_OR_CKPT DATA [--output OUT.jsonl]: predictions of a trained model, one for each row, in order"""
    from modelcenter.training.config import PredictConfig

    about = "Predictions of a trained model: one for each row, in order, as JSON lines or in the format of --output."
    cfg = PredictConfig.from_args(argv, "modelcenter predict", about)
    with left_uncollected():
        from modelcenter.training.inference.predict import run_predict

    run_predict(cfg)


def _evaluate(argv: Sequence[str]) -> None:
    """RUN_OR_CKPT DATA [--json]: loss and metrics of a model on labelled rows"""
    from modelcenter.training.config import EvaluateConfig

    about = "Loss and metrics of a trained model on labelled rows."
    cfg = EvaluateConfig.from_args(argv, "modelcenter evaluate", about)
    with left_uncollected():
        from modelcenter.training.inference.predict import run_evaluate

    run_evaluate(cfg)


def _generate(argv: Sequence[str]) -> None:
    """RUN_OR_CKPT [PROMPT ...]: continue or answer texts, printed as they are generated"""
    from modelcenter.training.config import GenerateConfig

    about = "Continue texts with a causal model, or generate output texts with an encoder-decoder."
    cfg = GenerateConfig.from_args(argv, "modelcenter generate", about)
    with left_uncollected():
        from modelcenter.training.inference.generate import run_generate

    run_generate(cfg)


def _mine(argv: Sequence[str]) -> None:
    """MODEL DATA --output OUT.jsonl: find hard negatives by embeddings for rows with an anchor and a positive"""
    from modelcenter.training.config import MineConfig

    about = (
        "Find hard negatives for rows with an anchor and a positive: the texts with embeddings most similar to the\n"
        "anchor's that are not known positives, optionally rescored by a reranker. The rows are written with an added\n"
        "column of lists, negatives, which `finetune embedding` and `finetune reranking` read."
    )
    cfg = MineConfig.from_args(argv, "modelcenter mine", about)
    with left_uncollected():
        from modelcenter.training.inference.mine import run_mine

    run_mine(cfg)


def _list(argv: Sequence[str]) -> None:
    """[--json] [--tiny]: models that can be used by name; --tiny adds the test-sized presets"""
    if "-h" in argv or "--help" in argv:
        return print(f"usage: modelcenter list {_list.__doc__}")
    known = ("--json", "--tiny")
    unknown = next((word for word in argv if word not in known), None)
    if unknown is not None:
        raise ValueError(f"list: unknown argument {unknown!r}.{nearest(unknown, known)} It takes {' and '.join(known)}")
    from modelcenter.registry import list_models

    models = list_models(tiny="--tiny" in argv)
    if "--json" in argv:
        print(json.dumps([vars(info) for info in models], indent=2))
        return
    name, family = (max((len(getattr(info, field)) for info in models), default=0) for field in ("name", "family"))
    for info in models:
        size = "" if info.parameters is None else f"{info.parameters:,}"
        print(f"{info.name:<{name}}  {info.family:<{family}} {size:>15}  {info.hub or 'no weights'}")


def _info(argv: Sequence[str]) -> None:
    """NAME [--gpus N] [--json]: parameters, files and memory of a model, without loading it"""
    from modelcenter.hub.flags import InfoConfig

    about = "Show what is known about a model without loading it, and the memory that training and inference need."
    cfg = InfoConfig.from_args(argv, "modelcenter info", about)
    from modelcenter.hub.info import as_json, model_info, render
    from modelcenter.hub.remote.download import HubOptions

    info = model_info(str(cfg.name), HubOptions(cfg.revision, cfg.token, cfg.cache_dir), cfg.gpus)
    print(as_json(info) if cfg.json else render(info))


def _download(argv: Sequence[str]) -> None:
    """NAME [--revision R] [--local_dir D]: download a model's files into the cache and print where they are"""
    from modelcenter.hub.flags import DownloadConfig

    about = "Download what is needed to load a model: config, tokenizer, weights in one format. Resumes if run again."
    cfg = DownloadConfig.from_args(argv, "modelcenter download", about)
    from modelcenter.hub.remote.download import HubOptions
    from modelcenter.hub.remote.snapshot import as_json, download_snapshot

    options = HubOptions(cfg.revision, cfg.token, cfg.cache_dir)
    downloaded = download_snapshot(str(cfg.name), options, local_dir=cfg.local_dir, everything=cfg.all, say=_to_stderr)
    print(json.dumps(as_json(downloaded), indent=2) if cfg.json else downloaded.path)


def _push(argv: Sequence[str]) -> None:
    """DIR REPO_ID [--private] [--revision R]: check a checkpoint or a run's model and upload it to the Hub"""
    from modelcenter.hub.flags import PushConfig

    about = "Check that a directory is a complete Hugging Face checkpoint without pickles, and upload it. If run again "
    cfg = PushConfig.from_args(argv, "modelcenter push", about + "after an interruption, it resumes.")
    from modelcenter.hub.remote.push import push_directory

    pushed = push_directory(
        str(cfg.dir),
        str(cfg.repo_id),
        token=cfg.token,
        private=cfg.private,
        revision=cfg.revision,
        create_pr=cfg.create_pr,
        message=cfg.message,
        say=_to_stderr,
    )
    print(json.dumps(vars(pushed), indent=2) if cfg.json else pushed.address)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compare(argv: Sequence[str]) -> None:
    """A [B] [--data F]: loss, logits and gradients of two models; B defaults to transformers"""
    from modelcenter.compare import main

    raise SystemExit(main(argv))


def _preprocess(argv: Sequence[str]) -> None:
    """DATA --tokenizer T --output FOLDER: convert texts to token files for pretraining"""
    from modelcenter.preprocess import main

    main(argv)


def _convert(argv: Sequence[str]) -> None:
    """SRC DST --to hf|distributed [flags]: convert a checkpoint, tensor by tensor, with all its heads"""
    from modelcenter.hub.commands import convert_main

    raise SystemExit(convert_main(argv))


def _verify(argv: Sequence[str]) -> None:
    """A B: compare two checkpoints of any format, exactly; exit status 1 if they differ"""
    from modelcenter.hub.commands import verify_main

    raise SystemExit(verify_main(argv))


def _export(argv: Sequence[str]) -> None:
    """MODEL DST [--step N|best|last] [--adapter A]: write a run's model, or one with an adapter merged into it"""
    from modelcenter.hub.commands import export_main

    raise SystemExit(export_main(argv, _export_adapter, _merge_adapter))


def _export_adapter(path: Any, *how: Any, **options: Any) -> str | None:
    from modelcenter.training.checkpoints.export import export_adapter, has_adapter
    from modelcenter.training.replaced_tokens import export_nets, holds_nets

    if holds_nets(path):
        return export_nets(path, *how, **options)
    return export_adapter(path, *how, **options) if has_adapter(path) else None


def _merge_adapter(*what: Any, **options: Any) -> str:
    from modelcenter.adapters.merge import merge_adapter

    return merge_adapter(*what, **options)


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "finetune": _finetune,
    "pretrain": _pretrain,
    "predict": _predict,
    "evaluate": _evaluate,
    "generate": _generate,
    "mine": _mine,
    "list": _list,
    "info": _info,
    "download": _download,
    "push": _push,
    "compare": _compare,
    "convert": _convert,
    "verify": _verify,
    "export": _export,
    "preprocess": _preprocess,
}


def help_text() -> str:
    """The text of `modelcenter --help`."""
    lines = [f"modelcenter {__version__}", "", "usage: modelcenter VERB [arguments]", ""]
    for verb, function in VERBS.items():
        arguments, _, purpose = (function.__doc__ or "").partition(": ")
        lines += [f"  {f'{verb} {arguments}':<56} {purpose}"]
    lines += ["", "`modelcenter VERB --help` lists the flags of a verb. --traceback shows where an error arose.", ""]
    lines += ["With several processes: torchrun --nproc_per_node N -m modelcenter finetune TASK ..."]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> None:
    """Run the verb of a command line.

    Raises:
        ValueError, OSError: a mistake that the user can correct.
    """
    verb, rest = (argv[0], argv[1:]) if argv else ("help", [])
    if verb == "help" and rest:
        verb, rest = rest[0], [*rest[1:], "--help"]
    if verb in ("help", "-h", "--help"):
        print(help_text())
    elif verb == "--version":
        print(__version__)
    elif verb in VERBS:
        VERBS[verb](rest)
    else:
        raise ValueError(f"unknown verb {verb!r}.{nearest(verb, VERBS)} Verbs: {', '.join(VERBS)}")


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    from modelcenter.command_line.errors import user_errors

    words = list(sys.argv[1:] if argv is None else argv)
    last = words.index("--") if "--" in words else len(words)  # the words after it are not flags
    with user_errors(traceback="--traceback" in words[:last]):
        run([word for word in words[:last] if word != "--traceback"] + words[last:])


def _script(name: str) -> ModuleType:
    """Import a module of scripts/, which is inside the package once installed and next to it in a checkout."""
    full = f"modelcenter.scripts.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name not in ("modelcenter.scripts", full):
            raise
    from modelcenter._paths import scripts_dir

    spec = importlib.util.spec_from_file_location(full, scripts_dir() / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
