"""What a description of a family of models can say, and what follows from it.

The descriptions themselves are the modules of `worker.convert.architectures`.
"""
