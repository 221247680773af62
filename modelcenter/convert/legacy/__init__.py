"""Checkpoints of ModelCenter, CPM-Live and Megatron: what they are in Hugging Face's form.

A checkpoint of ModelCenter is a config.json in its own spelling, which names no architecture, and `pytorch_model.pt`.
A `LegacyNetwork` says how one of its networks is recognised, what its config fields are called in Hugging Face's form,
and of which tensors each Hugging Face tensor is made. `hub.legacy` reads the files through these; everything after
that sees a Hugging Face checkpoint.

translation.py     the means: LegacyRule, LegacyNetwork, and their translation of a config and of tensors
tensor_rules.py    ModelCenter's names of tensors beside Hugging Face's
networks.py        T5, RoBERTa, BERT, OPT, Llama, GPT-2 and GPT-J
cpm.py             the CPM networks
recognise.py       all networks, and which of them a checkpoint is of
megatron.py        CPM-2 as it was published, in files of Megatron's tensor parallelism

What is not only another name:

- Layers with the norm behind (BERT, RoBERTa) count it with the next layer: the norm "before" the attention of layer 0
  is that of the embeddings, the one after the last layer is `encoder.output_layernorm`.
- T5's files hold `shared` and each attention's output divided by 100, and what goes into and out of each feed-forward
  network by 10, so that half precision holds its hidden states; here they are multiplied back. `norm_eps` stays that of
  the file, which is the published network's.
- GPT-J's files hold one norm twice, for the attention and the network beside it. transformers' GPT-J has one, so two
  that differ are an error.
- A tied head keeps a matrix that is never read and may be stale; it is left out.
- The activation is what config.json says or ModelCenter takes by default: "gelu", gated or not, is by the error
  function; "gelu_new" is by tanh.
"""
