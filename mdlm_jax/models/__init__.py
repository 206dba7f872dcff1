"""Networks as two pure functions, and the directories that hold them.

network      transformer (`init`, `denoiser`), of a shape that config says;
             its parts layers, attention and experts; paired, its pass over
             noisy beside clean text
directories  directory.load reads any of them into a pretrained.Pretrained;
             published those of hubs, whose tables of names are in families
             and whose tensors shards reads; conversion writes them
parameters   param_tree (a key for each), placement (on several devices), int8,
             adapters
text         hub_tokenizer, chat_template
judges       causal and gguf_file: language models that only score samples
"""
