"""From texts to batches.

A corpus is a list of documents. A tokenizer turns each into ids, rows of a
fixed length are made of them, and `batches` shuffles the rows with Grain. A
large corpus is tokenised once, by `preparation`, and then read from disk, by
`prepared`.
Corruption is not done here: it belongs to the jitted train step, where its key
is a function of (seed, step, row).
"""
