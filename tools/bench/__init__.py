"""The benchmark: the worker beside llama.cpp's own servers, on one machine, in one run."""
