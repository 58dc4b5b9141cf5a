"""A GPT-2 trainer for paired experiments. Uses `kernels`; knows nothing of the book."""
