"""One folder an operation. What they share:

registry      which implementation a platform gets, and XLA's options for GPUs
rows          bits of a row that do not depend on how many others there are
ragged        several sequences in one array
instructions  arithmetic in the GPU's own instructions
timing        of the benchmarks
"""
