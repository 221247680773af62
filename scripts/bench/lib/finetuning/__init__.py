"""Fine-tuning from the start of a process to an exported model, by this project's scripts and by peers.

tasks: one file per task, with its data, its flags and what a peer needs. prepare: writes data, tokenizer and initial
weights. contenders: runs this project and the peers. hf_trainer, trl_dpo and st_*: the peers. evaluate_export:
evaluates their exports.
"""
