"""Building blocks shared by the architectures: plain nn.Modules, no architecture names inside.

The tokens of a batch are one axis (T, ...), and every layer takes the `Packed` that says where its sequences are.

packing.py, sequences.py, layout.py    Packed; where sequences begin and end; where tokens stand in the caller's input
block.py                               blocks: norm first, norm last, attention and feed-forward side by side
attention.py                           SelfAttention and CrossAttention
packed_attention.py                    attention over packed tokens: the choice of the fastest kernel
bucketed_attention.py                  where no kernel reads packed tokens: sequences of similar length, padded together
    (bucketed_sdpa.py: by torch; buckets.py: which sequences go together; attention_options.py: what all ways are told)
mask.py, relative.py, segments.py      what a token sees, and biases by distance or by segment
disentangled.py, distances.py          scores with products of distances: DeBERTa's attention, and its arithmetic
convolution.py                         a convolution along the tokens of each sequence
rotary.py                              rotary position embeddings
mlp.py, linear.py, norm.py, dropout.py, residual.py
                                       feed-forward networks, and what blocks are made of
cache.py                               keys and values of earlier tokens
heads/                                 what makes outputs and losses of hidden states
host_copies.py                         tensors that remember their copy on the host
modes.py                               training and evaluation as modes
"""
