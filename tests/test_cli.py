"""The command line: verbs, help without torch, errors of one line."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time

import pytest

from modelcenter import cli
from modelcenter._paths import scripts_dir
from modelcenter.training.config import EvaluateConfig


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=env)


QUICK = (
    "--help",
    "list",
    "list --json",
    "info bert-base-uncased",
    "finetune --help",
    "finetune classification --help",
    "predict --help",
    "evaluate -h",
    "generate --help",
    "info --help",
    "download --help",
    "push --help",
    "help list",
    "--version",
)


def test_quick_answers_import_no_torch():
    """One after the other in one process: what the first that imports something loads is still there to be named."""
    code = f"""
import contextlib, io, sys
from modelcenter.cli import main
for words in {QUICK!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            main(words.split())
        except SystemExit as end:
            assert not end.code, (words, end.code)
    heavy = {{'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'}} & set(sys.modules)
    assert not heavy and len(said.getvalue()) > 4, (words, heavy)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_help_is_quick():
    began = time.monotonic()
    done = python("-m", "modelcenter", "finetune", "classification", "--help")
    assert done.returncode == 0 and "--model" in done.stdout
    assert time.monotonic() - began < 1.0 or time.monotonic() - began < 20 * _empty_start()  # a machine under load


def _empty_start() -> float:
    began = time.monotonic()
    python("-c", "pass")
    return time.monotonic() - began


def test_help_lists_every_verb(capsys):
    cli.run([])
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb} " in text
    with pytest.raises(SystemExit):
        cli.run(["help", "predict"])
    assert "RUN DATA" in capsys.readouterr().out


