"""What samples are worth as text (docs/sample_quality.md).

samples    texts to be measured: a model's own, and pieces of real text
reference  the real text that those of a model are compared with
judge      what another language model needs for them
measures   the numbers, never perplexity without entropy and repetition
"""
