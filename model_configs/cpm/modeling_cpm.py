"""CPM-1, CPM-3 and CPM-Bee for transformers: AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).

Written beside the checkpoints that ModelCenter exports; it needs torch and transformers alone. The models are written
out plainly: whole rows, a mask of all pairs of tokens, no cache. ModelCenter itself runs them packed and sharded.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

COMMON = {"dropout_p": 0.0, "eps": 1e-6, "init_std": 1.0, "use_cache": False, "tie_word_embeddings": True}


class CPM1Config(PretrainedConfig):
    """Sizes count elements; eps is of the norms. Fields of transformers' CpmAntConfig, and the scales."""

    model_type = "cpm1"

    def __init__(self, **fields):
        own = {"init_std": 0.02, "tie_word_embeddings": False, "attn_scale": False, "length_scale": False}
        places = {"position_bias_num_buckets": 32, "position_bias_max_distance": 128}
        super().__init__(**{**COMMON, **own, **places, **fields})


class CPM3Config(PretrainedConfig):
    """As CPM1Config; `prompt` is the number of the one that stands before every text."""

    model_type = "cpm3"

    def __init__(self, **fields):
        own = {"prompt_types": 32, "prompt_length": 64, "segment_types": 34, "prompt": 0}
        places = {"position_bias_num_buckets": 512, "position_bias_max_distance": 2048}
        super().__init__(**{**COMMON, "attn_scale": True, "length_scale": True, **own, **places, **fields})


class CpmBeeConfig(PretrainedConfig):
    """As CPM1Config, without the scales, which CPM-Bee has."""

    model_type = "cpmbee"

    def __init__(self, **fields):
        places = {"position_bias_num_buckets": 256, "position_bias_max_distance": 2048}
        super().__init__(**{**COMMON, "position_bias_num_segment_buckets": 256, **places, **fields})


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 or better."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.double() if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Matrix(nn.Module):
    """x W^T, divided by sqrt(inputs) if scaled."""

    def __init__(self, inputs, outputs, scaled):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.divisor = math.sqrt(inputs) if scaled else 1.0

    def forward(self, x):
        return F.linear(x / self.divisor, self.weight)


class Attention(nn.Module):
    def __init__(self, c, scaled, divided):
        super().__init__()
        inner = c.num_attention_heads * c.dim_head
        self.heads, self.divisor, self.dropout = (
            c.num_attention_heads,
            math.sqrt(c.dim_head) if divided else 1.0,
            c.dropout_p,
        )
        self.project_q = Matrix(c.hidden_size, inner, scaled)
        self.project_k = Matrix(c.hidden_size, inner, scaled)
        self.project_v = Matrix(c.hidden_size, inner, scaled)
        self.attention_out = Matrix(inner, c.hidden_size, scaled)

    def forward(self, x, seen, bias):
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.project_q, self.project_k, self.project_v)
        )
        scores = (q @ k.transpose(-1, -2) / self.divisor + bias).masked_fill(~seen, -math.inf)
        weights = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.attention_out((weights @ v).transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self, c, scaled, divided):
        super().__init__()
        self.layernorm_before_attention = Norm(c.hidden_size, c.eps)
        self.self_attention = Attention(c, scaled, divided)

    def forward(self, x, seen, bias):
        return self.self_attention(self.layernorm_before_attention(x), seen, bias)


class Gated(nn.Module):
    def __init__(self, c, scaled):
        super().__init__()
        self.w_0 = Matrix(c.hidden_size, c.dim_ff, scaled)
        self.w_1 = Matrix(c.hidden_size, c.dim_ff, scaled)

    def forward(self, x):
        return F.gelu(self.w_0(x)) * self.w_1(x)


class FeedForward(nn.Module):
    def __init__(self, c, scaled):
        super().__init__()
        self.w_in, self.w_out, self.dropout = Gated(c, scaled), Matrix(c.dim_ff, c.hidden_size, scaled), c.dropout_p

    def forward(self, x):
        return self.w_out(F.dropout(self.w_in(x), self.dropout, self.training))


class FeedForwardBlock(nn.Module):
    def __init__(self, c, scaled):
        super().__init__()
        self.layernorm_before_ffn = Norm(c.hidden_size, c.eps)
        self.ffn = FeedForward(c, scaled)

    def forward(self, x):
        return self.ffn(self.layernorm_before_ffn(x))


