"""The benchmark: the worker against llama.cpp's own servers, on one machine, in one run."""
