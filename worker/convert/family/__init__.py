"""How a family of models is described, and what follows from a description.

The descriptions themselves are the modules of `worker.convert.architectures`.
"""
