"""One readable file per architecture: config, backbone and heads.

What architectures share:

base.py                     Model: the protocol (begin, units, end), and the methods of every model
decoder.py                  decoder-only models: heads, inputs, outputs; llama.py also has the body of Qwen and Mistral
encoder.py                  encoders: heads, inputs, outputs, and the body of BERT, RoBERTa, DistilBERT and ELECTRA
encoder_decoder.py          encoder-decoders (T5, BART, CPM-2); the inputs of their decoders are in decoder_inputs.py
two_configs.py              the config of encoder-decoders with one config per side (T5Gemma, composed.py)
bart_style.py               what BART, mBART, Marian, M2M100 and PEGASUS share
padding_positions.py        positions of RoBERTa, MPNet, ESM-1b, M2M100, which start after that of the padding
cpm.py                      the CPM decoders
cross_attention.py          decoders that may attend to an encoder; composed.py adds the encoder
double_heads.py, multiple_choice.py
                            heads and inputs with several texts per example
inputs.py, outputs.py       from a batch to the inputs of `begin`; what a model returns
vocabulary.py               resizing the vocabulary
trainer_protocol.py         what the Hugging Face Trainer asks of a model
"""
