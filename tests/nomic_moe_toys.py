"""The network of the authors of nomic-embed-text-v2-moe, written out in plain torch: transformers has none of it.

Modules have the names of their files, so that a state is a checkpoint, and each parameter's gradient has its name.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from transformers.utils import ModelOutput

CLASSES = {
    "base": "NomicBertModel",
    "masked-lm": "NomicBertForPreTraining",
    "sequence-classification": "NomicBertForSequenceClassification",
    "token-classification": "NomicBertForTokenClassification",
}


class Holder(nn.Module):
    """Modules and parameters by name, nested where files nest them."""

    def __init__(self, **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.heads, self.theta = c["n_head"], c["rotary_emb_base"]
        self.factor, self.longest = c["rotary_scaling_factor"], c["max_trained_positions"]
        self.Wqkv, self.out_proj = nn.Linear(c["n_embd"], 3 * c["n_embd"]), nn.Linear(c["n_embd"], c["n_embd"])
        self.drop = nn.Dropout(c["attn_pdrop"])

    def rotated(self, x: Tensor) -> Tensor:
        """x (rows, heads, tokens, channels): channel i and i + channels / 2 are a point, turned by token * angle i."""
        half, tokens, theta = x.shape[-1] // 2, x.shape[2], self.theta
        if self.factor and tokens > self.longest:
            grown = self.factor * tokens / self.longest - (self.factor - 1)
            theta = theta * grown ** (half / (half - 1))
        angles = torch.outer(torch.arange(tokens), theta ** (-torch.arange(half, dtype=torch.double) / half))
        point = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1).double())
        turned = torch.view_as_real(point * torch.polar(torch.ones_like(angles), angles))
        return torch.cat((turned[..., 0], turned[..., 1]), -1).to(x.dtype)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.Wqkv(x).chunk(3, -1))
        scores = self.rotated(q) @ self.rotated(k).transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~real[:, None, None], float("-inf")).softmax(-1)
        return self.out_proj((self.drop(weights) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(c["n_embd"], c["n_inner"]), nn.Linear(c["n_inner"], c["n_embd"])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class Mixture(nn.Module):
    """Every expert computes every token; those that a token did not choose weigh 0."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.count, self.chosen = c["num_experts"], c["moe_top_k"]
        self.router = Holder(layer=nn.Linear(c["n_embd"], self.count, bias=False))
        matrices = (nn.Parameter(torch.empty(self.count * c["n_inner"], c["n_embd"])) for _ in range(2))
        self.experts = Holder(
            mlp=Holder(**dict(zip(("w1", "w2"), matrices, strict=True))), bias=nn.Parameter(torch.empty(c["n_embd"]))
        )

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router.layer(x).softmax(-1)
        least = probabilities.topk(self.chosen).values[..., -1:]
        weights = probabilities * (probabilities >= least)
        out = self.experts.bias
        matrices = self.experts.mlp.w1.chunk(self.count), self.experts.mlp.w2.chunk(self.count)
        for expert, (w1, w2) in enumerate(zip(*matrices, strict=True)):
            out = out + weights[..., expert, None] * (gelu(x @ w1.T) @ w2)
        return out


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], number: int):
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(c), norm(c), norm(c)
        sparse = c["num_experts"] and number % c["moe_every_n_layers"] == 1
        self.mlp = Mixture(c) if sparse else Mlp(c)
        self.drop = nn.Dropout(c["resid_pdrop"])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attn(x, real)))
        return self.norm2(x + self.drop(self.mlp(x)))


def norm(c: dict[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"])


class Body(nn.Module):
    def __init__(self, c: dict[str, Any], pools: bool):
        super().__init__()
        self.embeddings = Holder(
            word_embeddings=nn.Embedding(c["vocab_size"], c["n_embd"], c["pad_token_id"]),
            token_type_embeddings=nn.Embedding(c["type_vocab_size"], c["n_embd"]),
        )
        self.emb_ln, self.drop = norm(c), nn.Dropout(c["resid_pdrop"])
        self.encoder = Holder(layers=nn.ModuleList(Layer(c, number) for number in range(c["n_layer"])))
        if pools:
            self.pooler = Holder(dense=nn.Linear(c["n_embd"], c["n_embd"]))

    def states(self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> list[Tensor]:
        """What each layer gives, after the embeddings."""
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        words, table = self.embeddings.word_embeddings(input_ids), self.embeddings.token_type_embeddings
        found = [self.drop(self.emb_ln(words + table(types)))]
        for layer in self.encoder.layers:
            found.append(layer(found[-1], real.bool()))
        return found


class AuthorsModel(nn.Module):
    """The model of a task. config: their config.json."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        c, (name,) = config, config["architectures"]
        self.values, self.task = config, next(task for task, cls in CLASSES.items() if cls == name)
        self.config = SimpleNamespace(_attn_implementation="eager")
        body = Body(c, pools=self.task == "sequence-classification")
        if self.task == "base":
            for part, module in body.named_children():
                self.add_module(part, module)
            self.__dict__["bert"] = body  # no module of its own
            return
        self.bert = body
        if self.task == "masked-lm":
            dense = Holder(dense=nn.Linear(c["n_embd"], c["n_embd"]), layer_norm=norm(c))
            decoder = nn.Linear(c["n_embd"], c["vocab_size"])
            decoder.weight = body.embeddings.word_embeddings.weight
            self.cls = Holder(predictions=Holder(transform=dense, decoder=decoder))
        else:
            self.dropout, self.classifier = (
                nn.Dropout(c["embd_pdrop"]),
                nn.Linear(c["n_embd"], len(c.get("id2label") or "01")),
            )

    def get_input_embeddings(self) -> nn.Embedding:
        return self.bert.embeddings.word_embeddings

    def head(self, x: Tensor) -> Tensor:
        """The logits for states x (rows, tokens, n_embd)."""
        if self.task == "masked-lm":
            head = self.cls.predictions
            return head.decoder(head.transform.layer_norm(gelu(head.transform.dense(x))))
        if self.task == "sequence-classification":
            x = self.bert.pooler.dense(x[:, 0]).tanh()
        return self.classifier(self.dropout(x))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        states = self.bert.states(input_ids, attention_mask, token_type_ids)
        more = {"hidden_states": tuple(states)} if output_hidden_states else {}
        if self.task == "base":
            return ModelOutput(last_hidden_state=states[-1], **more)
        logits = self.head(states[-1])
        if labels is not None:
            more["loss"] = cross_entropy(logits.flatten(0, -2), labels.flatten())
        return ModelOutput(logits=logits, **more)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text(json.dumps(self.values))
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path, **_: Any) -> "AuthorsModel":
        """As their own loader, which takes a file with all tensors of the model and no others."""
        config = json.loads((folder / "config.json").read_text())
        model = cls(config)
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        return model
