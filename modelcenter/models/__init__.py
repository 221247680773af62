"""One readable file per architecture: config, backbone and heads.

What architectures share:

base.py                     Model: the protocol (begin, units, end), and what every model can do
decoder.py                  decoder-only models: heads, inputs, outputs; llama.py also has the body of Qwen and Mistral
encoder.py                  encoders: what they share, and the body of BERT, RoBERTa, DistilBERT and ELECTRA
encoder_decoder.py          encoder-decoders (T5, BART, CPM-2), whose decoder's inputs are in decoder_inputs.py
two_configs.py              the config of those whose sides have one each (T5Gemma, composed.py)
bart_style.py               BART, mBART, Marian, M2M100, PEGASUS: what is alike in them
padding_positions.py        positions of RoBERTa, MPNet, ESM-1b, M2M100: counted from after the padding's
cpm.py                      the CPM decoders
cross_attention.py          decoders that may attend to an encoder; composed.py puts an encoder before one
double_heads.py, multiple_choice.py
                            heads and inputs of several texts per example
inputs.py, outputs.py       a batch on its way to `begin`; what a model returns
vocabulary.py               changing the number of words
trainer_protocol.py         what the Hugging Face Trainer asks of a model
"""
