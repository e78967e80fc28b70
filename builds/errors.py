"""The only error of this package: a message for the person who builds, never a traceback."""


class BuildError(Exception):
    """What went wrong and what would be right, in one or two sentences."""
