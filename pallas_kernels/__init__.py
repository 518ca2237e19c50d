"""One folder an operation. What they share:

registry      which implementation a platform gets, and XLA's options for GPUs
rows          bits of a row that do not depend on how many others there are
ragged        several sequences in one array
instructions  arithmetic in the GPU's own instructions
offsets       into large arrays of bytes
timing        of the benchmarks
"""

from pallas_kernels.offsets import count_bytes_in_64_bits

count_bytes_in_64_bits()