def test_list_is_json(capsys):
    cli.run(["list", "--json"])
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert models["bert-base-uncased"]["hub"] == "google-bert/bert-base-uncased"
    assert not any(name.startswith("tiny/") for name in models)
    cli.run(["list", "--tiny"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny/bert ") for line in lines)
    counts = [re.search(r" [\d,]+  ", line) for line in lines]  # of parameters, in a column of their own
    assert len({count.end() for count in counts if count}) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lsit"], "unknown verb 'lsit'. Did you mean 'list'? Verbs: finetune, pretrain, predict"),
        (["help", "lsit"], "unknown verb 'lsit'. Did you mean 'list'?"),
        (["finetune"], "finetune: which task?"),
        (["finetune", "clasification"], "unknown task 'clasification'. Did you mean 'classification' or"),
        (["list", "--jsn"], "list: unknown argument '--jsn'. Did you mean '--json'?"),
        (["finetune", "classification", "--modl", "x"], "unknown flag --modl. Did you mean '--model'?"),
        (["predict"], "the following arguments are required: RUN, DATA"),
        (["evaluate", "run", "data.tsv", "--btch_size", "3"], "unknown flag --btch_size. Did you mean '--batch_size'?"),
        (["convert", "a", "b", "--wrokers", "2"], "unknown flag --wrokers. Did you mean '--workers'?"),
        (["convert", "a", "b", "--to", "hf", "--work", "2"], "unknown flag --work. Did you mean '--workers'?"),
        (["export", "a"], "the following arguments are required: DST"),
        (["export", "a", "--outptu", "b"], "unknown flag --outptu. Did you mean '--output'"),
        (["verify", "a", "b", "c"], "unrecognized arguments: c"),
        (["compare", "nowhere", "--tolerance", "x"], "--tolerance: invalid float value: 'x'"),
        (["preprocess", "nowhere.txt", "--tokenizer", "t", "--out-put", "x"], "unknown flag --out_put"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, says, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    shown = capsys.readouterr().err
    assert end.value.code == 2 and shown.startswith("error: ") and says in shown and shown.count("\n") == 1


def test_names_that_are_not_utf8_are_shown(monkeypatch):
    from io import BytesIO, TextIOWrapper

    shown = BytesIO()
    monkeypatch.setattr(cli.sys, "stdout", TextIOWrapper(shown, "utf-8"))
    monkeypatch.setitem(cli.VERBS, "list", lambda argv: print("caf\u00e9", os.fsdecode(b"\xff"), flush=True))
    cli.main(["list"])
    assert shown.getvalue() == "caf\u00e9 ".encode() + b"\xff\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"\u00e9 \u4f60 \ud83d\ude00"), ("latin-1", b"\xe9 " + rb"\u4f60 \ud83d\ude00")]
)
def test_what_the_output_has_no_bytes_for_is_shown_as_json_has_it(encoding, shown, errors, monkeypatch):
    """PYTHONIOENCODING=ascii, or a locale of Latin 1: a run that shows a text of its data goes on."""
    from io import BytesIO, TextIOWrapper

    out, text = BytesIO(), "\u00e9 \u4f60 \U0001f600"
    monkeypatch.setattr(cli.sys, "stdout", TextIOWrapper(out, encoding, errors))
    row = json.dumps({"text": f"\\{text}"}, ensure_ascii=False)
    monkeypatch.setitem(cli.VERBS, "list", lambda argv: print(text, "\ud83d", row, sep="\n", flush=True))
    cli.main(["list"])
    first, half, line = out.getvalue().splitlines()
    assert first == shown and half == rb"\ud83d" and json.loads(line.decode(encoding)) == json.loads(row)


def test_a_reader_that_is_gone_ends_a_verb_without_a_word(monkeypatch, capsys):
    """As `| head -1` leaves it: what was printed, and what Python would write at its end."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as end:
            cli.main(["list"])
        monkeypatch.undo()
    assert end.value.code == 141 and not capsys.readouterr().err


FULL = "error: standard output: No space left on device\n"


def error_with_output(path: str, work, monkeypatch, capsys, **how) -> str:
    """What standard error says of a verb whose standard output is this file."""
    from modelcenter.command_line.errors import user_errors

    with open(path, "w", **how) as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as end, user_errors():
            work()
        monkeypatch.undo()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("buffering", [1, 100_000])  # written line by line, and at the end
def test_a_full_disk_behind_the_output_is_an_error(buffering, monkeypatch, capsys):
    assert error_with_output("/dev/full", lambda: cli.run(["list"]), monkeypatch, capsys, buffering=buffering) == FULL


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_another_error_is_not_that_of_the_output(path, monkeypatch, capsys):
    def fail(error: Exception) -> None:
        print("some output")
        raise error

    for error, said in ((ValueError("a fault"), "a fault"), (OSError(5, "Input/output error", "x"), "x: Input/output")):
        assert f"error: {said}" in error_with_output(path, lambda e=error: fail(e), monkeypatch, capsys)
    disk = OSError(28, "No space left on device", "a file")
    assert "error: a file: No space" in error_with_output(path, lambda: fail(disk), monkeypatch, capsys)
    other = "error: [Errno 27] File too large\n"
    assert error_with_output(path, lambda: fail(OSError(27, "File too large")), monkeypatch, capsys) == other
    unnamed = error_with_output(path, lambda: fail(OSError(28, "No space left on device")), monkeypatch, capsys)
    assert (unnamed == FULL) == (path == "/dev/full")


@pytest.mark.parametrize(
    ("encoding", "fix"),
    [("utf-8", "rename it"), ("ascii", "set PYTHONUTF8=1, because this locale's encoding is ascii")],
)
def test_a_path_that_is_not_utf_8_is_named_with_a_fix(encoding, fix, monkeypatch, capsys):
    """torch encodes paths itself, without the escapes that Python has for bytes of another encoding."""
    from modelcenter.command_line import errors

    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(SystemExit), errors.user_errors():
        os.fsdecode(b"out/\xe4").encode()
    assert f"not valid UTF-8; {fix}\n" in capsys.readouterr().err


def test_closed_streams(monkeypatch):
    """`modelcenter list >&- 2>&-`"""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    cli.main(["list"])
    assert not sys.stdout.isatty() and not sys.stderr.isatty()


def test_traceback_on_request(monkeypatch):
    with pytest.raises(ValueError, match="unknown verb"):
        cli.main(["--traceback", "lsit"])
    monkeypatch.setenv("MODELCENTER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown verb"):
        cli.main(["lsit"])


def test_a_script_is_its_verb(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", ["finetune_lm.py", "--traceback", "--modl", "x"])
    with pytest.raises(ValueError, match="unknown flag --modl"):
        runpy.run_path(str(scripts_dir() / "finetune_lm.py"), run_name="__main__")


def test_a_script_finds_the_packages_once_installed(monkeypatch, tmp_path):
    """Where its folder is inside the package, whose modules must not be found by their own names."""
    folder = tmp_path / "modelcenter" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(scripts_dir() / "finetune_lm.py", folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path[1:]])
    runpy.run_path(str(folder / "finetune_lm.py"), run_name="imported")
    assert sys.path[0] == str(tmp_path)


def test_what_is_behind_two_dashes_is_no_flag_of_ours(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setitem(cli.VERBS, "list", seen.append)
    cli.main(["list", "--traceback", "--", "--traceback"])
    assert seen == [["--", "--traceback"]]


def test_json_of_evaluate_is_a_flag_like_others(tmp_path):
    (tmp_path / "a.yaml").write_text("json: true\n")
    words = ["run", "data", "--config", str(tmp_path / "a.yaml")]
    assert EvaluateConfig.from_args(words).json and not EvaluateConfig.from_args([*words, "--json", "false"]).json


def test_other_ranks_speak_only_if_rank_0_does_not_end_them(monkeypatch, capsys):
    from modelcenter.command_line import errors

    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    with pytest.raises(SystemExit):
        cli.main(["lsit"])
    assert waited == [errors._HEAD_START] and capsys.readouterr().err.startswith("[rank 3] error: unknown verb")


def test_a_rank_that_lost_another_lets_it_speak_first(monkeypatch):
    from modelcenter.command_line import errors

    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    for said, seconds in (("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed", 1), ("a bug", 0)):
        with pytest.raises(RuntimeError), errors.user_errors():
            raise RuntimeError(said)
        assert waited == [errors._HEAD_START] * seconds
        waited.clear()


def test_what_an_error_quotes_does_not_control_the_terminal(capsys):
    from modelcenter.command_line import errors

    with pytest.raises(SystemExit), errors.user_errors():
        raise ValueError("a file\nholds \x1b]0;title\x07\x1b[31m\rno error")
    assert capsys.readouterr().err == r"error: a file" "\n" r"holds \x1b]0;title\x07\x1b[31m\rno error" "\n"
    assert errors._format_warning(UserWarning("\x9b2J"), UserWarning, "", 0) == "warning: \\x9b2J\n"


def test_mistakes_of_ours_keep_their_traceback(monkeypatch):
    def broken(argv):
        raise KeyError("a bug")

    monkeypatch.setitem(cli.VERBS, "list", broken)
    with pytest.raises(KeyError):
        cli.main(["list"])


def test_compare_is_the_comparison_and_its_status(monkeypatch):
    import modelcenter.compare

    seen = []
    monkeypatch.setattr(modelcenter.compare, "main", lambda argv: seen.append(argv) or 1)
    with pytest.raises(SystemExit) as end:
        cli.run(["compare", "a", "--json"])
    assert end.value.code == 1 and seen == [["a", "--json"]]


def test_missing_files(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", "nowhere/run", "nowhere.tsv"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: nowhere.tsv: no such file or directory")
