"""Translating checkpoints of ModelCenter, CPM-Live and Megatron to Hugging Face's form.

A ModelCenter checkpoint is a config.json in its own spelling, which names no architecture, and `pytorch_model.pt`. A
`LegacyNetwork` describes how to recognise one of its networks, the names of its config fields in Hugging Face's form,
and the tensors from which each Hugging Face tensor is made. `hub.legacy` reads the files through it; everything
downstream sees a Hugging Face checkpoint.

translation.py     the machinery: LegacyRule, LegacyNetwork, and translating a config and tensors by them
tensor_rules.py    ModelCenter's names of tensors and Hugging Face's
networks.py        T5, RoBERTa, BERT, OPT, Llama, GPT-2 and GPT-J
cpm.py             the CPM networks
recognise.py       recognising the network of a checkpoint
megatron.py        CPM-2 as published, in files of Megatron's tensor parallelism

Differences beyond names:

- Post-norm layers (BERT, RoBERTa) are stored with each norm in the next layer: the norm "before" the attention of layer
  0 is that of the embeddings, the one after the last layer is `encoder.output_layernorm`.
- T5's files hold `shared` and each attention's output divided by 100, and the input and output of each feed-forward
  network divided by 10, so that half precision can hold its hidden states; these are multiplied back. `norm_eps` is
  kept as in the file, which is the published network's.
- GPT-J's files hold one norm twice, for attention and for the feed-forward network. transformers' GPT-J has one, so two
  that differ are an error.
- A tied head keeps a matrix that is never read and may be outdated; it is left out.
- The activation is that of config.json or ModelCenter's default: "gelu", gated or not, uses the error function;
  "gelu_new" uses tanh.
"""
