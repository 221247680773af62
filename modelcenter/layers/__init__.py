"""Building blocks shared by the architectures: plain nn.Modules, no architecture names inside.

The tokens of a batch are one axis (T, ...), and every layer takes the `Packed` that says where its sequences are.

packing.py, sequences.py, layout.py    Packed; where sequences begin and end; where tokens are in the caller's input
block.py                               blocks: pre-norm, post-norm, norms on both sides, parallel
attention.py                           SelfAttention and CrossAttention
packed_attention.py                    attention over packed tokens: the choice of the fastest kernel
bucketed_attention.py                  attention where no kernel reads packed tokens: sequences of similar length are
                                       padded to rectangles (buckets.py: which ones; bucketed_sdpa.py: by torch's
                                       kernels; capped_attention.py: with a soft cap; attention_options.py: settings
                                       that all implementations take)
mask.py, relative.py, alibi.py, segments.py
                                       what a token sees, and biases by distance or by segment (by_length.py: the cache
                                       of tables over distances)
disentangled.py, distances.py          DeBERTa's attention, whose scores depend on distances, and its arithmetic
convolution.py                         a convolution along the tokens of each sequence
rotary.py, sinusoids.py                rotary and sinusoidal position embeddings
mlp.py, linear.py, norm.py, dropout.py, residual.py
                                       feed-forward networks, and the parts of blocks
pooling.py                             one vector per sequence
cache.py                               keys and values of earlier tokens
heads/                                 outputs and losses from hidden states
host_copies.py                         tensors that remember their copy on the host
modes.py                               a context manager for eval mode
"""
