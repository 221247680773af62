"""Settings of `generate` that change texts, ends that occur, and a tokenizer for stop strings."""

from modelcenter.generation.prompts import Texts

VOCAB = 61
MANY = [7, 9, 12, 23, 31, 36, 44, 50]  # ends, so that beams do end
KINDS = {
    "greedy": {},
    "no end": {"eos_token_id": []},
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 5, "num_return_sequences": 3, "length_penalty": 0.4, "eos_token_id": MANY},
    "long beams": {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2, "eos_token_id": MANY},
    "short beams": {"num_beams": 3, "length_penalty": -1.0, "repetition_penalty": 1.3, "eos_token_id": MANY},
    "early beams": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "eos_token_id": MANY},
    "never early": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0, "eos_token_id": MANY},
    "never early, short": {"num_beams": 3, "early_stopping": "never", "length_penalty": -1.0, "eos_token_id": MANY},
    "at least": {"min_new_tokens": 9, "eos_token_id": MANY},
    "beams of at least": {"num_beams": 3, "min_length": 20, "eos_token_id": MANY},
    "a forced end": {"forced_eos_token_id": 11},
    "beams with forced ends": {"num_beams": 3, "min_new_tokens": 25, "forced_eos_token_id": [11, 7]},
    "many ends": {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": MANY},
}


def texts_after(prompts, new):
    """The Texts of prompts (rows, length), with -1 before each, after new tokens (rows, n)."""
    texts = Texts(prompts.shape[1], new.shape[1] + 9, prompts.device).begun(prompts, prompts >= 0, 1)
    for tokens in new.T:
        texts.append(tokens)
    return texts


class Letters:
    """A tokenizer of one character for each token."""

    def decode(self, tokens, **_):
        assert all(int(t) >= 0 for t in tokens)
        return "".join(chr(ord("A") + int(t)) for t in tokens)

    def batch_decode(self, rows, **_):
        return [self.decode(row) for row in rows]
