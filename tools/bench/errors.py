"""The benchmark's one exception: a sentence for the person who ran it."""


class BenchError(Exception):
    """What is wrong and what would be right, in one sentence; printed without a traceback."""
