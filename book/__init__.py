"""The book: chapters, figures, widgets, build. Uses `kernels` and `gpt2`."""
