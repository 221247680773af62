"""Tokenizers of ModelCenter's CPM-1 and CPM-2 and of CPM-Bee, written for transformers 5.

`modelcenter` loads them for a directory of these models that holds vocab.txt. This file is saved with a tokenizer, so
that transformers loads it with AutoTokenizer.from_pretrained(path, trust_remote_code=True). Follows ModelCenter's
cpm1_tokenizer.py and cpm2_tokenizer.py, CPM-2-Finetune's tokenization_enc_dec.py and CPM-Live's tokenizers/bee.py.

vocab.txt has one token per line; its id is the number of the line. Spaces and newlines have their own tokens: "</_>"
and "</n>"; in CPM-2, U+2582 and U+2583. CPM-1 and CPM-2 first split a text into words with jieba, and then repeatedly
take the longest token that the rest of a word begins with; CPM-Bee does the same with the whole text.
"""

import os
import re
from typing import Any

from transformers import PreTrainedTokenizer

try:  # CPM-Bee does not need it
    import rjieba
except ImportError:
    rjieba = None  # type: ignore[assignment]

_MARK = re.compile(r"<<|<[^<>]*>|<")  # CPM-Bee's
_LONGEST_WORD = 200  # characters; a longer word is unknown as a whole
# Full-width ASCII, except Chinese punctuation.
_KEPT_WIDE = "，！（）？；："
_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if chr(code) not in _KEPT_WIDE} | {0x3000: 0x20}


