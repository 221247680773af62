"""Models of one vector per token: transformers' as an oracle, and scores one query and document at a time."""

import string
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PUNCTUATION = list(string.punctuation)


@dataclass
class LateModel:
    """A model of transformers, the projection of its states, and how texts are made of queries and documents.

    expansion: tokens to which queries are expanded; None: they are not.
    """

    model: Any
    weight: Tensor
    tokenizer: Any
    prompts: tuple[str, str] = ("", "")
    expansion: int | None = None
    attended: bool = False
    document_length: int = 180
    skipped: list[str] | None = None

    def query(self, text: str) -> Tensor:
        """(n, width): the vectors of a query."""
        most = self.expansion or 512
        given = self.tokenizer(self.prompts[0] + text, truncation=True, max_length=most, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"]
        lacking = max((self.expansion or 0) - ids.shape[1], 0)
        ids = F.pad(ids, (0, lacking), value=self.tokenizer.mask_token_id)
        mask = F.pad(mask, (0, lacking), value=int(self.attended))
        return self.vectors(ids, mask)

    def document(self, text: str) -> Tensor:
        """(n, width): the vectors of a document that count."""
        given = self.tokenizer(
            self.prompts[1] + text, truncation=True, max_length=self.document_length, return_tensors="pt"
        )
        words = self.tokenizer.convert_ids_to_tokens(given["input_ids"][0].tolist())
        kept = torch.tensor([word not in (self.skipped or ()) for word in words])
        return self.vectors(given["input_ids"], given["attention_mask"])[kept]

    def vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state[0]
        return F.normalize(states @ self.weight.T, dim=-1)


def score(query: Tensor, document: Tensor) -> Tensor:
    """The sum over the query's vectors of the greatest product with one of the document's, 0-d."""
    return torch.stack([torch.stack([a @ b for b in document]).max() for a in query]).sum()
