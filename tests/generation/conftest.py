import pytest
import transformers
from generation_toys import VOCAB
from harness import randomize_


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A randomised GPT-2 of transformers (whose beams mistake a padding token 0 for none), and its folder."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=7, pad_token_id=5
    )
    theirs = transformers.GPT2LMHeadModel(config)
    randomize_(theirs, 3)
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs, str(folder)