class _VocabularyTokenizer(PreTrainedTokenizer):
    """Longest match in a vocabulary with one token per line."""

    vocab_files_names = {"vocab_file": "vocab.txt"}
    model_input_names = ["input_ids", "attention_mask"]
    blank_lines_count = True

    def __init__(self, vocab_file: str, space: str, newline: str, unk_token: str, **kwargs: Any):
        """
        Args:
            vocab_file: see the module. space, newline: its tokens for a space and a newline.
            kwargs: the other special tokens, and transformers' arguments. Special tokens that the vocabulary lacks are
                left out, because their ids would be unknown to the model.

        Raises:
            ValueError: the vocabulary has no token for spaces, newlines or unknown words.
        """
        with open(vocab_file, encoding="utf-8", newline="\n") as lines:
            self._lines = [line.removesuffix("\n") for line in lines]
        words = [line.strip() for line in self._lines] if self.blank_lines_count else [x for x in self._lines if x]
        self._numbers = {word: number for number, word in enumerate(words)}
        self._words = words
        for name, token in (("space", space), ("newline", newline), ("unk_token", str(unk_token))):
            if token not in self._numbers:
                raise ValueError(f"{vocab_file}: it has no {token!r} ({name}); is it the vocabulary of another model?")
        self._white = {space: " ", newline: "\n"}
        self._special = {word for word in self._numbers if re.fullmatch(r"<[^<>\s]+>", word)}
        # Matched texts: characters -> token. Special tokens are found by name before.
        self._found = {word: word for word in self._numbers if word and word not in self._special}
        self._found |= {" ": space, "\n": newline}
        self._longest = max(map(len, self._found))
        for name in ("bos_token", "eos_token", "pad_token", "mask_token"):
            if str(kwargs.get(name)) not in self._numbers:
                kwargs.pop(name, None)
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(space=space, newline=newline, unk_token=unk_token, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        return self._numbers | self.added_tokens_encoder

    def pieces(self, text: str) -> list[str | None]:
        """The tokens of a text; None: a character with which no token begins."""
        out: list[str | None] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token := self._found.get(text[start:end])) is not None:
                    break
            else:
                token, end = None, start + 1
            out.append(token)
            start = end
        return out

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers.get(token, self._numbers[str(self.unk_token)])

    def _convert_id_to_token(self, index: int) -> str:
        # A model may have more rows than the vocabulary has tokens.
        return self._words[index] if 0 <= index < len(self._words) else str(self.unk_token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(self._white.get(token, token) for token in tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        name = self.vocab_files_names["vocab_file"]
        path = os.path.join(save_directory, f"{filename_prefix}-{name}" if filename_prefix else name)
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in self._lines)
        return (path,)


class CPM1Tokenizer(_VocabularyTokenizer):
    """ModelCenter's CPM-1. Nothing is added to a text; `<eod>` ends one."""

    def __init__(
        self,
        vocab_file: str,
        space: str = "</_>",
        newline: str = "</n>",
        unk_token: str = "<unk>",
        eos_token: str = "<eod>",
        pad_token: str = "<pad>",
        half_width: bool = False,
        **kwargs: Any,
    ):
        """half_width: first convert full-width ASCII, but not Chinese punctuation, to half width, as CPM-2's code."""
        if rjieba is None:
            raise ValueError(f"{type(self).__name__} splits texts into words with rjieba; pip install rjieba")
        self._half_width = half_width
        kwargs.setdefault("special_tokens_pattern", "none")
        more = {"eos_token": eos_token, "pad_token": pad_token, "half_width": half_width}
        super().__init__(vocab_file, space, newline, unk_token, **more, **kwargs)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        for token, white in self._white.items():
            text = text.replace(token, white)
        if self._half_width:
            text = text.translate(_HALF_WIDTH)
        out: list[str] = []
        for word in rjieba.cut(text):
            found = [None] if len(word) > _LONGEST_WORD else self.pieces(word)
            out += [str(self.unk_token) if token is None else token for token in found]
        return out


class CPM2Tokenizer(CPM1Tokenizer):
    """CPM-2: `<s>` starts the decoder's text, `<eod>` ends it and each input, `<s_0>`, `<s_1>`, ... are gaps."""

    def __init__(
        self,
        vocab_file: str,
        space: str = "\u2582",
        newline: str = "\u2583",
        unk_token: str = "<unk>",
        bos_token: str = "<s>",
        **kwargs: Any,
    ):
        with open(vocab_file, encoding="utf-8") as lines:
            gaps = [line.strip() for line in lines if re.fullmatch(r"<s_\d+>", line.strip())]
        kwargs.setdefault("special_tokens_pattern", "eos")
        kwargs.setdefault("extra_special_tokens", gaps)
        super().__init__(vocab_file, space, newline, unk_token, bos_token=bos_token, **kwargs)


class CPMBeeTokenizer(_VocabularyTokenizer):
    """CPM-Bee. A call takes plain text: nothing is added, "<" has no meaning, and a run of unknown characters is one
    `<unk>`. `parts` is for the texts of its structured input."""

    blank_lines_count = False

    def __init__(
        self,
        vocab_file: str,
        space: str = "</_>",
        newline: str = "</n>",
        unk_token: str = "<unk>",
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        pad_token: str = "<pad>",
        mask_token: str = "<mask>",
        **kwargs: Any,
    ):
        kwargs.setdefault("special_tokens_pattern", "none")
        more = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token, "mask_token": mask_token}
        super().__init__(vocab_file, space, newline, unk_token, **more, **kwargs)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        found = self.pieces(text)
        kept = (token for i, token in enumerate(found) if token is not None or not i or found[i - 1] is not None)
        return [str(self.unk_token) if token is None else token for token in kept]

    def parts(self, text: str) -> list[tuple[str, str]]:
        """The tokens of a text in a structured input, each with its meaning in this input.

        There `<mask_0>` is a token, ("<mask>", "<mask_0>"), `<<` is a "<", and a run of unknown characters is
        ("<unk>", the run). The meaning of a token that is the same in every input is "".

        Raises:
            ValueError: a "<" is neither doubled nor the start of a token of the vocabulary.
        """
        out: list[tuple[str, str]] = []
        plain, end = "", 0
        for found in _MARK.finditer(text):
            plain, end, mark = plain + text[end : found.start()], found.end(), found[0]
            if mark == "<<":
                plain += "<"
                continue
            out += self._plain(plain)
            plain = ""
            known = self._special - set(self._white)
            name = mark if mark in known else f"<{mark[1:-1].split('_', 1)[0]}>"
            if name not in known:
                raise ValueError(f"{mark!r} in {text!r:.80} is not a token of CPM-Bee; write '<' in a text as '<<'")
            out.append((name, "" if mark in known else mark))
        return out + self._plain(plain + text[end:])

    def _plain(self, text: str) -> list[tuple[str, str]]:
        out: list[tuple[str, str]] = []
        place, unknown = 0, str(self.unk_token)
        for token in self.pieces(text):
            width = 1 if token is None or token in self._white else len(token)
            piece = text[place : place + width]
            place += width
            if token is not None:
                out.append((token, ""))
            elif out and out[-1][1]:
                out[-1] = (unknown, out[-1][1] + piece)
            else:
                out.append((unknown, piece))
        return out

    def written(self, token: int) -> str:
        """A token as spelled in the texts of a structured input: a "<" that is not a mark is doubled."""
        word = self._convert_id_to_token(token)
        return word if word in self._special - set(self._white) else self._white.get(word, word).replace("<", "<<")