class Layer(nn.Module):
    def __init__(self, c, scaled, divided, shrink):
        super().__init__()
        self.self_att, self.ffn = AttentionBlock(c, scaled, divided), FeedForwardBlock(c, scaled)
        self.shrink, self.dropout = shrink, c.dropout_p

    def forward(self, x, seen, bias):
        x = (x + F.dropout(self.self_att(x, seen, bias), self.dropout, self.training)) / self.shrink
        return (x + F.dropout(self.ffn(x), self.dropout, self.training)) / self.shrink


class Encoder(nn.Module):
    def __init__(self, c, scaled, divided, shrink=1.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(c, scaled, divided, shrink) for _ in range(c.num_hidden_layers))
        self.output_layernorm = Norm(c.hidden_size, c.eps)

    def forward(self, x, seen, bias):
        """The states before each layer, and those after the norm."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], seen, bias))
        return [*states[:-1], self.output_layernorm(states[-1])]


class Bias(nn.Module):
    """Numbers added to the scores: rows for buckets of distances, then rows for relations of segments."""

    def __init__(self, c, relations):
        super().__init__()
        self.buckets, self.furthest = c.position_bias_num_buckets, c.position_bias_max_distance
        self.relative_attention_bias = nn.Parameter(torch.empty(self.buckets + relations, c.num_attention_heads))

    def forward(self, place, relation=None):
        """place (batch, seq); relation (batch, seq, seq), -1 inside a segment -> (batch, heads, seq, seq)."""
        distance = place[:, None, :] - place[:, :, None]
        half = self.buckets // 2
        exact, size = half // 2, distance.abs()
        far = torch.log(size.float().clamp(min=1) / exact) / math.log(self.furthest / exact) * (half - exact)
        bucket = torch.where(size < exact, size, (exact + far.long()).clamp(max=half - 1)) + (distance > 0) * half
        if relation is not None:
            bucket = torch.where(relation < 0, bucket, relation + self.buckets)
        return self.relative_attention_bias[bucket].permute(0, 3, 1, 2)


class CPMModel(PreTrainedModel):
    """What the three share. `scaled`: matrices are divided by sqrt(inputs) and embeddings by sqrt(hidden_size)."""

    _no_split_modules = ["Layer"]
    scaled = True

    def _init_weights(self, module):
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.fill_(1.0) if p.dim() == 1 else p.normal_(std=self.config.init_std)

    def get_input_embeddings(self):
        return self.input_embedding

    def set_input_embeddings(self, table):
        self.input_embedding = table

    def words(self, ids):
        return self.input_embedding(ids) / (math.sqrt(self.config.hidden_size) if self.scaled else 1.0)

    @staticmethod
    def places(mask):
        """(batch, seq): tokens before each in its row; those of the padding do not matter."""
        return (mask.long().cumsum(1) - 1).clamp(min=0)

    @staticmethod
    def seen(mask, context, span):
        """(batch, 1, seq, seq): query and key are tokens of one span, the key of the context, or not after a query that
        is not of the context."""
        n = mask.shape[1]
        before = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
        seen = context.bool()[:, None, :] | (before & ~context.bool()[:, :, None])
        seen = seen & (span[:, None, :] == span[:, :, None]) & mask.bool()[:, None, :] & mask.bool()[:, :, None]
        return seen[:, None]


class CPM1Model(CPMModel):
    config_class = CPM1Config
    base_model_prefix = "cpm1"

    def __init__(self, config):
        super().__init__(config)
        self.scaled = config.length_scale
        self.input_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_bias = Bias(config, 0)
        self.encoder = Encoder(config, config.length_scale, config.attn_scale)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, context=None, span=None, **unused):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        none = torch.zeros_like(input_ids)
        seen = self.seen(mask, none if context is None else context, none if span is None else span)
        states = self.encoder(self.words(input_ids), seen, self.position_bias(self.places(mask)))
        return BaseModelOutput(states[-1], tuple(states))


class CPM3Model(CPMModel):
    config_class = CPM3Config
    base_model_prefix = "cpm3"

    def __init__(self, config):
        super().__init__(config)
        c, self.scaled = config, config.length_scale
        self.prompt_embedding = nn.Embedding(c.prompt_types * c.prompt_length, c.hidden_size)
        self.input_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_bias = Bias(c, c.segment_types**2)
        self.encoder = Encoder(c, c.length_scale, c.attn_scale)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, context=None, span=None, segment=None, **unused):
        """A prompt stands before each row; it is of segment and span 0, and of the context if there is one."""
        c, rows = self.config, input_ids.shape[0]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        none = torch.zeros_like(input_ids)
        first = none.new_ones(rows, c.prompt_length)
        prompt = torch.arange(c.prompt_length, device=none.device) + c.prompt * c.prompt_length
        prompt = self.prompt_embedding(prompt) / (math.sqrt(c.hidden_size) if self.scaled else 1.0)
        x = torch.cat((prompt.expand(rows, -1, -1), self.words(input_ids)), 1)
        whole = torch.cat((first, mask.long()), 1)
        context = torch.cat((first * (context is not None), (none if context is None else context).long()), 1)
        span, segment = (torch.cat((0 * first, (none if y is None else y).long()), 1) for y in (span, segment))
        pairs = segment[:, :, None] * c.segment_types + segment[:, None, :]
        relation = pairs.masked_fill(segment[:, :, None] == segment[:, None, :], -1)
        states = self.encoder(x, self.seen(whole, context, span), self.position_bias(self.places(whole), relation))
        states = tuple(x[:, c.prompt_length :] for x in states)
        return BaseModelOutput(states[-1], states)


class CpmBeeModel(CPMModel):
    config_class = CpmBeeConfig
    base_model_prefix = "cpmbee"

    def __init__(self, config):
        super().__init__(config)
        self.input_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_bias = Bias(config, config.position_bias_num_segment_buckets)
        self.encoder = Encoder(config, True, True, 1.05)
        self.post_init()

    def turned(self, x, number):
        """Embeddings x (..., hidden_size) of tokens with a number below theirs."""
        size = x.shape[-1]
        turns = 10000.0 ** (-torch.arange(0, size, 2, device=x.device).float() / size)
        angles = (16.0 * number[..., None] * turns).repeat(*([1] * number.dim()), 2)
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * angles.cos().to(x.dtype) + half * angles.sin().to(x.dtype)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        input_id_sub=None,
        context=None,
        span=None,
        sample_ids=None,
        segment=None,
        num_segments=None,
        segment_rel=None,
        segment_rel_offset=None,
        **unused,
    ):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        none = torch.zeros_like(input_ids)
        number, context, span, sample, segment, first = (
            none if y is None else y.long()
            for y in (input_id_sub, context, span, sample_ids, segment, segment_rel_offset)
        )
        count = none + 1 if num_segments is None else num_segments.long()
        table = none.new_zeros(1, 1) if segment_rel is None else segment_rel.long()
        together = (sample[:, :, None] == sample[:, None, :]) & (span[:, :, None] == span[:, None, :])
        index = ((first + segment * count)[:, :, None] + segment[:, None, :]).masked_fill(~together, 0)
        relation = table.expand(len(mask), -1).gather(1, index.flatten(1)).view(index.shape).masked_fill(~together, 1)
        alike = (sample[:, :, None] == 0) | (sample[:, :, None] == sample[:, None, :])
        seen = self.seen(mask, context, span) & alike[:, None]
        x = self.turned(self.words(input_ids), number)
        states = self.encoder(x, seen, self.position_bias(self.places(mask), relation - 1))
        return BaseModelOutput(states[-1], tuple(states))


class CPMForCausalLM(CPMModel, GenerationMixin):
    """labels are the input's, -100 where there is none; token t is to predict label t + 1."""

    def __init__(self, config):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        tied = config.tie_word_embeddings
        self.scaled = self.base_model.scaled
        self.output_projection = None if tied else Matrix(config.hidden_size, config.vocab_size, self.scaled)
        self.post_init()

    def get_input_embeddings(self):
        return self.base_model.input_embedding

    def set_input_embeddings(self, table):
        self.base_model.input_embedding = table

    def get_output_embeddings(self):
        return self.output_projection

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, ext_table_ids=None, ext_table_sub=None, **inputs):
        """ext_table_ids, ext_table_sub (n,): of CPM-Bee, tokens with which the vocabulary goes on."""
        model = self.base_model
        states = model(input_ids, attention_mask, **inputs).hidden_states
        x = states[-1]
        if self.output_projection is not None:
            logits = self.output_projection(x)
        else:
            table = model.input_embedding.weight
            if ext_table_ids is not None:
                table = torch.cat((table, model.turned(table[ext_table_ids], ext_table_sub)))
            logits = F.linear(x / (math.sqrt(self.config.hidden_size) if self.scaled else 1.0), table)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits, states)


class CPM1ForCausalLM(CPMForCausalLM):
    config_class, base_model_prefix, model_class = CPM1Config, "cpm1", CPM1Model


class CPM3ForCausalLM(CPMForCausalLM):
    config_class, base_model_prefix, model_class = CPM3Config, "cpm3", CPM3Model


class CpmBeeForCausalLM(CPMForCausalLM):
    config_class, base_model_prefix, model_class = CpmBeeConfig, "cpmbee", CpmBeeModel
