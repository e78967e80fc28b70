"""The half hour on a GPU: what is built, tried and measured there, written before it begins."""
